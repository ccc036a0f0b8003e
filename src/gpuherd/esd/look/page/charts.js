// Spectra with their fitted law, histograms of alpha, and alpha over depth.

const LAST_ALPHA = 12; // what is larger is counted in the last bin

function share(sketch, at) { // log10 of the share of eigenvalues >= 10^at, from the sketch
  const { x, y } = sketch;
  if (at <= x[0]) return y[0];
  for (let i = 1; i < x.length; i++) {
    if (at <= x[i]) return x[i] === x[i - 1] ? y[i] : y[i - 1] + (y[i] - y[i - 1]) * (at - x[i - 1]) / (x[i] - x[i - 1]);
  }
  return -Infinity;
}

// The share of eigenvalues from each on, and the density, both in log-log, with the law from xmin on.
function spectrumCharts(sketch, { alpha, xmin, edge, name, count, tail }) {
  const last = sketch.x.length - 1;
  const ends = [sketch.x[0], sketch.x[last]];
  const pad = (ends[1] - ends[0]) * 0.03 || 0.5;
  const x = [ends[0] - pad, ends[1] + pad];
  const fitted = present(alpha) && present(xmin) && xmin > 0;
  const start = fitted ? Math.log10(xmin) : null;
  // The share of eigenvalues in the tail: as counted, else read off the curve.
  const begin = !fitted ? null : present(tail) && Number.isFinite(count) ? Math.log10(tail / count) : share(sketch, start);
  const law = (at) => begin + (1 - alpha) * (at - start);
  return [ccdfChart(), densityChart()];

  function ccdfChart() {
    const y = [Math.min(...sketch.y) * 1.06 - 0.05, 0.1];
    const made = frame({ x, y, xTicks: powers(...x), yTicks: powers(...y), xWord: "eigenvalue λ", yWord: "share ≥ λ", tell: power,
      label: `${name}: share of eigenvalues from λ on, log-log` });
    made.root.append(svg("path", { d: path([...sketch.x].map((each, i) => [each, sketch.y[i]]), made.X, made.Y), fill: "none", stroke: "var(--accent)", "stroke-width": 2 }));
    if (fitted) line(made, y, law);
    return made.root;
  }

  function densityChart() {
    const shares = merged(sketch.bins, count);
    const width = (ends[1] - ends[0]) / shares.length || 1;
    const bars = shares.map((each, i) => [ends[0] + i * width, Math.log10(each / width)]).filter(([, high]) => Number.isFinite(high));
    const density = (at) => law(at) + Math.log10((alpha - 1) * Math.LN10);
    const highest = Math.max(...bars.map(([, high]) => high), fitted ? density(start) : -Infinity);
    const y = [Math.max(Math.min(...bars.map(([, high]) => high)), highest - 6) - 0.3, highest + 0.3];
    const made = frame({ x, y, xTicks: powers(...x), yTicks: powers(...y), xWord: "eigenvalue λ", yWord: "density over log₁₀ λ", tell: power,
      label: `${name}: density of eigenvalues, log-log` });
    for (const [at, high] of bars) {
      const top = made.Y(Math.max(high, y[0]));
      made.root.append(svg("rect", { x: made.X(at), y: top, width: Math.max(0.5, made.X(at + width) - made.X(at) - 0.8), height: made.bottom - top, fill: "var(--accent)", opacity: 0.6 }));
    }
    if (present(edge) && edge > 0 && Math.log10(edge) > x[0] && Math.log10(edge) < x[1]) {
      const at = made.X(Math.log10(edge));
      made.root.append(svg("line", { x1: at, x2: at, y1: made.top, y2: made.bottom, stroke: "var(--edge)", "stroke-width": 1.5, "stroke-dasharray": "2 3" }));
    }
    if (fitted) line(made, y, density);
    return made.root;
  }

  function line(made, y, curve) {
    const clip = (at) => Math.max(y[0], Math.min(y[1], at));
    // Where the law leaves the frame below, its line ends there.
    const slope = 1 - alpha;
    const stop = Math.min(ends[1], slope < 0 ? start + (y[0] - curve(start)) / slope : ends[1]);
    made.root.append(
      svg("line", { x1: made.X(start), x2: made.X(start), y1: made.top, y2: made.bottom, stroke: "var(--fit)", "stroke-dasharray": "4 4" }),
      svg("text", { class: "halo", x: made.X(start) + (start > (x[0] + x[1]) / 2 ? -5 : 5), y: made.top + 10, "text-anchor": start > (x[0] + x[1]) / 2 ? "end" : "start" }, `xmin ${figure(xmin)}`),
      svg("path", { d: path([[start, clip(curve(start))], [stop, clip(curve(stop))]], made.X, made.Y), fill: "none", stroke: "var(--fit)", "stroke-width": 2, "stroke-dasharray": "8 3" }));
  }
}

