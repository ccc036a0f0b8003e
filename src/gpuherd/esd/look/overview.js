// The views over all models: the table, lineage, outliers, failures.

const chosenModels = new Set();

function link(number, word = null, layer = null) {
  return make("a", { href: `#/model/${number}${layer === null ? "" : `/${layer}`}` }, word ?? index.models[number].id);
}

async function modelsView() {
  if (!chosenModels.size && index.models.length <= 4) index.models.forEach((m) => chosenModels.add(m.number));
  const overlay = make("div");
  let drawn = 0;
  const columns = [
    ...(index.models.length > 1 ? [{ word: "", kind: "pick", cell: (m) => pick(m) }] : []),
    { word: "model", kind: "name", key: (m) => m.id, cell: (m) => link(m.number) },
    { word: "relation", kind: "rare", key: (m) => m.relation, cell: (m) => m.relation || "–" },
    { word: "matrices", kind: "num", why: "matrices with a valid fit, of those that were analysed", key: (m) => m.fitted, cell: (m) => m.fitted + (m.without ? ` of ${m.fitted + m.without}` : "") },
    { word: "weights", kind: "num rare", why: "weights in all analysed matrices", key: (m) => m.params, cell: (m) => many(m.params) },
    ...(index.models.some((m) => present(m.covered)) ? [{ word: "covered", kind: "num rare", why: "share of the checkpoint's weights that are in matrices with a valid fit", key: (m) => m.covered, cell: (m) => percent(m.covered) }] : []),
    { word: "mean alpha", kind: "num rare", why: "mean over all matrices with a valid fit", key: (m) => m.mean, cell: (m) => figure(m.mean) },
    { word: "median", kind: "num", why: "median alpha over all matrices with a valid fit", key: (m) => m.median, cell: (m) => figure(m.median) },
    { word: "least", kind: "num rare", why: "least alpha of a matrix", key: (m) => m.min, cell: (m) => figure(m.min) },
    { word: "largest", kind: "num rare", why: "largest alpha of a matrix", key: (m) => m.max, cell: (m) => figure(m.max) },
    { word: "range", kind: "range rare", why: "from the least to the largest alpha, 1 to 16 on a logarithmic scale; dot: median; shaded: 2 to 6", cell: (m) => present(m.median) ? rangeBar(m) : "" },
    { word: "median D", kind: "num rare", why: index.meanings.D, key: (m) => m.d, cell: (m) => figure(m.d) },
    { word: "without fit", kind: "num rare", why: "matrices that were analysed but have no valid fit; the reasons are under Failures", key: (m) => m.without, cell: (m) => m.without ? make("span", { class: "bad" }, String(m.without)) : "0" },
  ];
  const made = table({ columns, rows: index.models, label: "models", words: (m) => `${m.id} ${m.relation} ${m.source ?? ""}`,
    hint: "filter by id, relation or source", mark: (m) => chosenModels.has(m.number) });

  function pick(m) {
    const box = make("input", { type: "checkbox", "aria-label": `show ${m.id} in the histogram`, onchange: () => {
      if (box.checked) chosenModels.add(m.number); else chosenModels.delete(m.number);
      box.closest("tr").classList.toggle("chosen", box.checked);
      drawOverlay().then(drawWaiting);
    } });
    box.checked = chosenModels.has(m.number);
    return box;
  }

  async function drawOverlay() {
    const turn = ++drawn;
    const shown = [...chosenModels].slice(-LINES.length);
    const pooled = index.models.length > 1;
    const series = pooled ? [{ word: "all models", counts: index.pooled, colour: "var(--soft)", fill: true }] : [];
    const opened = await Promise.all(shown.map(model));
    if (turn !== drawn) return; // other models were ticked meanwhile
    opened.forEach((each, at) => series.push({ word: index.models[shown[at]].id, counts: alphaCounts(each.alpha), colour: LINES[at] }));
    const keys = [...(pooled ? [[`all ${index.models.length} models`, "var(--soft)"]] : []), ...shown.map((number, at) => [index.models[number].id, LINES[at]])];
    overlay.replaceChildren(...[...alphaHistogram(series, { height: 190, label: "alpha of all matrices, and of the chosen models" }), legend(keys),
      !pooled ? null : make("p", { class: "note" }, shown.some((number) => !withAlphas(index.models[number])) ? "The matrices of some chosen models are not in this page: they have no line." : shown.length < chosenModels.size ? `The last ${shown.length} of ${chosenModels.size} chosen models are drawn.` : "Tick models in the table to lay their histograms over each other.")].filter(Boolean));
  }

  await drawOverlay();
  return [make("section", { class: "card" }, make("h3", {}, "How alpha is distributed"), overlay), make("section", { class: "card" }, made)];
}

