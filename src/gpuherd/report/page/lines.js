// Lines over a common axis with a cursor: the pointer, or the arrow keys, read all of them off at one place.

// series: [{word, colour, points: [[x, y]], band: [[x, low, high]] | null, dash}], sorted by x; level: what chance gives.
function lines({ series, x, y, xTicks, yTicks, xWord, yWord, tell = figure, tellY = tell, tickX = tell, tickY = String, label, height, diagonal = false, level = null, dots = false, note = null }) {
  const made = frame({ x, y, xTicks, yTicks, xWord, yWord, tell: tickX, tellY: tickY, label, height });
  const { root, X, Y } = made;
  const clip = (value) => Math.max(y[0], Math.min(y[1], value));
  if (diagonal) root.append(svg("line", { x1: X(x[0]), y1: Y(y[0]), x2: X(x[1]), y2: Y(y[1]), stroke: "var(--soft)", "stroke-dasharray": "3 4" }));
  if (present(level)) root.append(svg("line", { class: "level", x1: X(x[0]), y1: Y(level), x2: X(x[1]), y2: Y(level), stroke: "var(--soft)", "stroke-dasharray": "3 4" }));
  for (const { colour: tint, band } of series) {
    if (!band?.length) continue;
    if (band.length === 1) { // no area: an upright line
      const [[at, low, high]] = band;
      root.append(svg("line", { x1: X(at), x2: X(at), y1: Y(clip(low)), y2: Y(clip(high)), stroke: tint, "stroke-width": 1.6, opacity: 0.6 }));
    }
    const edge = [...band.map(([at, low]) => [at, clip(low)]), ...band.toReversed().map(([at, , high]) => [at, clip(high)])];
    root.append(svg("path", { d: `${path(edge, X, Y)}Z`, fill: tint, opacity: 0.16 }));
  }
  for (const { colour: tint, points, dash } of series) {
    root.append(svg("path", { d: path(points.map(([at, value]) => [at, clip(value)]), X, Y), fill: "none", stroke: tint, "stroke-width": 2, "stroke-linejoin": "round", "stroke-dasharray": dash }));
    if (dots || points.length === 1) for (const [at, value] of points) root.append(svg("circle", { cx: X(at), cy: Y(clip(value)), r: 3, fill: tint }));
  }
  const cursor = svg("line", { y1: made.top, y2: made.bottom, stroke: "var(--soft)", visibility: "hidden" });
  const marks = series.map(({ colour: tint }) => svg("circle", { r: 4, fill: tint, stroke: "var(--card)", "stroke-width": 1.5, visibility: "hidden" }));
  root.append(cursor, ...marks);
  let at = null;
  const words = () => [`${xWord}: ${tell(at)}`, ...series.map((each) => `${each.word}: ${tellY(read(each.points, at))}${each.extra ? ` ${each.extra(at)}` : ""}`)];
  function place(value) {
    at = Math.max(x[0], Math.min(x[1], value));
    cursor.setAttribute("x1", X(at)); cursor.setAttribute("x2", X(at));
    cursor.setAttribute("visibility", "visible");
    series.forEach(({ points }, number) => {
      const value = read(points, at);
      marks[number].setAttribute("visibility", present(value) ? "visible" : "hidden");
      if (present(value)) { marks[number].setAttribute("cx", X(at)); marks[number].setAttribute("cy", Y(clip(value))); }
    });
  }
  const hide = () => { hideTip(); for (const each of [cursor, ...marks]) each.setAttribute("visibility", "hidden"); };
  const steps = dots && series[0] ? series[0].points.map(([place]) => place) : null; // only these can be read off
  root.setAttribute("tabindex", "0");
  root.addEventListener("pointermove", (event) => {
    const value = x[0] + (insideX(event, root) - made.left) / (made.right - made.left) * (x[1] - x[0]);
    place(steps ? nearest(steps, value) : value);
    showTip(event, words());
  });
  root.addEventListener("pointerleave", hide);
  root.addEventListener("blur", hide);
  root.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    if (steps) place(at === null ? steps[0] : steps[Math.max(0, Math.min(steps.length - 1, steps.indexOf(nearest(steps, at)) + way))]);
    else place(at === null ? x[0] : at + way * (x[1] - x[0]) / 50);
    showTip(placeIn(root, X(at)), words());
    say(words().join(", "));
  });
  return make("div", {}, root, legend(series), note ? make("p", { class: "note" }, note) : null);
}

// A pointer's x in the units of a picture, and a place in it as a pointer's.
function insideX(event, root) {
  const box = root.getBoundingClientRect();
  return (event.clientX - box.left) / box.width * root.viewBox.baseVal.width;
}

function placeIn(root, x) {
  const box = root.getBoundingClientRect();
  return { clientX: box.left + x / root.viewBox.baseVal.width * box.width, clientY: box.top + box.height / 3 };
}

const nearest = (all, value) => all.reduce((best, each) => Math.abs(each - value) < Math.abs(best - value) ? each : best);

// The height of a line at a place, null beyond its ends; where it rises upright, the upper end.
function read(points, at) {
  if (!points.length || at < points[0][0] || at > points.at(-1)[0]) return null;
  let [low, high] = [0, points.length - 1];
  while (low < high) { // the last point that is not behind
    const middle = (low + high + 1) >> 1;
    if (points[middle][0] <= at) low = middle; else high = middle - 1;
  }
  if (low === points.length - 1) return points[low][1];
  const [[x0, y0], [x1, y1]] = [points[low], points[low + 1]];
  return y0 + (y1 - y0) * (at - x0) / (x1 - x0);
}

function legend(series) {
  return make("div", { class: "legend" }, ...series.map((each) => make("span", { class: "key" }, lineMark(each), each.word)));
}

const lineMark = ({ colour: tint, dash }) => svg("svg", { viewBox: "0 0 22 6", class: "key-line", "aria-hidden": "true" }, svg("line", { x1: 0, x2: 22, y1: 3, y2: 3, stroke: tint, "stroke-width": 2.5, "stroke-dasharray": dash }));

const DASHES = [null, "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 3", "6 2 1 2"]; // lines are told apart without colour too
const lineOf = (number) => ({ colour: LINES[number % LINES.length], dash: DASHES[(number + Math.floor(number / LINES.length)) % DASHES.length] });
