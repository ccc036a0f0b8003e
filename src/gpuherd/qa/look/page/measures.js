// How well each measure tells wrong answers from right ones: the table, the curves, the histogram.

// The evaluation under the judge that is looked at, null where it is not evaluated.
const evaluated = () => index.evaluation?.judges.find(({ judge }) => judge === state.judge) ?? null;

// A choice of the judge, where there are several.
function judgeChoice() {
  const offered = index.evaluation ? index.evaluation.judges.map(({ judge }) => judge) : index.judges.map((_, at) => at);
  if (!offered.includes(state.judge) && state.judge < index.judges.length) offered.push(state.judge);
  if (offered.length < 2) return null;
  const choice = make("select", { onchange: () => { state.judge = Number(choice.value); show(); } }, ...offered.map((at) => make("option", { value: at, selected: at === state.judge }, plain(index.judges[at].name))));
  return make("label", { class: "together" }, "judged by", choice);
}

const card = (title, ...children) => make("section", { class: "card" }, title ? make("h2", {}, title) : null, ...children);

function measuresView() {
  const found = evaluated();
  if (!found) return [card("Not evaluated", make("div", { class: "bar" }, judgeChoice()), make("p", {}, index.evaluation ? "This judging is not part of the evaluation." : "gpuherd evaluate makes the figures; until then this page shows the answers."))];
  const drawn = new Set(state.drawn ?? firstDrawn(found));
  const curves = make("div", { class: "pair" });
  const single = make("div", {});
  const rows = found.measures.filter(({ weighting }) => weighting === null || state.weightings);
  const low = Math.min(0.4, ...found.measures.map(({ auroc }) => auroc.ends?.[0] ?? auroc.value ?? 1));
  const columns = [
    { word: "", why: "drawn below", class: "pick", cell: (m) => box(m) },
    { word: "measure", key: (m) => m.name, class: "name", cell: (m) => make("button", { type: "button", class: "plain", title: sourceOf(m.name), onclick: () => { state.measure = m.name; draw(); single.scrollIntoView({ block: "nearest" }); } }, m.name) },
    { word: "AUROC", why: "P(a wrong answer scores higher than a right one), ties by half", num: true, key: (m) => m.auroc.value, cell: (m) => told(m.auroc, m) },
    { word: span([low, 1]), why: "AUROC with its interval; dotted: chance", class: "picture", rare: true, cell: (m) => whisker(m.auroc, [low, 1], { at: 0.5, faint: !m.conclusive, label: "AUROC" }) },
    { word: "AUPRC", why: "average precision at finding wrong answers; chance gives the share of wrong ones", num: true, rare: true, key: (m) => m.auprc.value, cell: (m) => told(m.auprc, m) },
    { word: "PRR", why: "prediction rejection ratio: 0 is chance, 1 the best order", num: true, rare: true, key: (m) => m.prr.value, cell: (m) => told(m.prr, m) },
    { word: "AURAC", why: "mean accuracy over all rejections", num: true, rare: true, key: (m) => m.aurac.value, cell: (m) => told(m.aurac, m) },
    { word: `Δ to ${index.evaluation.against}`, why: `AUROC minus that of ${index.evaluation.against}, on the answers that both score; interval and p by DeLong's test, both corrected by Holm for the measures shown: the interval leaves out 0 where p is below ${Math.round(1000 * (1 - index.evaluation.confidence)) / 1000}`, num: true, rare: true, key: (m) => m.difference?.auroc.value, cell: (m) => difference(m, state.weightings) },
    { word: "ECE", why: `expected calibration error after cross-validated ${index.evaluation.calibration} calibration`, num: true, rare: true, key: (m) => m.ece.value, cell: (m) => told(m.ece, m) },
    { word: "answers", why: "with a label and a score", num: true, key: (m) => m.right + m.wrong, cell: (m) => scored(m) },
  ];
  const whole = table({ label: "measures", page: 200, words: rows.length > 12 ? (m) => m.name : null, hint: "filter by name", rows, sort: 2, descending: true, columns });

  function box(m) {
    const input = make("input", { type: "checkbox", "aria-label": `draw ${m.name}`, checked: drawn.has(m.name), onchange: () => { if (!drawn.delete(m.name)) drawn.add(m.name); state.drawn = [...drawn]; draw(); } });
    return input;
  }

  function draw() {
    const shown = [...drawn].map((name) => found.measures.find((m) => m.name === name)).filter((m) => m?.roc.length);
    const series = (kind) => shown.map((m, number) => ({ word: m.name, points: m[kind], ...lineOf(number) }));
    const share = (at) => present(at) ? percent(at) : "–";
    const whole = (at) => `${Math.round(100 * at)} %`;
    const few = shown.every((m) => m.conclusive) ? null : TOO_FEW;
    const axis = { note: few, x: [0, 1], xTicks: ticks(0, 1, 5), tell: share, tickX: whole, tickY: whole };
    const least = Math.min(1, ...shown.flatMap((m) => m.rejection.map(([, y]) => y)));
    const floor = Math.max(0, Math.floor((least - 0.02) * 10) / 10);
    curves.replaceChildren(...shown.length ? [
      card("ROC: wrong answers found", lines({ ...axis, series: series("roc"), y: [0, 1], yTicks: ticks(0, 1, 5), xWord: "right answers flagged", yWord: "wrong answers flagged", label: "ROC curves", diagonal: true })),
      card("Accuracy when the least certain are rejected", lines({ ...axis, series: series("rejection"), y: [floor, 1], yTicks: ticks(floor, 1, 5), xWord: "answers kept", yWord: "accuracy of these", label: "rejection curves", level: found.right / (found.right + found.wrong) })),
    ] : [card(null, make("p", { class: "soft" }, found.measures.some((m) => m.roc.length) ? "Tick measures in the table to draw their curves." : "There are no curves: no measure has both right and wrong answers."))]);
    const one = found.measures.find((m) => m.name === state.measure) ?? shown[0] ?? found.measures[0];
    single.replaceChildren(one ? detail(one) : "");
  }

  draw();
  const weightings = found.measures.filter(({ weighting }) => weighting !== null).length;
  return [card("Measures of uncertainty",
    make("div", { class: "bar" }, judgeChoice(), weightings ? make("label", { class: "together" }, make("input", { type: "checkbox", checked: state.weightings, onchange: () => { state.weightings = !state.weightings; show(); } }), `with ${weightings} token weightings`) : null),
    warned(found), labelled(found), whole.root, intervalNote(), meanings(columns)), curves, single];
}

