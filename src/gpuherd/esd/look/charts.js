// Spectra with their fitted law, histograms of alpha, and alpha over depth, on the specifications of charts.py.

const LAST_ALPHA = 12; // what is larger is counted in the last bin
const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f"];
const UNBROKEN = [1, 0];
const WHOLE = "datum.value % 1 ? '' : datum.value"; // of an axis of whole numbers
const POWERS = "abs(datum.value) <= 3 ? format(pow(10, datum.value), '~g') : '1e' + datum.value"; // of an axis of logarithms

// A chart of a specification: x and y are {title, domain, values, labels}, rows by layer.
function drawn(name, { x, y, rows, label, along = false, height }) {
  const axes = Object.entries({ x, y }).map(([field, { title, domain, values, labels }]) => [field, { field, type: "quantitative",
    axis: { title, values, labelExpr: labels, tickCount: 6 }, scale: { domain, nice: false, zero: false, clamp: true } }]);
  const spec = structuredClone(index.charts[name]);
  for (const { encoding } of spec.layer) for (const [field, axis] of axes) if (encoding[field]?.field) encoding[field] = axis;
  const data = Object.fromEntries(spec.layer.map((layer) => [layer.data.name, rows[layer.data.name] ?? []]));
  return chart({ spec: { ...spec, height: height ?? spec.height }, data, label, along });
}

// Where an axis of logarithms is labelled: at powers of ten; at 2 and 5 times these too where that gives too few.
function powers(low, high) {
  const step = Math.max(1, Math.ceil((high - low) / 7));
  const out = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) out.push(at);
  if (out.length > 2) return out;
  for (let at = Math.floor(low); at <= high; at++) for (const part of [2, 5]) out.push(at + Math.log10(part));
  return out.filter((at) => at >= low && at <= high);
}

