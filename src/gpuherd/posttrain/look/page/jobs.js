// The jobs in time, a lane a GPU, and what failed.

const PHASE_TINTS = { collect: "#56b4e9", train: "#e69f00", evaluate: "#009e73", "": "#8c6bb1" };

function jobsView() {
  const { timeline } = index;
  if (!timeline) return [make("section", { class: "card" }, make("p", {}, "This run has no queue: nothing is known of its jobs."))];
  return [make("section", { class: "card" }, make("h2", {}, "Jobs in time"), timeline.bars.length ? gantt(timeline) : make("p", {}, "No job has started yet."), hoursWords(timeline)),
    hoursCard(timeline),
    make("section", { class: "card" }, make("h2", {}, "Failures"), timeline.failures.length ? table({ columns: [
      { word: "job", class: "name", key: (each) => each[0], cell: (each) => each[0] },
      { word: "kind", key: (each) => each[1], cell: (each) => make("span", { class: each[3] ? "bad" : null }, each[1]) },
      { word: "then", key: (each) => each[3] ? 0 : 1, cell: (each) => each[3] ? "no result" : "tried again" },
      { word: "reason", class: "name", cell: (each) => each[2] || "–" },
    ], rows: timeline.failures, label: "failures", words: (each) => each.join(" ") }).root : make("p", {}, "None."))];
}

const clock = (seconds) => seconds === 0 ? "0 s" : seconds < 90 ? `${seconds.toFixed(seconds < 10 ? 1 : 0)} s` : seconds < 5400 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(2)} h`;

function gantt({ bars, length }) {
  const lanes = [...new Set(bars.flatMap((bar) => bar[2]))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const rows = new Map(); // jobs that share a lane lie below each other
  const placed = bars.flatMap((bar) => bar[2].map((lane) => {
    const ends = rows.get(lane) ?? [];
    let at = ends.findIndex((end) => end <= bar[3] + 1e-9);
    if (at < 0) at = ends.length;
    ends[at] = bar[4] ?? Infinity;
    rows.set(lane, ends);
    return { bar, lane, at };
  }));
  const tall = 18;
  const tops = new Map();
  let height = 8;
  for (const lane of lanes) { tops.set(lane, height); height += rows.get(lane).length * tall + 8; }
  const width = isNarrow() ? 360 : 1100;
  const left = isNarrow() ? 60 : 90;
  const whole = (bars.some((bar) => !present(bar[4])) ? 1.06 * length : length) || 1; // what runs has no end yet
  const X = (seconds) => left + seconds / whole * (width - left - 12);
  const [scale, unit] = whole < 120 ? [1, "s"] : whole < 7200 ? [60, "min"] : [3600, "h"];
  const root = svg("svg", { viewBox: `0 0 ${width} ${height + 26}`, role: "img", "aria-label": `${bars.length} attempts of jobs on ${lanes.length} devices over ${clock(length)}: arrow keys walk through them` });
  for (const at of ticks(0, whole / scale, 6)) root.append(svg("line", { x1: X(at * scale), x2: X(at * scale), y1: 0, y2: height, stroke: "var(--grid)" }), svg("text", { x: X(at * scale), y: height + 14, "text-anchor": "middle" }, `${figure(at)} ${unit}`));
  for (const lane of lanes) root.append(svg("text", { x: left - 6, y: tops.get(lane) + 12, "text-anchor": "end" }, lane.length > 14 ? `${lane.slice(0, 13)}…` : lane));
  const marks = placed.map(({ bar, lane, at }) => {
    const [job, phase, , start, end, outcome] = bar;
    const tint = PHASE_TINTS[phase] ?? PHASE_TINTS[""];
    const mark = svg("rect", { x: X(start), y: tops.get(lane) + at * tall, width: Math.max(1.5, X(end ?? whole) - X(start)), height: tall - 4, rx: 2, fill: tint, "fill-opacity": outcome === "requeued" ? 0.45 : present(end) ? 1 : 0.25, stroke: outcome === "failed" ? "var(--bad)" : present(end) ? "none" : tint, "stroke-width": 2, "stroke-dasharray": present(end) ? null : "4 3" });
    const told = [job, `${phase || "job"} on ${bar[2].join(", ")}: ${outcome}`, present(end) ? `${clock(start)} to ${clock(end)} (${clock(end - start)})` : `since ${clock(start)}`];
    root.append(mark);
    return { mark, told };
  });
  walked(root, marks);
  const phases = [...new Set(bars.map((bar) => bar[1]))];
  return make("div", {}, root, make("div", { class: "legend" }, ...phases.map((phase) => { const key = svg("svg", { viewBox: "0 0 14 10", class: "key-box", "aria-hidden": "true" }, svg("rect", { width: 14, height: 10, rx: 2, fill: PHASE_TINTS[phase] ?? PHASE_TINTS[""] })); return make("span", { class: "key" }, key, phase || "other"); }),
    bars.some((bar) => bar[5] === "failed") ? make("span", { class: "key bad" }, "outlined: failed") : null, bars.some((bar) => bar[5] === "requeued") ? make("span", { class: "key" }, "pale: stopped, and done again") : null, bars.some((bar) => !present(bar[4])) ? make("span", { class: "key" }, "dashed: not ended when this page was made") : null));
}

// What each algorithm took, by phase: of GPUs, or of jobs where there were none.
function hoursCard({ hours }) {
  const rows = Object.entries(hours).map(([algorithm, phases]) => ({ algorithm, phases, all: Object.values(phases).reduce((a, b) => a + b, 0) }));
  if (!rows.length) return null;
  const phases = ["collect", "train", "evaluate", "other"].filter((phase) => rows.some((row) => present(row.phases[phase])));
  const columns = [{ word: "algorithm", class: "name", key: (row) => row.algorithm, cell: (row) => named(row.algorithm) },
    ...phases.map((phase) => ({ word: phase, num: true, key: (row) => row.phases[phase], cell: (row) => hoursIn(row.phases[phase]) })),
    { word: "all", num: true, key: (row) => row.all, cell: (row) => make("b", {}, hoursIn(row.all)) }];
  return make("section", { class: "card" }, make("h2", {}, `What each took, in ${hoursUnit()}`), table({ columns, rows, label: "what each took", sort: columns.length - 1, descending: true }).root,
    make("p", { class: "note" }, "All attempts count, those too that failed or were stopped."));
}

const hoursUnit = () => index.timeline.gpuHours ? "GPU-hours" : "hours of jobs on CPUs";
const hoursIn = (value) => !present(value) ? "–" : value < 0.001 ? axisWords(value) : value < 0.01 ? value.toPrecision(2) : figure(value);

function hoursWords({ gpuHours, counts }) {
  const jobs = ["done", "running", "waiting", "failed", "cancelled"].filter((name) => counts[name]).map((name) => `${counts[name]} ${name}`).join(", ");
  const hours = gpuHours ? Object.entries(gpuHours).map(([phase, each]) => `${phase} ${figure(each)}`).join(", ") : null;
  return make("p", { class: "note" }, `Jobs: ${jobs || "none"}.${hours ? ` GPU-hours: ${hours}.` : ""}`);
}
