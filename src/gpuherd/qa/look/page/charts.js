// Small pictures of figures: a value with its interval, scores by class, many figures under each other.

// Where the outermost bins, which reach to the extremes, end in a picture: as wide as the others where they are much wider,
// or one huge score would leave no room for all else.
function drawnEdges(edges) {
  if (edges.length < 4) return edges;
  const wide = (edges.at(-2) - edges[1]) / (edges.length - 3);
  const end = (inner, outer) => Math.abs(outer - inner) > 1.5 * wide ? inner + Math.sign(outer - inner) * wide : outer;
  return [end(edges[1], edges[0]), ...edges.slice(1, -1), end(edges.at(-2), edges.at(-1))];
}

// Scores by class, each as a share of its own class: right ones filled, wrong ones as a line.
function histogram({ edges, right, wrong, name }) {
  const shares = [right, wrong].map((counts) => { const all = counts.reduce((a, b) => a + b, 0) || 1; return counts.map((each) => each / all); });
  const most = Math.max(0.02, ...shares.flat()) * 1.08;
  const drawn = edges[0] === edges.at(-1) ? [edges[0] - 0.5, edges[0] + 0.5] : drawnEdges(edges);
  const ends = [drawn[0], drawn.at(-1)];
  const made = frame({ x: ends, y: [0, most], xTicks: ticks(...ends, 6), yTicks: ticks(0, most, 4), xWord: name, yWord: "share of the class", tell: String, tellY: (at) => `${Math.round(at * 1000) / 10} %`, label: `${name}: scores of right and of wrong answers` });
  const tints = ["var(--right)", "var(--wrong)"];
  shares.forEach((each, at) => {
    const points = [[ends[0], 0], ...each.flatMap((part, bin) => [[drawn[bin], part], [drawn[bin + 1], part]]), [ends[1], 0]];
    made.root.append(svg("path", { d: path(points, made.X, made.Y), fill: at ? "none" : tints[0], "fill-opacity": at ? null : 0.3, stroke: tints[at], "stroke-width": at ? 2.2 : 1.2, "stroke-dasharray": at ? "6 3" : null }));
  });
  const told = (bin) => [`${name} ${figure(edges[bin])} to ${figure(edges[bin + 1])}`, `${right[bin]} right (${percent(shares[0][bin])})`, `${wrong[bin]} wrong (${percent(shares[1][bin])})`];
  const mark = svg("rect", { y: made.top, height: made.bottom - made.top, fill: "var(--soft)", opacity: 0.15, visibility: "hidden" });
  made.root.append(mark);
  let front = -1;
  function choose(bin, event) {
    front = bin;
    mark.setAttribute("x", made.X(drawn[bin]));
    mark.setAttribute("width", Math.max(0.5, made.X(drawn[bin + 1]) - made.X(drawn[bin])));
    mark.setAttribute("visibility", "visible");
    showTip(event, told(bin));
  }
  const hide = () => { hideTip(); mark.setAttribute("visibility", "hidden"); };
  made.root.setAttribute("tabindex", "0");
  made.root.addEventListener("pointermove", (event) => {
    const value = ends[0] + (insideX(event, made.root) - made.left) / (made.right - made.left) * (ends[1] - ends[0]);
    choose(Math.max(0, Math.min(right.length - 1, drawn.findLastIndex((edge) => edge <= value))), event);
  });
  made.root.addEventListener("pointerleave", hide);
  made.root.addEventListener("blur", hide);
  made.root.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const bin = Math.max(0, Math.min(right.length - 1, front + way));
    choose(bin, placeIn(made.root, made.X(drawn[bin])));
    say(told(bin).join(", "));
  });
  const all = [right, wrong].map((counts) => counts.reduce((a, b) => a + b, 0));
  const further = [ends[0] > edges[0] ? `The first bin reaches down to ${figure(edges[0])}.` : "", ends[1] < edges.at(-1) ? `The last bin reaches up to ${figure(edges.at(-1))}.` : ""].join(" ").trim();
  return make("div", {}, made.root, further ? make("p", { class: "note" }, further) : null, legend([{ word: `right (${all[0]})`, colour: tints[0], dash: null }, { word: `wrong (${all[1]})`, colour: tints[1], dash: "6 3" }]));
}
