// The figures of trainings by step.

const USUAL = ["loss", "reward", "correct", "kl", "entropy", "value_loss", "policy_loss", "accuracy", "length", "grad_norm", "validation_loss", "validation_accuracy", "validation_auroc"];
const MOST_DRAWN = 8;

function learningView() {
  const all = index.trainings;
  if (!all.length) return [make("section", { class: "card" }, make("p", {}, "No training has logged a step yet."))];
  state.drawn ??= new Set(firstDrawn(all));
  const charts = make("div", { class: "grid" });
  const fill = () => charts.replaceChildren(...learningCharts());
  const boxes = all.map((each, at) => make("label", { class: "together key" }, make("input", { type: "checkbox", checked: state.drawn.has(at), onchange: (event) => {
    if (event.target.checked && state.drawn.size >= MOST_DRAWN) { event.target.checked = false; say(`at most ${MOST_DRAWN} at a time`); return; }
    state.drawn[event.target.checked ? "add" : "delete"](at);
    fill();
  } }), lineMark(trainingLine(at)), `${each.name} (${several(each.steps, "step")})`));
  fill();
  const every = make("label", { class: "together" }, make("input", { type: "checkbox", checked: state.figures, onchange: (event) => { state.figures = event.target.checked; fill(); } }), "all figures");
  return [make("section", { class: "card" }, make("h2", {}, all.length === 1 ? "Training" : `Trainings, at most ${MOST_DRAWN} at a time`), make("div", { class: "boxes", role: "group", "aria-label": "trainings that are drawn" }, ...boxes), every), charts];
}

// The last of each algorithm; where all are of one, the first few.
function firstDrawn(all) {
  const last = [...new Map(all.map((each, at) => [trainedBy(each), at])).values()];
  return last.length > 1 ? last.slice(0, MOST_DRAWN) : all.slice(0, 4).map((_, at) => at);
}

// A training has its algorithm's colour, in a shade and with a stroke of its own; where all are of one, a colour of its own.
function trainingLine(at) {
  const of = index.trainings.map(trainedBy);
  if (new Set(of).size < 2) return lineOf(at);
  const place = of.slice(0, at).filter((each) => each === of[at]).length;
  const { colour: tint } = algorithmLine(of[at]);
  return { colour: [tint, `color-mix(in srgb, ${tint} 55%, var(--ink))`, `color-mix(in srgb, ${tint} 50%, var(--card))`][place % 3], dash: lineOf(place).dash };
}

function learningCharts() {
  const drawn = [...state.drawn].sort((a, b) => a - b);
  const names = [...new Set(drawn.flatMap((at) => Object.keys(index.trainings[at].series)))];
  const rank = (name) => { const at = USUAL.findIndex((each) => name === each || name.endsWith(`/${each}`)); return at < 0 ? USUAL.length : at; };
  names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true }));
  if (!names.length) return [make("p", { class: "soft" }, "Choose a training above.")];
  const usual = names.filter((name) => rank(name) < USUAL.length);
  return (state.figures || !usual.length ? names : usual).map((name) => {
    const series = drawn.filter((at) => index.trainings[at].series[name]?.length).map((at) => ({ word: index.trainings[at].name, ...trainingLine(at), points: index.trainings[at].series[name] }));
    const y = spread(series.flatMap((each) => each.points.map((point) => point[1])));
    const x = [Math.min(...series.map((each) => each.points[0][0])), Math.max(...series.map((each) => each.points.at(-1)[0]))];
    if (x[0] === x[1]) { x[0] -= 0.5; x[1] += 0.5; }
    return make("section", { class: "card" }, make("h3", {}, name),
      lines({ series, x, y, xTicks: ticks(...x, 5).filter(Number.isInteger), yTicks: ticks(...y, 4), xWord: "step", yWord: "", tell: figure, tickX: axisWords, tickY: axisWords, label: `${name} by step`, height: 220 }));
  });
}
