// The answers: unpacked, filtered and sorted; the list, of which only the lines in view exist; what is known of one, token
// by token. answers.py declares the view.

const LINE = 68; // pixels of a line of the list; answers.css says the same
let scores = null; // one Float32Array a measure, NaN where it is not defined
let verdicts = null; // one Uint8Array a judge: places in index.verdicts
const answers = []; // by number; those of chunks that are not unpacked yet are missing

const verdictOf = (number, judge = state.judge) => verdicts.length ? verdicts[judge][number] : index.verdicts.length - 1;
const pill = (verdict) => make("span", { class: `pill v${verdict}` }, index.verdicts[verdict]);
widgets.verdict = ({ code }) => pill(code ?? index.verdicts.length - 1);

scripts.start = async () => {
  const all = await floats(blob("scores"));
  scores = index.measures.map((_, at) => all.subarray(at * index.scored, (at + 1) * index.scored));
  const codes = await inflate(blob("verdicts"));
  verdicts = index.judges.map((_, at) => codes.subarray(at * index.scored, (at + 1) * index.scored));
};

const unpacked = once(async () => {
  const wait = make("p", { class: "soft", role: "status" });
  document.getElementById("main").replaceChildren(wait);
  for (let chunk = 0; chunk * index.chunk < index.shown; chunk++) {
    wait.textContent = `Unpacking the answers… ${Math.round(100 * answers.length / index.shown)} %`;
    for (const each of await parsed(`chunk-${chunk}`)) answers.push(Object.assign(each, { number: answers.length }));
  }
});

records.answers = async ([word]) => {
  await unpacked();
  const given = /^\d{1,9}$/.test(word) && Number(word) < answers.length;
  if (given) state.answer = Number(word);
  else if (isNarrow()) state.answer = null; // there it is a place of its own, which the browser's back button leaves
  else state.answer ??= listed()[0]?.number ?? null;
  return { single: given ? "single" : "", tally, pills, card: () => state.answer === null ? null : cardRecord(answers[state.answer]) };
};

let settling = null;
changed.answer = (number) => {
  if (isNarrow() && !document.querySelector(".browse.single")) { location.hash = `#/answers/${number}`; return true; }
  clearTimeout(settling);
  settling = setTimeout(writeAddress, 150);
  return false;
};
changed.place = (to) => { set("answer", listed()[to].number); return true; };
changed.clear = () => { Object.assign(state, { words: "", low: "", high: "", verdicts: [] }); show(); return true; };

// Once it rests: browsers forbid a page to change its address a hundred times in a few seconds, as a held key would.
function writeAddress() {
  if (!document.querySelector(".browse") || isNarrow()) return;
  history.replaceState(null, "", `#/answers/${state.answer}`);
  document.body.dataset.shown = location.hash;
}

// ---- what is listed, and in which order

let [listedBy, listedNow] = ["", []];
function listed() {
  const now = JSON.stringify(index.filters.map((key) => state[key]));
  if (now !== listedBy) [listedBy, listedNow] = [now, sortedBy(answers.filter(kept()), (one) => value(one) ?? one.number, state.descending)];
  return listedNow;
}

// What the list is sorted by, of one answer: a number, NaN where there is none, null for the order of the questions.
function value(one) {
  if (state.sort === "order") return null;
  if (state.sort === "tokens") return one.main.tokens;
  return state.sort === "p" ? one.judgments[state.judge]?.p ?? NaN : scores[state.sort][one.number];
}

const wordsOf = (one) => one.words ??= [one.id, one.question, one.main.pieces.join(""), ...one.references.map(({ text }) => text)].map(beginning).join("\n").toLowerCase();

function kept() {
  const holds = holdsWords(state.words);
  const [low, high] = [state.low, state.high].map((typed) => typed === "" ? null : Number(typed));
  const within = (key) => key === null || low === null && high === null || present(key) && key >= (low ?? -Infinity) && key <= (high ?? Infinity);
  const shown = (one) => !state.verdicts.length || state.verdicts.includes(verdictOf(one.number));
  return (one) => shown(one) && within(value(one)) && holds(() => wordsOf(one));
}

