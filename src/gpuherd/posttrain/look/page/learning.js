// The figures of trainings by step.

const USUAL = ["loss", "reward", "correct", "kl", "entropy", "value_loss", "policy_loss", "accuracy", "length", "grad_norm", "validation_loss", "validation_accuracy", "validation_auroc"];
const MOST_DRAWN = 8;

function learningView() {
  const all = index.trainings;
  if (!all.length) return [make("section", { class: "card" }, make("p", {}, "No training has logged a step yet."))];
  state.drawn ??= new Set(all.slice(0, Math.min(4, all.length)).map((_, at) => at));
  const charts = make("div", { class: "grid" });
  const fill = () => charts.replaceChildren(...learningCharts());
  const boxes = all.map((each, at) => make("label", { class: "together key" }, make("input", { type: "checkbox", checked: state.drawn.has(at), onchange: (event) => {
    if (event.target.checked && state.drawn.size >= MOST_DRAWN) { event.target.checked = false; say(`at most ${MOST_DRAWN} at a time`); return; }
    state.drawn[event.target.checked ? "add" : "delete"](at);
    fill();
  } }), trainingMark(at), `${each.name} (${each.steps} steps)`));
  fill();
  const every = make("label", { class: "together" }, make("input", { type: "checkbox", checked: state.figures, onchange: (event) => { state.figures = event.target.checked; fill(); } }), "all figures");
  return [make("section", { class: "card" }, make("h2", {}, all.length === 1 ? "Training" : `Trainings, at most ${MOST_DRAWN} at a time`), make("div", { class: "boxes", role: "group", "aria-label": "trainings that are drawn" }, ...boxes), every), charts];
}

const trainingMark = (at) => { const { colour: tint, dash } = lineOf(at); return svg("svg", { viewBox: "0 0 22 6", class: "key-line", "aria-hidden": "true" }, svg("line", { x1: 0, x2: 22, y1: 3, y2: 3, stroke: tint, "stroke-width": 2.5, "stroke-dasharray": dash })); };

function learningCharts() {
  const drawn = [...state.drawn].sort((a, b) => a - b);
  const names = [...new Set(drawn.flatMap((at) => Object.keys(index.trainings[at].series)))];
  const rank = (name) => { const at = USUAL.findIndex((each) => name === each || name.endsWith(`/${each}`)); return at < 0 ? USUAL.length : at; };
  names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true }));
  if (!names.length) return [make("p", { class: "soft" }, "Choose a training above.")];
  const usual = names.filter((name) => rank(name) < USUAL.length);
  return (state.figures || !usual.length ? names : usual).map((name) => {
    const series = drawn.filter((at) => index.trainings[at].series[name]?.length).map((at) => ({ word: index.trainings[at].name, ...lineOf(at), points: index.trainings[at].series[name] }));
    const y = spread(series.flatMap((each) => each.points.map((point) => point[1])));
    const x = [Math.min(...series.map((each) => each.points[0][0])), Math.max(...series.map((each) => each.points.at(-1)[0]))];
    if (x[0] === x[1]) { x[0] -= 0.5; x[1] += 0.5; }
    const single = series.every((each) => each.points.length === 1);
    return make("section", { class: "card" }, make("h3", {}, name),
      lines({ series, x, y, xTicks: ticks(...x, 5), yTicks: ticks(...y, 4), xWord: "step", yWord: "", tell: figure, tickX: axisWords, tickY: axisWords, label: `${name} by step`, height: 220, dots: single }));
  });
}