// The headings in words, for who has no pointer to rest on them.
const meanings = (columns) => make("details", { class: "how" }, make("summary", {}, "What the figures mean"),
  make("dl", {}, ...columns.filter(({ word, why, key }) => word && why && key).flatMap(({ word, why }) => [make("dt", {}, word), make("dd", {}, why)])));

// What a picture without an axis reaches over.
const span = ([low, high]) => `${Number(low.toFixed(2))} to ${Number(high.toFixed(2))}`;

const TOO_FEW = "Too few answers of one class: nothing can be concluded from these lines.";

// What makes the labels doubtful, where the head speaks of several judgings.
const warned = ({ warnings }) => index.judges.length > 1 && warnings.length ? make("div", {}, ...warnings.map((each) => make("p", { class: "warn" }, each))) : null;

function firstDrawn(found) {
  const { against } = index.evaluation;
  const known = found.measures.filter(({ weighting, auroc }) => weighting === null && present(auroc.value)).sort((a, b) => b.auroc.value - a.auroc.value);
  // Of measures that order the answers alike, as NLL a token and perplexity do, one curve is enough.
  const curves = new Set(known.filter(({ name }) => name === against).map(({ roc }) => JSON.stringify(roc)));
  const best = known.filter(({ roc }) => { const curve = JSON.stringify(roc); return !curves.has(curve) && curves.add(curve); });
  return [...best.slice(0, 3), ...known.filter(({ name }) => name === against)].map(({ name }) => name);
}

