// What the views of spectra show: models, and a model's matrices, unpacked when it is first looked at.

const ALPHA_STOPS = [1, 2, 4, 6, 12]; // neutral at 4, the middle of 2 to 6 where well-trained layers are expected

scripts.start = () => {
  const { models, layouts, reasons, outliers, verdicts } = index;
  index.meanings = new Map(Object.entries(index.meanings)); // a stranger's column may be called like a method
  models.forEach((m, number) => {
    const { parent, nearest, stated, verdict } = m;
    Object.assign(m, { number, kind: m.relation || "from", parent: models[parent] ?? null, base: models[nearest?.[0]] ?? null, near: nearest?.[1] ?? null,
      common: nearest?.[2] ?? null, change: stated?.[1] ?? null, doubted: verdict === "other", words: verdicts[verdict], rank: Object.keys(verdicts).indexOf(verdict),
      tone: verdict === "other" ? "warn" : "", alphas: m.alphas !== false, why: new Map(m.bad), layout: layouts[m.layout] });
    m.absent = m.parent ? null : m.source;
    m.apart = m.parent && !m.stated;
    m.analysed = m.fitted + m.without;
    m.strip = () => stripRecord(m);
  });
  const named = (number, at) => ({ model: models[number], at, name: models[number].layout.names[at] });
  frames.models = models;
  frames.compared = models.filter((m) => m.verdict);
  frames.layers = outliers.layers.map(([number, at, alpha, z]) => ({ ...named(number, at), alpha, z, far: Math.abs(z) }));
  frames.odd = outliers.models.map(([number, z]) => ({ model: models[number], z, far: Math.abs(z) }));
  frames.unfitted = models.flatMap((m) => m.bad.filter(([, reason]) => !index.on_purpose[reason]).map(([at, reason]) => ({ ...named(m.number, at), reason: reasons[reason] })));
  frames.unnamed = models.flatMap((m) => m.notes.map(([at, column, reason]) => ({ ...named(m.number, at), fit: index.fits[column] ?? column, reason: reasons[reason] })));
};

// ---- a model's arrays: {alpha, D, figures: Map name -> Float32Array, spectra: [{x, y, bins} or null] or null}

const arrays = once(async (about) => {
  const [alpha, D, figures, spectra] = blob(`model-${about.number}`).split(" ");
  const layers = about.layout.names.length;
  const none = () => new Float32Array(layers).fill(NaN); // left out for the size of the page
  const all = figures ? await floats(figures) : null;
  return { alpha: alpha ? await floats(alpha) : none(), D: D ? await floats(D) : none(),
    figures: new Map(all ? about.figures.map((name, at) => [index.figures[name], all.subarray(at * layers, (at + 1) * layers)]) : []),
    spectra: spectra ? unpackSpectra(await inflate(spectra), layers) : null };
});

// The reverse of page.packed_spectra: for each layer {x, y, bins: shares of 64 equal bins of x} or null.
const BINS = 64;
function unpackSpectra(bytes, layers) {
  const head = new Float32Array(interleaved(bytes.subarray(0, layers * 24), 4));
  const bars = bytes.subarray(layers * 24, layers * (24 + BINS));
  const rest = bytes.subarray(layers * (24 + BINS));
  const axes = [0, 1].map((axis) => new Uint16Array(interleaved(rest.subarray(axis * rest.length / 2, (axis + 1) * rest.length / 2), 2)));
  let from = 0;
  return Array.from({ length: layers }, (_, layer) => {
    const [count, ...ends] = head.subarray(layer * 6, layer * 6 + 6);
    if (!count) return null;
    const [x, y] = axes.map((steps, axis) => {
      const [low, high] = ends.slice(2 * axis, 2 * axis + 2);
      let sum = 0;
      return Float64Array.from(steps.subarray(from, from + count), (step) => {
        sum = (sum + step) & 65535;
        return low + (high - low) * sum / 65535;
      });
    });
    from += count;
    const counts = Array.from(bars.subarray(layer * BINS, (layer + 1) * BINS), (each) => Math.expm1(each / 255 * Math.log1p(ends[4])));
    const all = counts.reduce((a, b) => a + b, 0) || 1;
    return { x, y, bins: counts.map((each) => each / all) };
  });
}

// ---- the view of one model: #/model/NUMBER/LAYER or #/model/NUMBER/vs/OTHER/LAYER

