// What is earned against the distance from the reference: curves over eta, and methods at equal KL.

function divergenceView() {
  const cards = index.comparisons.map(divergenceCard).filter(Boolean);
  return cards.length ? cards : [make("section", { class: "card" }, make("p", {}, "No two methods were evaluated on the same problems with their distance from the reference measured."))];
}

function divergenceCard(comparison) {
  const { metric } = comparison;
  const of = (row) => row.family === comparison.family && row.on === comparison.on && present(row.figures.kl?.value) && present(row.figures[metric]?.value);
  const base = index.rows.filter((row) => of(row) && row.algorithm === index.reference);
  const series = groups(index.rows.filter((row) => of(row) && row.algorithm !== index.reference && row.dataset === comparison.dataset), (row) => row.algorithm).map(([algorithm, rows]) => {
    const last = Math.max(...rows.map((row) => row.round ?? -1));
    const points = [...base.slice(0, 1), ...rows.filter((row) => (row.round ?? -1) === last)].sort((a, b) => a.figures.kl.value - b.figures.kl.value);
    return { word: algorithm, ...algorithmLine(algorithm), rows: points };
  });
  if (!series.length) return null;
  return make("section", { class: "card" }, make("h2", {}, `${metric} against KL: ${where(comparison)}`),
    make("div", { class: "pair" }, scatter(series, metric, where(comparison)), equalKl(comparison)));
}

// Points with their intervals in both directions, joined in the order of KL; arrow keys walk through them.
function scatter(series, metric, title) {
  const every = series.flatMap((each) => each.rows);
  const x = spread([0, ...every.flatMap((row) => [row.figures.kl.value, ...(row.figures.kl.ends ?? [])])]);
  const y = span(every.map((row) => row.figures[metric]), metric);
  const made = frame({ x, y, xTicks: ticks(...x, 6), yTicks: ticks(...y, 5), xWord: "KL(policy || reference), nats", yWord: metric, tell: axisWords, tellY: axisWords, label: `${metric} against KL: ${title}` });
  const { root, X, Y } = made;
  const marks = [];
  for (const { word, colour: tint, dash, rows } of series) {
    root.append(svg("path", { d: path(rows.map((row) => [row.figures.kl.value, row.figures[metric].value]), X, Y), fill: "none", stroke: tint, "stroke-width": 1.6, "stroke-dasharray": dash }));
    for (const row of rows) {
      const [kl, height] = [row.figures.kl, row.figures[metric]];
      const reference = row.algorithm === index.reference;
      if (reference && marks.length) continue; // every curve begins there
      const own = reference ? "var(--soft)" : tint;
      if (height.ends) root.append(svg("line", { x1: X(kl.value), x2: X(kl.value), y1: Y(height.ends[0]), y2: Y(height.ends[1]), stroke: own, "stroke-width": 1.2, opacity: 0.7 }));
      if (kl.ends) root.append(svg("line", { x1: X(kl.ends[0]), x2: X(kl.ends[1]), y1: Y(height.value), y2: Y(height.value), stroke: own, "stroke-width": 1.2, opacity: 0.7 }));
      const mark = svg("circle", { cx: X(kl.value), cy: Y(height.value), r: row.own && !reference ? 5 : 3.5, fill: row.own ? own : "var(--card)", stroke: own, "stroke-width": 1.6 });
      const told = [reference ? "reference" : `${word}${present(row.eta) ? `, eta ${axisWords(row.eta)}` : ""}${present(row.round) ? `, round ${row.round}` : ""}`, `${metric} ${toldFigure(height, metric)}`, `KL ${toldFigure(kl, "kl")} nats`];
      root.append(mark);
      marks.push({ mark, told });
    }
  }
  walked(root, marks);
  return make("div", {}, root, legend(series), make("p", { class: "note" }, "Filled: at the policy's own eta. A curve begins at the reference, which is grey. Crosses are intervals."));
}

function equalKl(comparison) {
  const still = comparison.unmoved.map(([method, kl]) => make("p", { class: "note" }, `${method} has hardly moved from the reference (KL at most ${axisWords(kl)} nats), and is compared with no other here.`));
  if (!comparison.atKl.length) return make("div", {}, make("p", { class: "soft" }, comparison.note ?? "The curves have no KL in common at which two methods could be compared."), ...still);
  const kls = [...new Set(comparison.atKl.map((each) => each.kl))].sort((a, b) => a - b);
  const methods = [...new Set(comparison.atKl.map((each) => each.method))];
  const cell = (method, kl) => { const found = comparison.atKl.find((each) => each.method === method && each.kl === kl)?.figure; return make("td", { class: "num", title: found?.note }, fixed(found?.value), make("span", { class: "ends" }, found?.ends ? `${fixed(found.ends[0])} to ${fixed(found.ends[1])}` : "")); };
  const read = make("table", { "aria-label": "at equal KL" }, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "at KL ="), ...kls.map((kl) => make("th", { class: "num", scope: "col" }, axisWords(kl))))),
    make("tbody", {}, ...methods.map((method) => make("tr", {}, make("td", { class: "name" }, named(method)), ...kls.map((kl) => cell(method, kl))))));
  const clear = comparison.differencesAtKl.filter(isClear);
  const pairs = clearPairs(clear);
  return make("div", {}, make("h3", {}, `${comparison.metric} at equal KL`), make("div", { class: "scroll" }, read),
    make("p", { class: "note" }, "Read off by straight lines between a method's own policies; nothing beyond its ends. Two methods are compared at the values that both reach."), ...still,
    ...(pairs.length ? pairs.map((pair) => make("p", { class: "clear" }, clearWords(pair))) : [make("p", { class: "soft" }, comparison.differencesAtKl.length ? "No difference at equal KL is beyond chance." : "")]));
}

const clearPairs = (differences) => groups(differences.map(upward), (each) => `${each.one} is above ${each.other}`);

// One method above another: at which KL, by how much, how surely.
function clearWords([pair, found]) {
  const kls = found.map((each) => axisWords(each.kl));
  const gains = found.map((each) => each.figure.value);
  const [least, most] = [Math.min(...gains), Math.max(...gains)].map((each) => fixed(each));
  const p = Math.max(...found.map((each) => each.holm));
  return `${pair} at ${listed(kls)} nats, by ${least === most ? least : `${least} to ${most}`} (p corrected ${p < 0.001 ? "" : found.length > 1 ? "at most " : ""}${probabilityWords(p)}, by ${found[0].unit}).`;
}
