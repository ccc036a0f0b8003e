// Every policy with its figures, and which differences are beyond chance.

function summaryView() {
  if (!index.rows.length) return [make("section", { class: "card" }, make("p", {}, "No policy is evaluated yet."))];
  const others = index.rows.length - index.rows.filter((row) => row.own).length;
  const holder = make("div");
  const fill = () => {
    const rows = index.rows.filter((row) => row.own || state.every);
    holder.replaceChildren(table({ columns: summaryColumns(rows), rows, label: "policies", words: policyWords }).root);
  };
  const figures = make("label", { class: "together" }, make("input", { type: "checkbox", checked: state.figures, onchange: (event) => { state.figures = event.target.checked; fill(); } }), "all figures");
  const every = others ? make("label", { class: "together" }, make("input", { type: "checkbox", checked: state.every, onchange: (event) => { state.every = event.target.checked; fill(); } }), `with ${others} at other etas`) : null;
  fill();
  const share = `${Number((100 * index.confidence).toPrecision(3))} %`;
  return [make("section", { class: "card" }, make("div", { class: "bar" }, make("h2", {}, "Policies"), every, figures), holder,
    make("p", { class: "note" }, `Below a figure its ${share} interval, by resampling the problems, and the seeds where there are several. Of a guided policy the row is at its own eta, which was set before anything was evaluated.`),
    meanings()), ...index.comparisons.map(differencesCard)];
}

function meanings() {
  return make("details", { class: "how" }, make("summary", {}, "What the figures mean"), make("dl", {},
    ...figureNames(index.rows).flatMap((name) => [make("dt", {}, name), make("dd", {}, meaning(name))]),
    make("dt", {}, "a tie of a vote"), make("dd", {}, [...new Set(index.rows.map((row) => TIES[row.tie]))].join("; ")),
    make("dt", {}, "how KL was had"), make("dd", {}, [...new Set(index.rows.map((row) => ESTIMATORS[row.estimator] ?? "not measured"))].join("; "))));
}

const TIES = { share: "earns the share of the tied answers that is right", first: "goes to the answer that was drawn first", unique: "earns nothing: the majority must be unique" };
const ESTIMATORS = { exact: "exactly: summed over the vocabulary at each visited position", k1: "estimated from the sampled tokens' log-probs, k1", k3: "estimated from the sampled tokens' log-probs, k3" };

function summaryColumns(rows) {
  const column = (name, rare) => {
    const range = span(rows.map((row) => row.figures[name]), name);
    return { word: name, why: meaning(name), num: true, rare, key: (row) => row.figures[name]?.value, cell: (row) => figureCell(row, name, range) };
  };
  const own = (name) => column(name, ["first", "kl a token", "tokens", "finished"].includes(name) || /^pass@(?!1$)/.test(name));
  return [
    { word: "algorithm", class: "name", key: (row) => row.algorithm, cell: (row) => make("span", {}, mark(row.algorithm), row.algorithm) },
    { word: "data set", class: "name", key: dataWords, cell: dataWords, rare: true },
    { word: "model", key: (row) => row.family, cell: (row) => row.family, rare: true },
    { word: "round", num: true, key: (row) => row.round, cell: (row) => present(row.round) ? row.round : "–" },
    { word: "eta", why: "of the papers: small guides strongly", num: true, key: (row) => row.eta, cell: (row) => present(row.eta) ? axisWords(row.eta) : "–" },
    ...(state.figures ? figureNames(rows) : mainFigures(rows)).map(own),
    { word: "n", why: "problems × samples of each, and seeds", num: true, rare: true, key: (row) => row.problems * row.samples * row.seeds.length, cell: (row) => `${row.problems} × ${row.samples}${row.seeds.length > 1 ? ` × ${row.seeds.length} seeds` : ""}` },
    { word: "tokens/s", why: "while it was evaluated", num: true, rare: true, key: (row) => row.speed, cell: (row) => present(row.speed) ? row.speed.toFixed(0) : "–" },
    { word: "GPU-h", why: "of its evaluation", num: true, rare: true, key: (row) => row.gpuHours, cell: (row) => figure(row.gpuHours) },
  ];
}

function mark(algorithm) {
  const { colour: tint, dash } = algorithmLine(algorithm);
  return svg("svg", { viewBox: "0 0 22 6", class: "key-line", "aria-hidden": "true" }, svg("line", { x1: 0, x2: 22, y1: 3, y2: 3, stroke: tint, "stroke-width": 2.5, "stroke-dasharray": dash }));
}

function figureCell(row, name, range) {
  const found = row.figures[name];
  if (!present(found?.value)) return make("span", { title: found?.note }, "–");
  const digits = isShare(name) || name === "reward" ? 3 : 2;
  const told = (value) => found.value !== 0 && Math.abs(found.value) < 10 ** -digits ? axisWords(value) : fixed(value, digits);
  const seeds = row.bySeed[name];
  const why = [found.note, seeds ? `by seed: ${seeds.map((each) => fixed(each, digits)).join(", ")}` : null].filter(Boolean).join("; ");
  return make("span", { title: why || null }, told(found.value),
    make("span", { class: "ends" }, found.ends ? `${told(found.ends[0])} to ${told(found.ends[1])}` : "no interval"),
    isShare(name) && !isNarrow() ? whisker(found, range, { width: 90, label: name }) : null);
}

function differencesCard(comparison) {
  const rows = comparison.differences;
  if (!rows.length) return null;
  const farthest = Math.max(...rows.flatMap((each) => [each.figure.value, ...(each.figure.ends ?? [])]).filter(present).map(Math.abs)) || 1;
  const range = [-farthest, farthest];
  const clear = (each) => present(each.holm) && each.holm < 0.05;
  const columns = [
    { word: "difference", class: "name", key: (each) => each.one, cell: (each) => `${each.one} − ${each.other}` },
    { word: comparison.metric, num: true, key: (each) => each.figure.value, cell: (each) => make("span", { title: each.figure.note }, fixed(each.figure.value), make("span", { class: "ends" }, each.figure.ends ? `${fixed(each.figure.ends[0])} to ${fixed(each.figure.ends[1])}` : "no interval")) },
    { word: "", rare: true, cell: (each) => whisker(each.figure, range, { at: 0, faint: !clear(each), label: `${each.one} − ${each.other}` }), class: "picture" },
    { word: "p", why: "two-sided", num: true, rare: true, key: (each) => each.p, cell: (each) => probabilityWords(each.p) },
    { word: "p corrected", why: "for the number of differences (Holm)", num: true, key: (each) => each.holm, cell: (each) => clear(each) ? make("b", {}, probabilityWords(each.holm)) : probabilityWords(each.holm) },
    { word: "unit", why: "what the test takes as independent", rare: true, key: (each) => each.unit, cell: (each) => `${each.problems} problems${each.unit === "seeds" ? ", by seeds" : ""}` },
  ];
  return make("section", { class: "card" }, make("h2", {}, `Differences: ${where(comparison)}`),
    make("p", { class: "note" }, `Every two methods after their last round at their own eta, on the problems that both were asked. Their distances from the reference may differ: the view “KL” compares at equal ones.`),
    table({ columns, rows, label: `differences in ${where(comparison)}`, sort: 4 }).root);
}

const where = (comparison) => `${comparison.family}, ${comparison.dataset === comparison.on ? comparison.on : `${comparison.dataset} on ${comparison.on}`}`;