// The value, its interval below it, and why either is missing.
function told(found, m) {
  if (!present(found.value)) return make("span", { class: "soft", title: found.note ?? "not defined" }, "–");
  return make("span", { class: m.conclusive ? null : "soft", title: found.note }, fixed(found.value), found.ends ? make("span", { class: "ends" }, `${fixed(found.ends[0])} to ${fixed(found.ends[1])}`) : found.note ? make("span", { class: "ends" }, found.note) : null);
}

// The difference with p and interval, corrected alike: for all measures, or for those alone that are no weightings.
function difference(m, withWeightings) {
  if (!m.difference) return m.name === index.evaluation.against ? make("span", { class: "soft" }, "–") : "–";
  const { auroc, among_all: all, among_measures: measures } = m.difference;
  const found = (withWeightings ? all : measures) ?? { p: null, ends: null };
  const cell = told({ ...auroc, ends: found.ends }, m);
  const { p } = found;
  if (present(p)) cell.firstChild.after(make("span", { class: "p" }, p < 0.001 ? "p < 0.001" : p > 0.999 ? "p 1" : `p ${fixed(p)}`));
  return cell;
}

function scored(m) {
  const missing = Object.entries(m.undefined);
  const count = missing.reduce((all, [, each]) => all + each, 0);
  return make("span", { title: missing.map(([why, each]) => `${each}: ${why}`).join("\n") || null }, `${m.right + m.wrong}`, count ? make("span", { class: "ends" }, `${count} undefined`) : null);
}

// What a measure is, in words, and where its formula is from.
function sourceOf(name) {
  const found = index.measures.find((each) => each.name === name);
  return found ? [found.summary, found.source].filter(Boolean).join(". ") : null;
}

function labelled({ right, wrong, left_out: out, counts, which }) {
  const base = right + wrong ? `${percent(wrong / (right + wrong))} wrong: the AUPRC of chance. ` : "";
  const wrongToo = index.evaluation.not_attempted === "incorrect" ? counts[2] : 0;
  const reasons = [[counts[2] - wrongToo, "not attempted"], [counts[3], "unparsed"], [counts[4], "NaN"]];
  reasons.push([out - reasons[0][0] - reasons[1][0] - reasons[2][0], "not judged"]);
  const left = out ? `${out} left out (${reasons.filter(([count]) => count > 0).map((each) => each.join(" ")).join(", ")}). ` : "";
  const taken = wrongToo ? ` (${wrongToo} of them not attempted)` : "";
  const one = !right || !wrong ? make("p", { class: "warn" }, `All labels are ${right ? "right" : "wrong"}: there is nothing to tell apart, and no AUROC.`) : null;
  return make("div", {}, make("p", { class: "note" }, `${which === "greedy" ? "Greedy answers" : "First samples"}: ${right} right, ${wrong} wrong${taken}. ${left}${base}`), one);
}

function intervalNote() {
  const { confidence, bootstrap } = index.evaluation;
  return make("p", { class: "note" }, `Intervals of ${Math.round(confidence * 1000) / 10} %, from ${bootstrap.toLocaleString("en")} resamples of the questions unless said otherwise. Grey, with a hollow dot: too few answers of one class to conclude anything.`);
}

function detail(m) {
  const figures = [["AUROC", m.auroc], ["AUPRC", m.auprc], ["PRR", m.prr], ["PRR to one half", m.prr_half], ["AURAC", m.aurac], ["ECE", m.ece], ...m.at.map(([coverage, found]) => [`accuracy at ${Math.round(1000 * coverage) / 10} % kept`, found])];
  const closed = m.closed ? [["AUROC from counts alone", { value: m.auroc.value, ends: m.closed }]] : [];
  const list = make("dl", { class: "scores" }, ...[...figures, ...closed].map(([word, found]) => make("div", {}, make("dt", {}, word), make("dd", {}, words(found), found.note ? make("span", { class: "ends" }, found.note) : null))));
  const source = sourceOf(m.name);
  return card(m.name, source ? make("p", { class: "note" }, source) : null,
    make("div", { class: "pair inner" }, m.histogram ? histogram({ edges: m.histogram[0], right: m.histogram[1], wrong: m.histogram[2], name: m.name }) : make("p", { class: "soft" }, "No score is defined."), list));
}