const FOLDED = 12;
const MOST_FAMILIES = 100;

function lineageView() {
  // One scale for all strips: four times the change that fine-tunes of this run typically have.
  const most = Math.max(0.02, Math.min(2, 4 * (median(index.models.map((m) => m.stated?.[1] ?? null)) ?? 0)));
  const children = new Map();
  const roots = [];
  for (const m of index.models) {
    const key = m.parent === null ? (m.source ? `?${m.source}` : null) : m.parent;
    if (key === null) { roots.push(m); continue; }
    if (!children.has(key)) children.set(key, []);
    children.get(key).push(m);
  }
  const shown = new Set();
  const doubts = (m) => (children.get(m.number) ?? []).filter(contradicted).length;
  const families = roots.filter((m) => children.has(m.number)).sort((a, b) => doubts(b) - doubts(a)).map(branch);
  for (const [key, members] of children) {
    if (typeof key === "string") families.push(make("li", {}, make("div", { class: "branch" }, make("span", {}, key.slice(1)), make("span", { class: "pill" }, "not in this run")), folded(members)));
  }
  for (const m of index.models) if (m.parent !== null && !shown.has(m.number)) families.push(branch(m)); // a circle in the list
  const tree = make("ul", { class: "tree" }, ...families.slice(0, MOST_FAMILIES));
  const rest = families.length > MOST_FAMILIES ? make("button", { type: "button", onclick: () => { tree.append(...families.slice(MOST_FAMILIES)); rest.remove(); } }, `Show ${families.length - MOST_FAMILIES} more families`) : null;

  function list(members) {
    return make("ul", { class: "tree" }, ...members.filter((m) => !shown.has(m.number)).map(branch));
  }

  // A large family is shut at first; those whose alphas contradict what is stated come first.
  function folded(members) {
    const inside = list([...members].sort((a, b) => contradicted(b) - contradicted(a)));
    if (members.length <= FOLDED) return inside;
    return make("details", {}, make("summary", {}, `${members.length} models`, members.some(contradicted) ? make("span", { class: "warn" }, `, ${members.filter(contradicted).length} nearer to another base`) : ""), inside);
  }

  function branch(m) {
    shown.add(m.number);
    const strip = make("span", { class: "strip" });
    if (m.parent !== null && m.stated && withAlphas(m) && withAlphas(index.models[m.parent])) whenSeen(strip, async () => {
      const [own, base] = await Promise.all([model(m.number), model(m.parent)]);
      const change = difference(m, own, index.models[m.parent], base);
      strip.title = largestChange(m, change);
      strip.replaceChildren(changeStrip(change, most));
    });
    const words = make("div", { class: "branch" }, link(m.number), m.relation ? make("span", { class: "pill" }, m.relation) : null,
      m.stated ? strip : null,
      m.stated ? make("a", { href: `#/model/${m.number}/vs/${m.parent}`, title: "alpha minus that of its base, by layer" }, `median |Δalpha| ${figure(m.stated[1], 4)}`) : null,
      contradicted(m) ? make("span", { class: "warn" }, "nearer to ", link(m.nearest[0]), ` (${figure(m.nearest[1], 4)})`) : null,
      m.parent !== null && !m.stated ? make("span", { class: "soft" }, "too few layers in common") : null);
    return make("li", {}, words, children.has(m.number) ? folded(children.get(m.number)) : null);
  }

  const out = [];
  out.push(make("section", { class: "card" }, make("h3", {}, "Stated lineage"),
    make("p", { class: "note" }, `Base, what was made of it, and by how much alpha changed: each bar is a matrix, up where alpha grew, of full height from a change of ${figure(most)} on. A fine-tune's median |Δalpha| is typically below 0.01, that of an unrelated model near 0.75.`),
    families.length ? tree : make("p", { class: "soft" }, "No model of this run is said to come from another."), rest));
  const near = index.models.filter((m) => m.verdict).sort((a, b) => VERDICTS[a.verdict].rank - VERDICTS[b.verdict].rank);
  if (near.length) {
    const columns = [
      { word: "model", kind: "name", key: (m) => m.id, cell: (m) => make("div", {}, link(m.number), make("div", { class: `narrow ${contradicted(m) ? "warn" : "soft"}` }, VERDICTS[m.verdict].words)) },
      { word: "nearest base", kind: "name", key: (m) => index.models[m.nearest[0]].id, cell: (m) => link(m.nearest[0]) },
      { word: "median |Δ|", kind: "num", why: "median over the common matrices of |alpha − alpha of the nearest base|", key: (m) => m.nearest[1], cell: (m) => make("a", { href: `#/model/${m.number}/vs/${m.nearest[0]}`, title: "by layer" }, figure(m.nearest[1], 4)) },
      { word: "verdict", kind: "rare", key: (m) => VERDICTS[m.verdict].rank, cell: (m) => make("span", { class: contradicted(m) ? "warn" : null }, VERDICTS[m.verdict].words) },
      { word: "stated base", kind: "name rare", key: (m) => m.source, cell: (m) => m.parent !== null ? link(m.parent) : m.source ? `${m.source} (not in this run)` : "–" },
      { word: "its median |Δ|", kind: "num rare", why: "median over the common matrices of |alpha − alpha of the stated base|", key: (m) => m.stated?.[1] ?? null, cell: (m) => m.stated ? make("a", { href: `#/model/${m.number}/vs/${m.parent}`, title: "by layer" }, figure(m.stated[1], 4)) : "–" },
      { word: "matrices", kind: "num rare", why: "matrices with a fit that both have", key: (m) => m.nearest[2], cell: (m) => String(m.nearest[2]) },
    ];
    out.unshift(make("section", { class: "card" }, make("h3", {}, "Nearest base"), tally(near),
      make("p", { class: "note" }, "Of the bases of this run with at least 90 % of the model's layers, the one with the least median |Δalpha|. Close: below 0.05. The stated base is doubted where it is not close and another is at most half as far. In published results a model's own base is the nearest in 95 % of cases."),
      table({ columns, rows: near, label: "nearest base", page: 20, words: (m) => `${m.id} ${m.source ?? ""} ${index.models[m.nearest[0]].id} ${VERDICTS[m.verdict].words}` })));
  }
  return out;
}

