// What the page holds: an index of all tables and curves, and the completions of each policy, unpacked when looked at.

let index = null; // what contents.py made

const blob = (name) => document.getElementById(name).textContent;
const parsed = async (text) => JSON.parse(new TextDecoder().decode(await inflate(text)));

async function readIndex() {
  index = await parsed(blob("index"));
  for (const row of index.rows) Object.setPrototypeOf(row.figures, null);
  for (const each of index.trainings) Object.setPrototypeOf(each.series, null); // a figure may be called like a method
}

const opened = new Map();
function completions(number) {
  if (!opened.has(number)) opened.set(number, parsed(blob(`chunk-${number}`)));
  return opened.get(number);
}

const policyWords = (row) => [row.algorithm, dataWords(row), row.family, present(row.round) ? `round ${row.round}` : null, present(row.eta) ? `eta ${axisWords(row.eta)}` : null].filter(Boolean).join(" · ");
const dataWords = (row) => row.dataset === row.on ? row.dataset : `${row.dataset} on ${row.on}`;

// The names of figures that rows have, the usual ones first.
function figureNames(rows) {
  const usual = ["pass@1", "first", "reward", "kl", "kl a token", "tokens", "finished"];
  const all = new Set(rows.flatMap((row) => Object.keys(row.figures)));
  const place = (name) => usual.includes(name) ? usual.indexOf(name) : 2.5;
  return [...all].sort((a, b) => place(a) - place(b) || a.localeCompare(b, "en", { numeric: true }));
}

// A figure as headings and axes call it, with its unit.
const NAMES = { kl: "KL, nats", "kl a token": "KL a token, nats" };
const called = (name) => Object.hasOwn(NAMES, name) ? NAMES[name] : name;

const MEANINGS = {
  "pass@1": "share of right completions, all samples of a problem counted",
  first: "share of problems whose first sample is right",
  reward: "mean reward of a completion",
  kl: "KL(policy || reference) of a whole completion, in nats",
  "kl a token": "the same for each token",
  tokens: "mean length of a completion, its end token counted",
  finished: "share of completions that the policy ended by itself",
};
const meaning = (name) => MEANINGS[name] ?? (name.startsWith("pass@") ? `chance that at least one of ${name.slice(5)} completions is right, estimated without bias`
  : name.startsWith("maj@") ? `is the answer with the most votes of ${name.slice(4)} right?` : "");

// A share is drawn from 0 to 1, where all are small as far as they go; all else over what there is.
const isShare = (name) => /^(pass@|maj@|first$|finished$)/.test(name);

function span(figures, name) {
  const ends = figures.filter((each) => present(each?.value)).flatMap((each) => [each.value, ...(each.ends ?? [])]);
  return isShare(name) ? shareSpread(ends) : spread(ends);
}

function shareSpread(values) {
  const most = Math.max(0, ...values);
  return [0, most > 0 && most < 0.4 ? 1.06 * most : 1];
}

// From the least to the largest of some numbers, with a little room, and 0 within where it is near.
function spread(values) {
  if (!values.length) return [0, 1];
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (low > 0 && low < 0.5 * high) low = 0;
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low === 0 ? 0 : low - room, high + room];
}

// The figures that are shown where not all are wanted: those that say most, and of pass@k and maj@k the largest k.
function mainFigures(rows) {
  const all = figureNames(rows);
  const last = (start) => all.filter((name) => name.startsWith(start)).at(-1);
  const same = rows.every((row) => row.figures["pass@1"] && row.figures.reward?.value === row.figures["pass@1"].value);
  return all.filter((name) => name === "pass@1" || name === "kl" || name === last("maj@") || name === last("pass@") || name === "reward" && !same);
}

// A training's folder is its algorithm's.
const trainedBy = (training) => training.name.split("/")[0];

// An algorithm has one colour and stroke everywhere.
function algorithmLine(name) {
  const seen = [...index.rows.map((row) => row.algorithm), ...Object.keys(index.timeline?.hours ?? {}), ...index.trainings.map(trainedBy)];
  const all = [...new Set(seen)].filter((each) => each !== index.reference).sort();
  return name === index.reference ? { colour: "var(--soft)", dash: "1 3" } : lineOf(all.indexOf(name));
}

// The last round of each method that a comparison is of, the largest metric first.
function lastRows({ family, dataset, on, metric }) {
  const fitting = index.rows.filter((row) => row.own && row.family === family && row.on === on && (row.dataset === dataset || row.algorithm === index.reference) && present(row.figures[metric]?.value));
  return groups(fitting, (row) => row.algorithm).map(([, rows]) => rows.reduce((last, row) => (row.round ?? -1) > (last.round ?? -1) ? row : last))
    .sort((a, b) => b.figures[metric].value - a.figures[metric].value);
}

// The same difference with the larger one first.
function upward(difference) {
  const { value, ends } = difference.figure;
  if (!(value < 0)) return difference;
  return { ...difference, one: difference.other, other: difference.one, figure: { ...difference.figure, value: -value, ends: ends && [-ends[1], -ends[0]] } };
}

function groups(rows, key) {
  const found = new Map();
  for (const row of rows) found.set(key(row), [...(found.get(key(row)) ?? []), row]);
  return [...found];
}

function select(label, options, chosen, changed) {
  return make("label", { class: "together" }, label, make("select", { "aria-label": label, onchange: (event) => changed(event.target.value) },
    ...options.map(([value, word]) => make("option", { value, selected: String(value) === String(chosen) }, word))));
}

// A number on an axis: as short as can be.
function axisWords(value) {
  const size = Math.abs(value);
  const words = size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(1).replace(".0e", "e").replace("e+", "e") : String(Number(value.toPrecision(6)));
  return words.replace(/^-/, "−");
}

// A figure with so many digits as it needs, and with its interval.
function inDigits(found, name) {
  const digits = isShare(name) || name === "reward" ? 3 : 2;
  return (value) => found.value !== 0 && Math.abs(found.value) < 10 ** -digits ? axisWords(Number(value.toPrecision(2))) : fixed(value, digits);
}

function toldFigure(found, name) {
  const told = inDigits(found, name);
  return told(found.value) + (found.ends ? ` [${found.ends.map(told).join(", ")}]` : "");
}

const several = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const listed = (words) => words.length > 1 ? `${words.slice(0, -1).join(", ")} and ${words.at(-1)}` : words.join("");

// Whether a difference is beyond chance; p values as people read them.
const isClear = (difference) => present(difference.holm) && difference.holm < 0.05;
const probabilityWords = (p) => !present(p) ? "–" : p < 0.001 ? "< 0.001" : p.toFixed(3);
