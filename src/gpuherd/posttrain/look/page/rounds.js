// How each figure moves from round to round.

function roundsView() {
  const rows = index.rows.filter((row) => row.own && present(row.round));
  if (!rows.length) return [make("section", { class: "card" }, make("p", {}, "No round is evaluated yet."))];
  const names = figureNames(rows);
  if (!names.includes(state.figure)) state.figure = names[0];
  const holder = make("div", { class: "grid" });
  const fill = () => holder.replaceChildren(...groups(rows, (row) => `${row.family}, ${dataWords(row)}`).map(([title, some]) => roundsCard(title, some)));
  fill();
  return [make("div", { class: "bar" }, select("figure", names.map((name) => [name, called(name)]), state.figure, (name) => { state.figure = name; fill(); }),
    make("span", { class: "soft" }, meaning(state.figure))), holder];
}

function roundsCard(title, rows) {
  const name = state.figure;
  const series = groups(rows, (row) => row.algorithm).map(([algorithm, some]) => {
    const known = some.filter((row) => present(row.figures[name]?.value)).sort((a, b) => a.round - b.round);
    return { word: algorithm, ...algorithmLine(algorithm), points: known.map((row) => [row.round, row.figures[name].value]),
      band: known.filter((row) => row.figures[name].ends).map((row) => [row.round, ...row.figures[name].ends]) };
  }).filter((each) => each.points.length);
  const base = index.rows.find((row) => row.algorithm === index.reference && row.family === rows[0].family && row.on === rows[0].on);
  const last = Math.max(...rows.map((row) => row.round));
  const x = last === 0 ? [-0.5, 0.5] : [0, last];
  const level = base?.figures[name]?.value;
  const y = (isShare(name) ? shareSpread : spread)([...(present(level) ? [level] : []), ...series.flatMap((each) => [...each.points.map((point) => point[1]), ...each.band.flatMap((each) => each.slice(1))])]);
  const longest = [...series].sort((a, b) => b.points.length - a.points.length);
  if (!series.length) return make("section", { class: "card" }, make("h2", {}, title), make("p", {}, "not measured"));
  return make("section", { class: "card" }, make("h2", {}, title),
    lines({ series: longest, x, y, xTicks: Array.from({ length: last + 1 }, (_, at) => at).filter((at) => last < 12 || at % Math.ceil(last / 10) === 0), yTicks: ticks(...y, 5), xWord: "round", yWord: called(name), tell: figure, tickX: String, tickY: axisWords, label: `${called(name)} by round: ${title}`, level, dots: true,
      note: present(level) ? `dotted: the reference, ${fixed(level)}` : null }));
}