// What lineage.Kinship.verdict means, what a reader should see first coming first.
const VERDICTS = {
  other: { rank: 0, words: "the stated base is probably wrong" },
  unclear: { rank: 1, words: "no base is close, so it can't be told" },
  close: { rank: 2, words: "close: probably its base, or a copy" },
  "stated, far": { rank: 3, words: "as stated, but not close" },
  "as stated": { rank: 4, words: "as stated" },
  far: { rank: 5, words: "not close: probably unrelated" },
};

// How many models have each verdict, in a sentence.
function tally(near) {
  const counts = Object.entries(VERDICTS).map(([name, { words }]) => [near.filter((m) => m.verdict === name).length, words, name]).filter(([count]) => count);
  return make("p", {}, ...counts.flatMap(([count, words, name], at) => [at ? "; " : "", make("span", { class: name === "other" ? "warn" : null }, make("b", {}, count.toLocaleString("en")), `: ${words}`)]), ".");
}

// Whether alpha of its matrices is in the page.
const withAlphas = (m) => m.alphas !== false;

const contradicted = (m) => m.verdict === "other";

// The matrix that changed most, in words.
function largestChange(m, change) {
  let most = -1;
  change.forEach((each, at) => { if (present(each) && (most < 0 || Math.abs(each) > Math.abs(change[most]))) most = at; });
  return most < 0 ? "" : `largest change ${change[most] > 0 ? "+" : ""}${figure(change[most], 4)} at ${index.layouts[m.layout].names[most]}`;
}

