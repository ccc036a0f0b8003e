// What the run says in sentences, every policy with its figures, and every two methods against each other.

function summaryView() {
  if (!index.rows.length) return [make("section", { class: "card" }, make("p", {}, "No policy is evaluated yet."))];
  const others = index.rows.length - index.rows.filter((row) => row.own).length;
  const holder = make("div");
  const fill = () => {
    const rows = index.rows.filter((row) => row.own || state.every);
    holder.replaceChildren(table({ columns: summaryColumns(rows), rows, label: "policies", words: policyWords, page: 50 }).root);
  };
  const figures = make("label", { class: "together" }, make("input", { type: "checkbox", checked: state.figures, onchange: (event) => { state.figures = event.target.checked; fill(); } }), "all figures");
  const every = others ? make("label", { class: "together" }, make("input", { type: "checkbox", checked: state.every, onchange: (event) => { state.every = event.target.checked; fill(); } }), `with ${others} at other etas`) : null;
  fill();
  const share = `${Number((100 * index.confidence).toPrecision(3))} %`;
  return [shortCard(), make("section", { class: "card" }, make("div", { class: "bar" }, make("h2", {}, "Policies"), every, figures), holder,
    make("p", { class: "note" }, `Below a figure its ${share} interval, by resampling the problems, and the seeds where there are several. Of a guided policy the row is at its own eta, which was set before anything was evaluated.`),
    meanings()), ...index.comparisons.map(differencesCard)];
}

function meanings() {
  return make("details", { class: "how" }, make("summary", {}, "What the figures mean"), make("dl", {},
    ...figureNames(index.rows).flatMap((name) => [make("dt", {}, called(name)), make("dd", {}, meaning(name))]),
    make("dt", {}, "a tie of a vote"), make("dd", {}, [...new Set(index.rows.map((row) => TIES[row.tie]))].join("; ")),
    make("dt", {}, "how KL was had"), make("dd", {}, [...new Set(index.rows.map((row) => ESTIMATORS[row.estimator] ?? "not measured"))].join("; "))));
}

const TIES = { share: "earns the share of the tied answers that is right", first: "goes to the answer that was drawn first", unique: "earns nothing: the majority must be unique" };
const ESTIMATORS = { exact: "exactly: summed over the vocabulary at each visited position", k1: "estimated from the sampled tokens' log-probs, k1", k3: "estimated from the sampled tokens' log-probs, k3" };

function summaryColumns(rows) {
  const shares = span(rows.flatMap((row) => Object.entries(row.figures).filter(([name]) => isShare(name) && name !== "finished").map(([, found]) => found)), "pass@1");
  const column = (name, rare) => {
    const range = name === "finished" ? [0, 1] : shares; // one scale for all that is drawn
    return { word: called(name), why: meaning(name), num: true, rare, key: (row) => row.figures[name]?.value, cell: (row) => figureCell(row, name, range) };
  };
  const own = (name) => column(name, ["first", "kl a token", "tokens", "finished"].includes(name) || /^(maj@|pass@(?!1$))/.test(name));
  const some = (value) => rows.some((row) => present(value(row)));
  const columns = [
    { word: "algorithm", class: "name", key: (row) => row.algorithm, cell: (row) => named(row.algorithm) },
    { word: "data set", class: "name", key: dataWords, cell: dataWords, rare: true },
    { word: "model", key: (row) => row.family, cell: (row) => row.family, rare: true },
    { word: "round", num: true, key: (row) => row.round, cell: (row) => present(row.round) ? row.round : "–" },
    { word: "eta", why: "of the papers: small guides strongly", num: true, key: (row) => row.eta, cell: (row) => present(row.eta) ? axisWords(row.eta) : "–" },
    ...(state.figures ? figureNames(rows) : mainFigures(rows)).map(own),
    { word: "n", why: "problems × samples of each, and seeds", num: true, rare: true, key: (row) => row.problems * row.samples * row.seeds.length, cell: (row) => `${row.problems} × ${row.samples}${row.seeds.length > 1 ? ` × ${row.seeds.length} seeds` : ""}` },
    { word: "tokens/s", why: "while it was evaluated", num: true, rare: true, key: (row) => row.speed, cell: (row) => present(row.speed) ? row.speed.toFixed(0) : "–" },
    { word: "GPU-h", why: "of its evaluation alone; the view Jobs has those of all", num: true, rare: true, key: (row) => row.gpuHours, cell: (row) => figure(row.gpuHours) },
  ];
  return columns.filter((column) => !["round", "eta", "tokens/s", "GPU-h"].includes(column.word) || some(column.key));
}

const named = (algorithm) => make("span", { class: "named" }, lineMark(algorithmLine(algorithm)), make("span", {}, algorithm));

function figureCell(row, name, range) {
  const found = row.figures[name];
  if (!present(found?.value)) return make("span", { title: found?.note }, "–");
  const told = inDigits(found, name);
  const seeds = row.bySeed[name];
  const why = [found.note, seeds ? `by seed: ${seeds.map(told).join(", ")}` : null].filter(Boolean).join("; ");
  return make("span", { title: why || null }, told(found.value),
    make("span", { class: "ends" }, found.ends ? `${told(found.ends[0])} to ${told(found.ends[1])}` : "no interval"),
    isShare(name) && !isNarrow() ? whisker(found, range, { width: 90, label: name }) : null);
}

function differencesCard(comparison) {
  if (!comparison.differences.length) return null;
  const rows = comparison.differences.map(upward).sort((a, b) => b.figure.value - a.figure.value);
  const ends = rows.flatMap((each) => [0, each.figure.value, ...(each.figure.ends ?? [])]).filter(present);
  const range = [Math.min(...ends), Math.max(...ends) || 1];
  const columns = [
    { word: "difference", class: "name", key: (each) => each.one, cell: (each) => `${each.one} − ${each.other}` },
    { word: comparison.metric, num: true, key: (each) => each.figure.value, cell: (each) => make("span", { title: each.figure.note }, fixed(each.figure.value), make("span", { class: "ends" }, each.figure.ends ? `${fixed(each.figure.ends[0])} to ${fixed(each.figure.ends[1])}` : "no interval")) },
    { word: "", rare: true, cell: (each) => whisker(each.figure, range, { at: 0, faint: !isClear(each), label: `${each.one} − ${each.other}` }), class: "picture" },
    { word: "p", why: "two-sided", num: true, rare: true, key: (each) => each.p, cell: (each) => probabilityWords(each.p) },
    { word: "p corrected", why: "for the number of differences (Holm)", num: true, key: (each) => each.holm, cell: (each) => isClear(each) ? make("b", {}, probabilityWords(each.holm)) : probabilityWords(each.holm) },
    { word: "unit", why: "what the test takes as independent", rare: true, key: (each) => each.unit, cell: (each) => `${each.problems} problems${each.unit === "seeds" ? ", by seeds" : ""}` },
  ];
  return make("section", { class: "card" }, make("h2", {}, `Differences: ${where(comparison)}`),
    make("p", { class: "note" }, `Every two methods after their last round at their own eta, the larger first, on the problems that both were asked. ${HAS.kl() ? "Their distances from the reference may differ: the view “KL” compares at equal ones." : "Their distances from the reference were not measured, and may differ."}`),
    table({ columns, rows, label: `differences in ${where(comparison)}`, sort: 4, page: 15 }).root);
}

const where = (comparison) => `${comparison.family}, ${comparison.dataset === comparison.on ? comparison.on : `${comparison.dataset} on ${comparison.on}`}`;