const logAxis = (title, domain) => ({ title, domain, values: powers(...domain), labels: POWERS });

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
  const ends = [sketch.x[0], sketch.x.at(-1)];
  const pad = (ends[1] - ends[0]) * 0.03 || 0.5;
  const x = [ends[0] - pad, ends[1] + pad];
  const fitted = present(alpha) && present(xmin) && xmin > 0;
  const start = fitted ? Math.log10(xmin) : null;
  // The share of eigenvalues in the tail: as counted, else read off the curve.
  const begin = !fitted ? null : present(tail) && Number.isFinite(count) ? Math.log10(tail / count) : share(sketch, start);
  const law = (at) => begin + (1 - alpha) * (at - start);
  const density = (at) => law(at) + Math.log10((alpha - 1) * Math.LN10);
  return [ccdfChart(), densityChart()];

  function ccdfChart() {
    const y = [Math.min(...sketch.y) * 1.06 - 0.05, 0.1];
    const curve = [...sketch.x].map((each, i) => ({ series: "eigenvalues", x: each, y: sketch.y[i], colour: "var(--accent)", dash: UNBROKEN, width: 2 }));
    return plot(y, "share ≥ λ", `${name}: share of eigenvalues from λ on, log-log`, { lines: [...curve, ...fit(y, law)] });
  }

  function densityChart() {
    const shares = merged(sketch.bins, count);
    const width = (ends[1] - ends[0]) / shares.length || 1;
    const bars = shares.map((each, i) => [ends[0] + i * width, Math.log10(each / width)]).filter(([, high]) => Number.isFinite(high));
    const heights = bars.map(([, high]) => high);
    const highest = Math.max(...heights, fitted ? density(start) : -Infinity);
    const y = [Math.max(Math.min(...heights), highest - 6) - 0.3, highest + 0.3];
    return plot(y, "density over log₁₀ λ", `${name}: density of eigenvalues, log-log`, {
      bars: bars.map(([at, high]) => ({ x: at, x2: at + width * 0.94, y: high, y2: y[0], colour: "var(--accent)" })),
      rules: present(edge) && edge > 0 && Math.log10(edge) > x[0] && Math.log10(edge) < x[1] ? [{ x: Math.log10(edge), colour: "var(--edge)", dash: [2, 3] }] : [],
      lines: fit(y, density),
    });
  }

  function plot(y, title, label, { rules = [], ...rows }) {
    const side = start > (x[0] + x[1]) / 2 ? "words_left" : "words";
    const mark = fitted ? { rules: [...rules, { x: start, colour: "var(--fit)", dash: [4, 4] }], [side]: [{ x: start, text: `xmin ${figure(xmin)}` }] } : { rules };
    return drawn("plot", { x: logAxis("eigenvalue λ", x), y: logAxis(title, y), rows: { ...rows, ...mark }, label });
  }

  // Where the law leaves the frame below, its line ends there.
  function fit(y, curve) {
    if (!fitted) return [];
    const clip = (at) => Math.max(y[0], Math.min(y[1], at));
    const stop = Math.min(ends[1], alpha > 1 ? start + (y[0] - curve(start)) / (1 - alpha) : ends[1]);
    return [start, stop].map((at) => ({ series: "law", x: at, y: clip(curve(at)), colour: "var(--fit)", dash: [8, 3], width: 2 }));
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

// series: [{word, counts, colour, fill}] as shares of each series' own total.
function alphaHistogram(series, { height, label }) {
  const shares = series.map(({ counts }) => { const all = counts.reduce((a, b) => a + b, 0) || 1; return counts.map((each) => each / all); });
  const edges = [...shares[0] ?? [], null].map((_, bin) => 1 + bin / 4);
  const most = Math.max(0.02, ...shares.flat());
  const corners = series.map(({ colour, fill }, at) => ({ fill, rows: [...edges, edges.at(-1)].map((_, i) => ({ series: String(at), colour, dash: UNBROKEN,
    x: edges[Math.max(0, i - 1)], y: i === 0 ? 0 : shares[at][i - 1] ?? 0 })) }));
  const stops = edges.slice(0, -1).map((x, bin) => ({ x, x2: edges[bin + 1],
    tip: [`alpha ${x} ${bin === edges.length - 2 ? "and above" : `to ${edges[bin + 1]}`}`, ...series.map(({ word }, at) => `${word}: ${percent(shares[at][bin])}`)].join("\n") }));
  const rows = { areas: corners.filter(({ fill }) => fill).flatMap((each) => each.rows), steps: corners.flatMap((each) => each.rows), stops };
  return drawn("histogram", { rows, label, height, along: true, x: { title: "alpha", domain: [1, LAST_ALPHA + 0.25], values: [2, 4, 6, 8, 10, LAST_ALPHA], labels: `datum.value == ${LAST_ALPHA} ? '${LAST_ALPHA}+' : datum.value` },
    y: { title: "share of matrices", domain: [0, most * 1.05], labels: "round(datum.value * 1000) / 10 + ' %'" } });
}

// Alpha of each module over depth: lines for the commonest modules, the median of all in front.
function depthChart(layout, alpha, label) {
  const groups = new Map();
  layout.names.forEach((_, i) => {
    if (layout.layer[i] === null || !present(alpha[i])) return;
    groups.set(layout.module[i], [...(groups.get(layout.module[i]) ?? []), [layout.layer[i], alpha[i]]]);
  });
  const all = [...groups.values()].flat();
  if (all.length < 2) return null;
  const depths = [...new Set(all.map(([depth]) => depth))].sort((a, b) => a - b);
  const sorted = all.map(([, each]) => each).sort((a, b) => a - b);
  // One wild layer must not flatten all others: the axis ends at the 98th percentile, with the rest drawn on its edge.
  const top = Math.max(6.5, sorted[Math.floor(sorted.length * 0.98)] * 1.1);
  const above = sorted.filter((each) => each > top).length;
  const shown = [...groups].sort((a, b) => b[1].length - a[1].length).slice(0, LINES.length);
  const middle = depths.map((depth) => [depth, median(all.filter(([at]) => at === depth).map(([, each]) => each))]);
  const line = (series, points, colour, width) => points.map(([x, y]) => ({ series, x, y, colour, dash: UNBROKEN, width }));
  const rows = {
    shade: [{ y: 2, y2: Math.min(6, top) }],
    lines: [...shown.flatMap(([word, points], at) => line(word, points, LINES[at], 1.3)), ...line(" median", middle, "var(--mark)", 2.5)],
    dots: shown.flatMap(([word, points], at) => points.length < 60 ? points.map(([x, y]) => ({ x, y, colour: LINES[at], tip: `layer ${x}, ${word}: alpha ${figure(y)}` })) : []),
  };
  const picture = drawn("plot", { rows, label, x: { title: "layer", domain: [depths[0], Math.max(depths.at(-1), depths[0] + 1)], labels: WHOLE }, y: { title: "alpha", domain: [1, top] } });
  const rest = groups.size - shown.length;
  return make("div", {}, picture, legend([["median", "var(--mark)"], ...shown.map(([word], at) => [word, LINES[at]])]),
    make("p", { class: "note" }, ["Shaded: alpha 2 to 6.", above ? `${above} above ${figure(top)} ${above === 1 ? "lies" : "lie"} on the upper edge.` : "", rest > 0 ? `${rest} more modules are in the median only.` : ""].filter(Boolean).join(" ")));
}

const legend = (keys) => make("div", { class: "legend" }, ...keys.map(([word, colour]) => widgets.key({ colour }, [word])));

// Median, and the range from the least to the largest, on one scale for all rows of a table.
function rangeBar({ min, median: middle, max }) {
  const place = (value) => Math.max(0, Math.min(1, Math.log(value) / Math.log(16)));
  const bar = widgets.interval({ value: place(middle), low: place(min), high: place(max), band: [place(2), place(6)], label: `from ${figure(min)} to ${figure(max)}` });
  bar.querySelector(".dot").style.background = ramp(middle, ALPHA_STOPS);
  return bar;
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