// Fewer bins where there are few eigenvalues: each is to hold some.
function merged(bins, count) {
  const together = count < 120 ? 4 : count < 1000 ? 2 : 1;
  return Array.from({ length: bins.length / together }, (_, at) => bins.slice(at * together, (at + 1) * together).reduce((a, b) => a + b, 0));
}

// Counts of alpha in bins of a quarter from 1 to LAST_ALPHA, what is above in one more.
function alphaCounts(alphas) {
  const counts = new Array((LAST_ALPHA - 1) * 4 + 1).fill(0);
  for (const alpha of alphas) if (present(alpha)) counts[Math.min(counts.length - 1, Math.max(0, Math.floor((alpha - 1) * 4)))]++;
  return counts;
}

// series: [{name, counts, colour, fill}] as shares of each series' own total.
function alphaHistogram(series, { height, label, width }) {
  const shares = series.map(({ counts }) => { const all = counts.reduce((a, b) => a + b, 0) || 1; return counts.map((each) => each / all); });
  const most = Math.max(0.02, ...shares.flat());
  const end = LAST_ALPHA + 0.25;
  const made = frame({ width, height, x: [1, end], y: [0, most * 1.05], xTicks: [2, 4, 6, 8, 10, LAST_ALPHA], yTicks: ticks(0, most, 4), xWord: "alpha", yWord: "share of matrices",
    tell: (at) => at === LAST_ALPHA ? `${at}+` : String(at), tellY: (at) => `${Math.round(at * 1000) / 10} %`, label });
  series.forEach(({ colour: stroke, fill }, number) => {
    const points = [[1, 0]];
    shares[number].forEach((each, bin) => points.push([1 + bin / 4, each], [1 + (bin + 1) / 4, each]));
    points.push([end, 0]);
    made.root.append(svg("path", { d: path(points, made.X, made.Y), fill: fill ? stroke : "none", "fill-opacity": fill ? 0.28 : null, stroke, "stroke-width": fill ? 1 : 1.8, "stroke-linejoin": "round" }));
  });
  return made.root;
}