function outliersView() {
  const layerColumns = [
    { word: "model", kind: "name", key: (o) => index.models[o[0]].id, cell: (o) => link(o[0]) },
    { word: "matrix", kind: "name", key: (o) => nameOf(o), cell: (o) => link(o[0], nameOf(o), o[1]) },
    { word: "alpha", kind: "num", key: (o) => o[2], cell: (o) => figure(o[2]) },
    { word: "model's median", kind: "num rare", key: (o) => index.models[o[0]].median, cell: (o) => figure(index.models[o[0]].median) },
    { word: "z", kind: "num", key: (o) => Math.abs(o[3]), cell: (o) => `${o[3] > 0 ? "+" : ""}${o[3].toFixed(1)}` },
  ];
  const modelColumns = [
    { word: "model", kind: "name", key: (o) => index.models[o[0]].id, cell: (o) => link(o[0]) },
    { word: "median alpha", kind: "num", key: (o) => index.models[o[0]].median, cell: (o) => figure(index.models[o[0]].median) },
    { word: "z", kind: "num", key: (o) => Math.abs(o[1]), cell: (o) => `${o[1] > 0 ? "+" : ""}${o[1].toFixed(1)}` },
  ];
  const { layers, more, models: odd } = index.outliers;
  const explained = make("p", { class: "note" }, "Robust z-score of ln(alpha − 1): distance from the median in MADs, scaled so that it is in standard deviations for a normal distribution; |z| > 3.5 is listed (Iglewicz and Hoaglin 1993). A layer is compared with the layers of its own model, a model's median alpha with those of the other models.");
  return [
    make("section", { class: "card" }, make("h3", {}, "Models"), explained,
      odd.length ? table({ columns: modelColumns, rows: odd, label: "models that stand apart" }) : make("p", { class: "soft" }, index.models.length < 8 ? "Fewer than 8 models: too few to say which stands apart." : "No model stands apart.")),
    make("section", { class: "card" }, make("h3", {}, "Layers"),
      layers.length ? table({ columns: layerColumns, rows: layers, label: "layers that stand apart", words: (o) => `${index.models[o[0]].id} ${nameOf(o)}` }) : make("p", { class: "soft" }, "No layer stands apart from its model."),
      more ? make("p", { class: "note" }, `${more} more, less far out, are not listed.`) : null),
  ];
}

const fitOf = (column) => index.fits[column] ?? column;

const nameOf = ([number, layer]) => index.layouts[index.models[number].layout].names[layer];

function failuresView() {
  const columns = [
    { word: "model", kind: "name", key: (f) => f[0], cell: (f) => f[0] },
    { word: "kind", key: (f) => f[1], cell: (f) => f[1] },
    { word: "reason", kind: "name", key: (f) => f[2], cell: (f) => f[2] },
  ];
  const all = index.models.flatMap((m) => m.bad.map(([layer, reason]) => [m.number, layer, reason]));
  const rows = all.filter((r) => !index.on_purpose[r[2]]).map(([number, layer, reason]) => [number, layer, index.reasons[reason]]);
  const notes = index.models.flatMap((m) => m.notes.map(([layer, column, reason]) => [m.number, layer, index.reasons[reason], fitOf(column)]));
  const left = new Map();
  for (const [, , reason] of all) if (index.on_purpose[reason]) left.set(reason, (left.get(reason) ?? 0) + 1);
  const layerColumns = [
    { word: "model", kind: "name", key: (r) => index.models[r[0]].id, cell: (r) => link(r[0]) },
    { word: "matrix", kind: "name", key: (r) => nameOf(r), cell: (r) => link(r[0], nameOf(r), r[1]) },
    { word: "reason", kind: "name", key: (r) => r[2], cell: (r) => r[2] },
  ];
  const leftColumns = [
    { word: "reason", kind: "name", key: (r) => r[0], cell: (r) => r[0] },
    { word: "matrices", kind: "num", key: (r) => r[1], cell: (r) => r[1].toLocaleString("en") },
  ];
  return [
    make("section", { class: "card" }, make("h3", {}, "Models without a result"),
      index.failures.length ? table({ columns, rows: index.failures, label: "failures", words: (f) => f.join(" ") }) : make("p", { class: "soft" }, "Every model has a result.")),
    make("section", { class: "card" }, make("h3", {}, "Matrices without a valid fit"),
      rows.length ? table({ columns: layerColumns, rows, label: "matrices without a fit", words: (r) => `${index.models[r[0]].id} ${nameOf(r)} ${r[2]}` }) : make("p", { class: "soft" }, "Every analysed matrix has a valid fit.")),
    notes.length ? make("section", { class: "card" }, make("h3", {}, "Further fits that failed"),
      make("p", { class: "note" }, "These matrices have an alpha; what is named has no value."),
      table({ columns: [...layerColumns.slice(0, 2), { word: "fit", key: (r) => r[3], cell: (r) => r[3] }, layerColumns[2]], rows: notes, label: "further fits that failed", words: (r) => `${index.models[r[0]].id} ${nameOf(r)} ${r[3]} ${r[2]}` })) : null,
    left.size ? make("section", { class: "card" }, make("h3", {}, "Left out on purpose"),
      table({ columns: leftColumns, rows: [...left].map(([reason, count]) => [index.reasons[reason], count]), sort: 1, descending: true, label: "left out on purpose" })) : null,
  ].filter(Boolean);
}

// Does the work when the element comes into view: 3,000 strips are not drawn at once.
function whenSeen(element, work) {
  const watcher = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) { watcher.disconnect(); work(); }
  }, { rootMargin: "200px" });
  watcher.observe(element);
}
