// What the charts of spectra are made of (charts.py says how they look), and how alpha changed.

// A matrix's sketch and fit, by what is drawn of it. The law ends at the largest eigenvalue, or where it leaves the frame.
function spectrumRows({ x, y, bins }, { alpha, xmin, edge, tail, num_evals: count = Infinity }) {
  const [least, most] = [x[0], x.at(-1)];
  const [xs, ys] = [x, y].map((logs) => Array.from(logs, (at) => 10 ** at));
  const together = count < 120 ? 4 : count < 1000 ? 2 : 1; // bins that are one, so that each holds some of the eigenvalues
  const width = (most - least) * together / bins.length || 1;
  const shares = Array.from({ length: bins.length / together }, (_, at) => bins.slice(at * together, (at + 1) * together).reduce((a, b) => a + b));
  const floor = Math.min(...shares.filter(Boolean)) / width / 2;
  const bars = shares.map((share, at) => ({ x: 10 ** (least + at * width), x2: 10 ** (least + (at + 0.94) * width), y: share / width, floor })).filter((bar) => bar.y);
  const law = (start, low) => [xmin, Math.min(xs.at(-1), alpha > 1 ? xmin * (low / start) ** (1 / (1 - alpha)) : Infinity)].map((at) => ({ x: at, y: start * (at / xmin) ** (1 - alpha) }));
  const fitted = present(alpha) && present(xmin) && xmin > 0;
  // The share of eigenvalues in the tail: as counted, else read off the curve.
  const begin = present(tail) && Number.isFinite(count) ? tail / count : ys[xs.findIndex((at) => at >= xmin)] ?? ys.at(-1);
  return { curve: xs.map((at, place) => ({ x: at, y: ys[place] })), bars, edge: edge > xs[0] && edge < xs.at(-1) ? [{ x: edge }] : [],
    law: fitted ? law(begin, Math.min(...ys)) : [], tail: fitted ? law(begin * (alpha - 1) * Math.LN10, floor) : [],
    xmin: fitted ? [{ x: xmin, words: `xmin ${figure(xmin)}`, right: Math.log10(xmin) > (least + most) / 2 }] : [] };
}

// Counts of alpha in bins as those of the pool: of a quarter from 1 on, what is above the last in one more.
function alphaCounts(alphas) {
  const counts = index.pooled.map(() => 0);
  for (const alpha of alphas) if (present(alpha)) counts[Math.min(counts.length - 1, Math.max(0, Math.floor((alpha - 1) * 4)))]++;
  return counts;
}

// Histograms of all models of the run and of some of them, over each other.
async function histograms(shown, wordOf) {
  const all = await Promise.all(shown.map(arrays));
  const row = (model, counts, colour) => ({ series: wordOf(model), colour, shares: counts.map((count) => count / Math.max(1, counts.reduce((a, b) => a + b, 0))) });
  const pool = index.models.length > 1 ? [row(null, index.pooled, "var(--soft)")] : [];
  const series = [...pool, ...all.map(({ alpha }, at) => row(shown[at], alphaCounts(alpha), index.colours[at]))];
  const place = (bin) => 1 + bin / 4;
  const corners = (some) => some.flatMap(({ shares, ...about }) => [...shares, 0].map((y, bin) => ({ ...about, dash: [1, 0], x: place(bin), y })));
  const bins = index.pooled.map((_, bin, { length }) => ({ x: place(bin), x2: place(bin + 1), tip: [`alpha ${place(bin)} ${bin + 1 < length ? `to ${place(bin + 1)}` : "and above"}`,
    ...series.map(({ series: word, shares }) => `${word}: ${percent(shares[bin])}`)].join("\n") }));
  return { areas: corners(pool), steps: corners(series), bins, series };
}

// Those of the models that a reader has ticked: the last of them, as many as there are colours.
records.models = () => ({ histogram: async (drawn) => {
  const shown = drawn.slice(-index.colours.length).map((number) => index.models[number]);
  const words = !shown.every(({ alphas }) => alphas) ? "The matrices of some chosen models are not in this page: they have no line."
    : shown.length < drawn.length ? `The last ${shown.length} of ${drawn.length} chosen models are drawn.` : "Tick models in the table to lay their histograms over each other.";
  const found = await histograms(shown, (model) => model ? model.id : `all ${index.models.length} models`);
  return { ...found, note: index.models.length > 1 ? words : null };
} });

// Alpha over depth: its rows, and the commonest modules. One wild layer must not flatten all others: what is above the
// 98th percentile lies on the upper edge.
function depthRecord(matrices) {
  const known = matrices.filter(({ depth, alpha }) => depth !== null && present(alpha));
  const top = Math.max(6.5, quantile(known.map(({ alpha }) => alpha), 0.98) * 1.1);
  const above = known.filter(({ alpha }) => alpha > top).length;
  const all = [...Map.groupBy(known, ({ module }) => module)].sort(([, a], [, b]) => b.length - a.length);
  const modules = all.slice(0, index.colours.length).map(([word, { length }], at) => ({ word, colour: index.colours[at], few: length < 60 }));
  const rest = all.length - modules.length;
  const note = ["Shaded: alpha 2 to 6.", above ? `${above} above ${figure(top)} ${above === 1 ? "lies" : "lie"} on the upper edge.` : "",
    rest > 0 ? `${rest} more modules are in the median only.` : ""].filter(Boolean).join(" ");
  const rows = known.map(({ depth, module, alpha }) => ({ depth, module, alpha: Math.min(alpha, top), tip: `layer ${depth}, ${module}: alpha ${figure(alpha)}` }));
  const lines = rows.flatMap((row) => modules.filter(({ word }) => word === row.module).map(({ colour, few }) => ({ ...row, colour, few })));
  return { rows, lines, dots: lines.filter(({ few }) => few), modules, shade: [{ from: 2, to: 6 }], note };
}

// Where an alpha lies from 1 to 16, in logarithms, and its colour.
FORMATS.place = (value) => `${100 * Math.max(0, Math.min(1, Math.log(value) / Math.log(16)))}%`;
FORMATS.ramp = (value) => ramp(value, ALPHA_STOPS);

// A model's change from its base: a bar a matrix, up where alpha grew.
async function stripRecord(model) {
  if (!model.alphas || !model.parent.alphas) return null;
  const [own, theirs] = await Promise.all([arrays(model), alphasThere(model.parent, model)]);
  const values = theirs.map((alpha, at) => own.alpha[at] - alpha);
  const known = [...values.keys()].filter((at) => present(values[at]));
  const [largest] = known.toSorted((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
  const bars = known.map((x) => ({ x, y: Math.min(0, -values[x]), height: Math.abs(values[x]), colour: values[x] > 0 ? "#d9822b" : "#3f86c0" }));
  return { bars, count: values.length, far: known.length && `largest change ${values[largest] > 0 ? "+" : ""}${figure(values[largest], 4)} at ${model.layout.names[largest]}` };
}