const ordered = (values) => values.filter(present).sort((a, b) => a - b);
// The value that a share of the values are below; undefined for none.
const quantile = (values, share) => { const sorted = ordered(values); return sorted[Math.floor(share * sorted.length)]; };
function median(values) {
  const sorted = ordered(values);
  return sorted.length ? (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2 : null;
}

// For each matrix of a model the alpha that another model has there; NaN where that has no such layer.
async function alphasThere(other, about) {
  const { alpha } = await arrays(other);
  const place = new Map(other.layout.keys.map((key, at) => [key, at]));
  return about.layout.keys.map((key) => alpha[place.get(key)] ?? NaN);
}

records.model = async ([number, ...words]) => {
  const about = index.models[Number(number)];
  const [layer, against] = words[0] === "vs" ? [words[2], index.models[Number(words[1])]] : [words[0], null];
  if (!about || against === undefined) return null;
  const { names, layer: depths, module, rows, columns, params } = about.layout;
  const own = await arrays(about);
  const theirs = against ? await alphasThere(against, about) : [];
  const matrices = names.map((name, at) => ({ number: at, name, depth: depths[at], module: module[at], rows: rows[at], columns: columns[at], weights: params[at],
    alpha: own.alpha[at], D: own.D[at], change: own.alpha[at] - theirs[at], theirs: theirs[at], figures: own.figures, sketch: own.spectra?.[at] ?? null,
    xmin: own.figures.get("xmin")?.[at], num_evals: own.figures.get("num_evals")?.[at], stable_rank: own.figures.get("stable_rank")?.[at],
    reason: about.why.has(at) ? index.reasons[about.why.get(at)] : null }));
  const given = /^\d+$/.test(layer) && Number(layer) < names.length ? Number(layer) : null;
  Object.assign(state, { model: about.number, against: against?.number ?? "", layer: given ?? Math.max(0, own.alpha.findIndex(present)) });
  const related = index.models.filter((m) => m !== about && (m === against || m.layout === about.layout || m === about.parent || m === about.base || m.parent === about));
  const role = (m) => m === about.parent ? " (stated base)" : m === about.base ? " (nearest base)" : "";
  const whyNone = own.spectra ? "No spectrum is stored for this matrix."
    : about.stored ? "The spectra of this model were left out to keep the page small; gpuherd esd plot draws any."
      : "No spectra are stored for this model: results that were imported or made by an older gpuherd have none.";
  return { ...about, against, matrices, related: related.length > 0, options: [["", "…"], ...related.map((m) => [m.number, m.id + role(m)])],
    has: Object.fromEntries([...own.figures.keys()].map((name) => [name, true])), other: about.base && about.base !== about.parent && about.stated,
    outside: depths.includes(null), deep: matrices.filter(({ depth, alpha }) => depth !== null && present(alpha)).length > 1, depths: depthRecord(matrices),
    middle: median(matrices.map(({ change }) => Math.abs(change))), histogram: () => histograms([about], (model) => model ? "this model" : "all models of the run"), matrix: (at) => matrixRecord(about, matrices, at, whyNone) };
};

// A matrix with all its figures in words.
function matrixRecord(about, matrices, at, whyNone) {
  const one = matrices[at];
  const values = [...one.figures].map(([name, all]) => ({ name, value: all[at] })).filter(({ value }) => present(value));
  const { alpha_lo: low, alpha_hi: high, bulk_max: edge, num_pl_spikes: tail } = Object.fromEntries(values.map(({ name, value }) => [name, value]));
  const cells = [{ name: "M × N", text: `${one.rows} × ${one.columns}` }, { name: "weights", text: many(one.weights) }, ...values.map(({ name, value }) => ({ name, text: figure(value, 4) }))]
    .map((each) => ({ ...each, why: index.meanings.get(each.name) ?? null }));
  return { ...one, thin: about.left_out, cells, edge, spectrum: one.sketch ? spectrumRows(one.sketch, { ...one, edge, tail }) : null, whyNone: one.sketch ? null : whyNone, fitted: present(one.alpha), before: at - 1, after: at + 1, first: at === 0, last: at === matrices.length - 1,
    interval: present(low) && present(high) && figure(low) !== figure(high) ? ` (${figure(low)} to ${figure(high)} over near-ties)` : null,
    failed: about.notes.filter(([layer]) => layer === at).map(([, column, why]) => ({ fit: index.fits[column] ?? column, reason: index.reasons[why] })),
    meanings: ["alpha", "D", ...cells.map(({ name }) => name)].filter((name) => index.meanings.has(name)).map((name) => ({ name, why: index.meanings.get(name) })) };
}

changed.layer = (at) => {
  history.replaceState(null, "", `#/model/${state.model}${state.against === "" ? "" : `/vs/${state.against}`}/${at}`);
  requestAnimationFrame(() => document.getElementById("matrix")?.scrollIntoView({ block: "nearest" }));
};
changed.against = (number) => {
  location.hash = `#/model/${state.model}${number === "" ? "" : `/vs/${number}`}/${state.layer}`;
  return true;
};