// Alpha of each module over depth: lines for the commonest modules, the median of all in front.
function depthChart(layout, alpha, label) {
  const groups = new Map();
  layout.names.forEach((_, i) => {
    if (layout.layer[i] === null || !present(alpha[i])) return;
    if (!groups.has(layout.module[i])) groups.set(layout.module[i], []);
    groups.get(layout.module[i]).push([layout.layer[i], alpha[i]]);
  });
  const all = [...groups.values()].flat();
  if (all.length < 2) return null;
  const depths = [...new Set(all.map(([depth]) => depth))].sort((a, b) => a - b);
  const sorted = all.map(([, each]) => each).sort((a, b) => a - b);
  // One wild layer must not flatten all others: the axis ends at the 98th percentile, with the rest drawn on its edge.
  const top = Math.max(6.5, sorted[Math.floor(sorted.length * 0.98)] * 1.1);
  const above = sorted.filter((each) => each > top).length;
  const made = frame({ x: [depths[0], Math.max(depths.at(-1), depths[0] + 1)], y: [1, top], xTicks: ticks(depths[0], depths.at(-1), 8).filter(Number.isInteger),
    yTicks: ticks(1, top, 6), xWord: "layer", yWord: "alpha", label });
  made.root.append(svg("rect", { x: made.left, width: made.right - made.left, y: made.Y(Math.min(6, top)), height: made.Y(2) - made.Y(Math.min(6, top)), fill: "var(--accent)", opacity: 0.07 }));
  const shown = [...groups].sort((a, b) => b[1].length - a[1].length).slice(0, LINES.length);
  const inside = (points) => points.map(([depth, each]) => [depth, Math.min(each, top)]);
  shown.forEach(([, points], number) => {
    made.root.append(svg("path", { d: path(inside(points), made.X, made.Y), fill: "none", stroke: LINES[number], "stroke-width": 1.3, opacity: 0.8 }));
    if (points.length < 60) points.forEach(([depth, each]) => made.root.append(svg("circle", { cx: made.X(depth), cy: made.Y(Math.min(each, top)), r: 2.5, fill: LINES[number] }, svg("title", {}, `layer ${depth}, ${shown[number][0]}: alpha ${figure(each)}`))));
  });
  const middle = depths.map((depth) => { const here = all.filter(([at]) => at === depth).map(([, each]) => each).sort((a, b) => a - b); return [depth, (here[(here.length - 1) >> 1] + here[here.length >> 1]) / 2]; });
  made.root.append(svg("path", { d: path(inside(middle), made.X, made.Y), fill: "none", stroke: "var(--mark)", "stroke-width": 2.5 }));
  const keys = [["median", "var(--mark)"], ...shown.map(([word], number) => [word, LINES[number]])];
  const rest = groups.size - shown.length;
  return make("div", {}, made.root, legend(keys),
    make("p", { class: "note" }, ["Shaded: alpha 2 to 6.", above ? `${above} above ${figure(top)} ${above === 1 ? "lies" : "lie"} on the upper edge.` : "", rest > 0 ? `${rest} more modules are in the median only.` : ""].filter(Boolean).join(" ")));
}

function legend(keys) {
  return make("div", { class: "legend" }, ...keys.map(([word, tint]) => { const i = make("i"); i.style.background = tint; return make("span", { class: "key" }, i, word); }));
}

// Median, and the range from the least to the largest, on one scale for all rows of a table.
function rangeBar({ min, median, max }) {
  const [width, high] = [110, 14];
  const X = (value) => 2 + Math.min(1, (Math.log(value) - 0) / Math.log(16)) * (width - 4);
  const root = svg("svg", { viewBox: `0 0 ${width} ${high}`, role: "img", "aria-label": `from ${figure(min)} to ${figure(max)}` });
  root.append(svg("rect", { x: X(2), width: X(6) - X(2), y: 0, height: high, fill: "var(--hair)" }),
    svg("line", { x1: X(min), x2: X(max), y1: high / 2, y2: high / 2, stroke: "var(--soft)" }),
    svg("circle", { cx: X(median), cy: high / 2, r: 4.5, fill: ramp(median, ALPHA_STOPS), stroke: "var(--soft)" }));
  return root;
}

// A tiny picture of the change by layer: bars up and down from the middle.
function changeStrip(values, most) {
  const [width, high] = [150, 22];
  const root = svg("svg", { viewBox: `0 0 ${width} ${high}`, class: "strip", "aria-hidden": "true" });
  root.append(svg("line", { x1: 0, x2: width, y1: high / 2, y2: high / 2, stroke: "var(--line)" }));
  const step = width / values.length;
  values.forEach((value, at) => {
    if (!present(value)) return;
    const reach = Math.max(-1, Math.min(1, value / most)) * (high / 2 - 1);
    root.append(svg("rect", { x: at * step, width: Math.max(0.6, step * 0.8), y: reach > 0 ? high / 2 - reach : high / 2, height: Math.max(0.4, Math.abs(reach)), fill: reach > 0 ? "#d9822b" : "#3f86c0" }));
  });
  return root;
}
