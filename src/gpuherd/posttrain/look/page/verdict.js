// What a run says, in sentences: which method is better, by how much, at what KL and cost, how surely, and what failed.

const MOST_VERDICTS = 12;
const MOST_NAMED = 4; // methods in a sentence, each with its distance

function shortCard() {
  const told = index.comparisons.map(verdict).filter(Boolean);
  const left = told.length - MOST_VERDICTS;
  const lines = [...told.slice(0, MOST_VERDICTS), left > 0 ? make("p", { class: "soft" }, `${several(left, "further comparison")}: the differences are below.`) : null, costLine(), failureLine()].filter(Boolean);
  return lines.length ? make("section", { class: "card short" }, make("h2", {}, "In short"), ...lines) : null;
}

function verdict(comparison) {
  const { metric } = comparison;
  const rows = lastRows(comparison);
  if (rows.length < 2 || !comparison.differences.length) return null;
  const [best] = rows;
  const [value, kl] = [best.figures[metric], best.figures.kl];
  const first = rows.filter((row) => row.figures[metric].value === value.value).map((row) => row.algorithm);
  const top = first.length === rows.length ? `all are at ${metric} ${toldFigure(value, metric)}`
    : first.length > 1 ? `${listed(first.map(theMethod))} are highest, at ${metric} ${toldFigure(value, metric)}`
    : `${theMethod(best.algorithm)} is highest: ${metric} ${toldFigure(value, metric)}${best.algorithm !== index.reference && present(kl?.value) ? ` at KL ${toldFigure(kl, "kl")} nats` : ""}`;
  const rounds = [...new Set(rows.filter((row) => present(row.round)).map((row) => row.round))];
  const apart = rounds.length > 1 ? `Not all are as far: ${listed(rows.filter((row) => present(row.round)).map((row) => `${row.algorithm} after round ${row.round}`))}.` : null;
  return make("p", {}, make("b", {}, `${where(comparison)}: ${top}.`), ` ${[...surely(comparison, best.algorithm, first.length > 1), atEqual(comparison, best.algorithm), apart].filter(Boolean).join(" ")}`);
}

const theMethod = (name) => name === index.reference ? `the ${name}` : name;

// How the highest stands to each other, and which further differences are clear.
function surely(comparison, best, shared) {
  const differences = comparison.differences.map(upward);
  const clear = differences.filter(isClear);
  if (!clear.length) return ["No difference is beyond chance."];
  const over = clear.filter((each) => each.one === best).sort((a, b) => a.figure.value - b.figure.value);
  const open = differences.filter((each) => !isClear(each) && (each.one === best || each.other === best)).map((each) => each.one === best ? each.other : each.one);
  const others = clear.length - over.length;
  const most = Math.max(...over.map((each) => each.holm));
  return [over.length ? `${shared ? theMethod(best) : "It"} is above ${distances(over)}, beyond chance (p corrected ${most < 0.001 ? "" : over.length > 1 ? "at most " : ""}${probabilityWords(most)}, by ${over[0].unit}).` : null,
    open.length ? `Between ${shared ? theMethod(best) : "it"} and ${listed(open.map(theMethod))} nothing is beyond chance.` : null,
    others ? `Of the others, ${several(others, "pair")} differ${others === 1 ? "s" : ""} beyond chance.` : null];
}

// From the nearest to the farthest; of many only these two.
function distances(over) {
  const by = (each) => `${theMethod(each.other)} by ${fixed(each.figure.value)}`;
  return over.length > MOST_NAMED ? `${over.length} others, ${by(over[0])} to ${by(over.at(-1))}` : listed(over.map(by));
}

function atEqual(comparison, best) {
  if (!comparison.atKl.length) return null;
  const pairs = clearPairs(comparison.differencesAtKl.filter(isClear)).sort(([, [a]], [, [b]]) => (b.one === best) - (a.one === best)).map(([pair]) => pair);
  return pairs.length ? `At equal KL, ${listed(pairs)}.` : "At equal KL, no difference is beyond chance.";
}

function costLine() {
  const hours = Object.entries(index.timeline?.hours ?? {}).map(([algorithm, phases]) => [algorithm, Object.values(phases).reduce((a, b) => a + b, 0)]).sort((a, b) => b[1] - a[1]);
  if (!hours.length) return null;
  return make("p", {}, `${hoursUnit()}: ${listed(hours.slice(0, 8).map(([algorithm, all]) => `${algorithm} ${hoursIn(all)}`))}${hours.length > 8 ? `, and ${hours.length - 8} more` : ""}; by phase: see `, make("a", { href: "#/jobs" }, "Jobs"), ".");
}

function failureLine() {
  const lost = (index.timeline?.failures ?? []).filter(([, , , final]) => final);
  if (!lost.length) return null;
  const cancelled = lost.filter(([, kind]) => kind === "cancelled");
  const failed = lost.filter(([, kind]) => kind !== "cancelled");
  const named = failed.slice(0, 3).map(([job, kind, reason]) => `${job} (${kind}${reason ? `: ${reason}` : ""})`);
  if (failed.length > 3) named.push(`${failed.length - 3} more failed`);
  if (cancelled.length) named.push(`${cancelled.length} ${cancelled.length === 1 ? "was" : "were"} cancelled`);
  return make("p", { class: "bad" }, `${several(lost.length, "job")} ${lost.length === 1 ? "has" : "have"} no result: ${named.join("; ")}; see `, make("a", { href: "#/jobs" }, "Jobs"), ".");
}