function tally() {
  const all = `${answers.length.toLocaleString("en")} answers`;
  const words = listed().length === answers.length ? all : `${listed().length.toLocaleString("en")} of ${all}`;
  return { words, filtered: state.words.trim() !== "" || state.verdicts.length > 0 || state.low !== "" || state.high !== "" };
}

// Verdicts with how many answers have them; what filters is seen though none has it.
function pills() {
  const counts = index.verdicts.map(() => 0);
  for (const { number } of answers) counts[verdictOf(number)]++;
  return { verdicts: index.verdicts.map((word, code) => ({ word, code, count: counts[code], seen: index.judges.length && (counts[code] || state.verdicts.includes(code)) })) };
}

// ---- the list, of which only the lines in sight exist

const BEYOND = 8; // lines that are ready outside of the view
let scrolled = 0; // where to: the list is made anew when a reader comes back to it
widgets.answers = () => {
  const lines = new Map(); // place -> node
  let front = -1;
  const choose = (place) => { if (listed()[place]) set("answer", listed()[place].number); };
  const space = make("div", { class: "space" });
  const root = make("div", { class: "list", role: "listbox", tabindex: 0, "aria-label": "answers", onkeydown: keys, onscroll: draw,
    onclick: ({ target }) => { const line = target.closest(".line"); if (line) choose(Number(line.dataset.place)); } }, space);
  new ResizeObserver(draw).observe(root);

  function draw() {
    if (root.clientHeight) scrolled = root.scrollTop;
    const from = Math.max(0, Math.floor(root.scrollTop / LINE) - BEYOND);
    const to = Math.min(listed().length, Math.ceil((root.scrollTop + root.clientHeight) / LINE) + BEYOND);
    for (const [place, node] of lines) if (place < from || place >= to) { node.remove(); lines.delete(place); }
    for (let place = from; place < to; place++) if (!lines.has(place)) lines.set(place, line(place));
  }

  function line(place) {
    const one = listed()[place];
    const by = value(one);
    const node = make("div", { class: "line", role: "option", id: `line-${place}`, "aria-posinset": place + 1, "aria-setsize": listed().length,
      "aria-selected": String(place === front), "data-place": place },
    make("div", { class: "first" }, pill(verdictOf(one.number)), make("span", { class: "asks" }, brief(one.question, 160)),
      by === null ? null : make("span", { class: "num soft" }, figure(by))), make("div", { class: "second" }, tokenLine(one.main)));
    node.style.transform = `translateY(${place * LINE}px)`;
    space.append(node);
    return node;
  }

  // Marks the answer that is shown, and with `reveal` brings it into sight.
  function mark(reveal = true) {
    lines.get(front)?.setAttribute("aria-selected", "false");
    front = listed().indexOf(answers[state.answer]);
    if (front >= 0 && reveal) {
      root.scrollTop = Math.min(front * LINE, Math.max(root.scrollTop, (front + 1) * LINE - root.clientHeight));
      draw();
    }
    lines.get(front)?.setAttribute("aria-selected", "true");
    if (front >= 0) root.setAttribute("aria-activedescendant", `line-${front}`);
    else root.removeAttribute("aria-activedescendant");
  }

  function keys(event) {
    const page = Math.max(1, Math.floor(root.clientHeight / LINE) - 1);
    walk(event, front, listed().length, { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Enter: 0 }, choose);
  }

  function fill() {
    space.replaceChildren();
    lines.clear();
    space.style.height = `${listed().length * LINE}px`;
    draw();
    mark(false);
  }
  follow(index.filters, () => { root.scrollTop = 0; fill(); }, root);
  follow("colour", fill, root);
  follow("answer", mark, root);
  waiting.push(() => { root.scrollTop = scrolled; mark(root.clientHeight > 0); });
  fill();
  return root;
};

// ---- tokens, in the colours of what is known of them

const inThought = (main, at) => main.thought.some(([from, to]) => at >= from && at < to);

function colourOf(main, at) {
  if (inThought(main, at)) return "thought";
  const { edges, tint } = index.scales[state.colour];
  const found = main[state.colour]?.[at];
  return present(found) ? `${tint} c${edges.filter((edge) => found > edge).length}` : "unknown";
}

