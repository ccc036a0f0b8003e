// Figures with their intervals: as words, as a dot with whiskers, and as marks of a plot that are read off one by one.

// A figure as words: value [low, high].
function words(found, digits = 3) {
  if (!found || !present(found.value)) return "–";
  const ends = found.ends ? ` [${found.ends.map((each) => fixed(each, digits)).join(", ")}]` : "";
  return fixed(found.value, digits) + ends;
}

// Of figures between -1 and 1 all digits count, also the last zeros.
const fixed = (value, digits = 3) => present(value) ? value.toFixed(digits).replace(/^-(0\.?0*)$/, "$1").replace("-", "−") : "–";

// A dot with whiskers between two ends; at: a line to compare with.
function whisker(found, [low, high], { at = null, width = 150, faint = false, label = "" } = {}) {
  const tall = 16;
  const X = (value) => 3 + (Math.max(low, Math.min(high, value)) - low) / (high - low || 1) * (width - 6);
  const root = svg("svg", { viewBox: `0 0 ${width} ${tall}`, class: "whisker", role: "img", "aria-label": `${label} ${words(found)}` });
  root.append(svg("line", { x1: 3, x2: width - 3, y1: tall / 2, y2: tall / 2, stroke: "var(--grid)" }));
  if (present(at)) root.append(svg("line", { x1: X(at), x2: X(at), y1: 0, y2: tall, stroke: "var(--soft)", "stroke-dasharray": "2 2" }));
  if (!present(found?.value)) return root;
  const tint = faint ? "var(--soft)" : "var(--accent)";
  if (found.ends) {
    const [from, to] = found.ends.map(X);
    root.append(svg("line", { x1: from, x2: to, y1: tall / 2, y2: tall / 2, stroke: tint, "stroke-width": 2 }),
      ...[from, to].map((end) => svg("line", { x1: end, x2: end, y1: tall / 2 - 3, y2: tall / 2 + 3, stroke: tint, "stroke-width": 1.5 })));
  }
  root.append(svg("circle", { cx: X(found.value), cy: tall / 2, r: 4, fill: faint ? "var(--card)" : tint, stroke: tint, "stroke-width": 1.5 }));
  return root;
}

// marks: [{mark, told}]. Under the pointer a mark tells its lines; the arrow keys, Home and End walk through all of them.
function walked(root, marks) {
  for (const { mark, told } of marks) {
    mark.addEventListener("pointermove", (event) => showTip(event, told));
    mark.addEventListener("pointerleave", hideTip);
  }
  let front = -1;
  const leave = () => { hideTip(); marks[front]?.mark.classList.remove("front"); };
  root.setAttribute("tabindex", "0");
  root.addEventListener("blur", leave);
  root.addEventListener("keydown", (event) => {
    const to = { ArrowRight: front + 1, ArrowLeft: front - 1, Home: 0, End: marks.length - 1 }[event.key];
    if (to === undefined || !marks.length) return;
    event.preventDefault();
    leave();
    front = Math.max(0, Math.min(marks.length - 1, to));
    const { mark, told } = marks[front];
    mark.classList.add("front");
    const box = mark.getBoundingClientRect();
    showTip({ clientX: box.left, clientY: box.top }, told);
    say(told.join(", "));
  });
}
