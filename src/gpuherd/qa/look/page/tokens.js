// Where in the answer the uncertainty is: NLL by position, AUROC by prefix, and the token weightings beside each other.

function tokensView() {
  const found = evaluated();
  if (!found) return measuresView();
  const cards = [];
  if (found.positions.length) cards.push(card("NLL by position", positionChart(found.positions)));
  if (found.prefixes.length) cards.push(card("AUROC of the first tokens alone", prefixChart(found.prefixes, found.measures.every((m) => m.conclusive))));
  const weightings = found.measures.filter(({ weighting }) => weighting !== null);
  const choice = judgeChoice();
  return [choice ? make("div", { class: "bar" }, choice) : null, warned(found),
    cards.length ? make("div", { class: "pair" }, ...cards) : card(null, make("p", { class: "soft" }, "The evaluation has no figures by position.")),
    weightings.length ? card(`${weightings.length} weightings of tokens`, weightingChart(found, weightings)) : null].filter(Boolean);
}

function positionChart(positions) {
  const all = [["right", 1, 3, "var(--right)", null], ["wrong", 2, 4, "var(--wrong)", "6 3"]];
  const last = positions.at(-1)[0];
  const series = all.map(([word, count, at, tint, dash]) => {
    const known = positions.filter((each) => present(each[at].value));
    return { word, colour: tint, dash, points: known.map((each) => [each[0], each[at].value]), band: known.filter((each) => each[at].ends).map((each) => [each[0], ...each[at].ends]),
      extra: (place) => { const found = positions.find((each) => each[0] === place); return found ? `(${found[count]} answers)` : ""; } };
  });
  // A wide interval of few answers must not flatten the lines.
  const top = Math.max(0.1, ...series.flatMap(({ points }) => points.map(([, y]) => y))) * 1.25;
  return lines({ series, x: [0, Math.max(1, last)], y: [0, top], xTicks: ticks(0, Math.max(1, last), 6).filter(Number.isInteger), yTicks: ticks(0, top, 5), tell: String, tellY: (each) => figure(each), xWord: "token, from 0", yWord: "mean NLL (nats)", label: "mean NLL by position", dots: true,
    note: "Of answers that are as long as that; shaded: the interval of the mean." });
}

function prefixChart(prefixes, conclusive) {
  const series = [["sum of NLL", 3], ["mean of NLL", 4]].map(([word, at], number) => {
    const known = prefixes.map((each, place) => [place, each[at]]).filter(([, found]) => present(found.value));
    return { word, ...lineOf(number), points: known.map(([place, found]) => [place, found.value]), band: known.filter(([, found]) => found.ends).map(([place, found]) => [place, ...found.ends]),
      extra: (place) => { const found = prefixes[place]?.[at]; return found?.ends ? `[${found.ends.map((each) => fixed(each)).join(", ")}]` : ""; } };
  });
  const tell = (at) => prefixes[at] ? `${prefixes[at][0]}` : "";
  const low = Math.min(0.4, ...series.flatMap(({ band, points }) => [...band.map(([, from]) => from), ...points.map(([, y]) => y)]));
  return lines({ series, x: [0, Math.max(1, prefixes.length - 1)], y: [Math.max(0, low - 0.02), 1], xTicks: prefixes.map((_, at) => at), yTicks: ticks(Math.max(0, low), 1, 5), tell, tellY: (each) => fixed(each), xWord: "first tokens", yWord: "AUROC", label: "AUROC by prefix", dots: true, level: 0.5,
    note: `${conclusive ? "" : `${TOO_FEW} `}${prefixes.map(([length, answers, shorter]) => shorter ? `${shorter} of ${answers} answers are shorter than ${length}` : "").filter(Boolean).join("; ") || "All answers are as long as that"}.` });
}

function weightingChart(found, weightings) {
  const against = found.measures.find(({ name }) => name === index.evaluation.against)?.auroc.value ?? null;
  const ends = weightings.flatMap(({ auroc }) => auroc.ends ?? [auroc.value]).filter(present);
  if (!ends.length) return make("p", { class: "soft" }, weightings[0].auroc.note ?? "None of them has an AUROC.");
  const scale = [Math.max(0, Math.min(0.45, ...ends) - 0.01), Math.min(1, Math.max(0.6, ...ends) + 0.01)];
  const whole = table({ label: "weightings", page: 100, rows: weightings, sort: 1, descending: true, columns: [
    { word: "weighting", key: (m) => m.weighting, class: "name", cell: (m) => m.weighting },
    { word: "AUROC", num: true, key: (m) => m.auroc.value, cell: (m) => told(m.auroc, m) },
    { word: span(scale), class: "picture wide", cell: (m) => whisker(m.auroc, scale, { at: against ?? 0.5, width: 320, faint: !m.conclusive, label: "AUROC" }) },
    { word: `Δ to ${index.evaluation.against}`, num: true, rare: true, key: (m) => m.difference?.auroc.value, cell: (m) => difference(m, true) },
  ] });
  return make("div", { class: "compact" }, whole.root, make("p", { class: "note" }, `Dotted: ${present(against) ? `${index.evaluation.against}, ${fixed(against)}` : "chance"}. Of ${weightings.length} the best is best by luck too: the difference's p and interval are corrected for that and for all other measures, the AUROC's interval is not.`));
}