function tokenWords(main, at, piece) {
  const [nll, relevance, part] = [main.nll[at], main.relevance?.[at], main.share?.[at]];
  return [`token ${at + 1} of ${main.tokens}`, piece === "" ? "no character of its own" : JSON.stringify(piece),
    present(nll) ? `p ${probability(nll)}, NLL ${figure(nll)} nats` : "log-prob not finite", inThought(main, at) ? "part of the thought" : null,
    present(relevance) ? `relevance ${figure(relevance)}` : null, present(part) ? `${percent(part)} of token-SAR` : null].filter(Boolean);
}

function probability(nll) {
  const p = Math.exp(-nll);
  return p > 0.9995 && p < 1 ? "> 99.9 %" : p === 0 ? "< 10⁻³⁰⁰" : p < 0.001 ? p.toExponential(1) : `${(100 * p).toFixed(1)} %`;
}

// The beginning of an answer in one line.
function tokenLine(main) {
  const shown = main.pieces.slice(0, 80).map((piece, at) => make("span", { class: `t ${colourOf(main, at)}` }, marked(piece.replace(/\s+/g, " "))));
  const blank = main.pieces.every((piece) => piece.trim() === "");
  return make("bdi", { dir: "auto" }, blank ? make("span", { class: "soft" }, main.cut ? "…" : "(empty)") : shown);
}

// A line feed is shown, and breaks the line.
const breaks = (text) => text.split("\n").flatMap((part, at) => at ? [make("span", { class: "sign" }, "↵"), "\n", part] : [part]).filter((part) => part !== "");

// An answer as tokens that can be pointed at, or walked through with the arrow keys.
widgets.tokens = (_, __, { main }) => {
  const shown = main.pieces;
  const spans = shown.map((piece) => make("span", {}, piece === "" ? "▫" : marked(piece).flatMap((node) => typeof node === "string" ? breaks(node) : [node])));
  const places = new Map(spans.map((span, at) => [span, at]));
  const readout = make("p", { class: "readout note", "aria-live": "off" }, "Point at a token, or walk through them with the arrow keys.");
  let front = -1;
  const recolour = () => spans.forEach((span, at) => { span.className = `t ${colourOf(main, at)}${shown[at] === "" ? " empty" : ""}${at === front ? " front" : ""}`; });
  function choose(at) {
    spans[front]?.classList.remove("front");
    front = at;
    spans[front].classList.add("front");
    const words = tokenWords(main, front, shown[front]);
    readout.replaceChildren(...marked(words.join(" · ")));
    return words;
  }
  const box = make("div", { class: "text tokens", dir: "auto", tabindex: 0, role: "group", "aria-label": "the answer by tokens: arrow keys walk through it",
    onkeydown: (event) => walk(event, front, spans.length, { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }, (to) => {
      say(choose(to).join(", "));
      spans[front].scrollIntoView({ block: "nearest" });
    }) }, spans.length ? spans : make("span", { class: "soft" }, main.cut ? "" : "(an empty answer)"), leftOut(main.cut));
  tellUnderPointer(box, ({ type, target }) => {
    const at = type === "pointerleave" ? undefined : places.get(target.closest(".t"));
    return at === undefined ? null : choose(at);
  });
  follow("colour", recolour, box);
  recolour();
  return [box, readout];
};

// ---- one answer

// An answer with its place in the list and its scores, for the template.
function cardRecord(one) {
  const [place, count] = [listed().indexOf(one), listed().length];
  const scored = index.measures.map((name, at) => {
    const value = scores[at][one.number];
    return { name, value: figure(value), share: present(value) ? percent(below(at, value)) : "", why: present(value) ? null : "not defined for this answer" };
  });
  return { ...one, name: one.number + 1, place: place < 0 ? "not in the list as filtered" : `${place + 1} of ${count}`, before: place - 1, after: place + 1,
    first: place <= 0, last: place < 0 || place + 1 >= count,
    scores: [], weightings: [], ...Object.groupBy(scored, ({ name }) => name.startsWith("weighted-nll:") ? "weightings" : "scores") };
}

// The share of the defined scores that are below a value, ties by half.
function below(measure, value) {
  const known = scores[measure].filter(present);
  const [less, equal] = [known.filter((each) => each < value).length, known.filter((each) => each === value).length];
  return known.length > 1 ? (less + (equal - 1) / 2) / (known.length - 1) : 0.5;
}
