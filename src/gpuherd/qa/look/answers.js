// The answers: filtered and sorted, in a list of any length of which only the lines in view exist, and one of them beside
// it (on a narrow screen: instead), token by token.

const VERDICTS = ["correct", "incorrect", "not attempted", "unparsed", "NaN", "not judged"];
const UNJUDGED = 5;
const LINE = 68; // pixels of a line of the list; answers.css says the same
const BEYOND = 8; // lines that are ready outside of the view
let scores = null; // one Float32Array a measure, NaN where it is not defined
let verdicts = null; // one Uint8Array a judge: places in VERDICTS
const answers = []; // by number; those of chunks that are not unpacked yet are missing
let browser = null; // made once, so that the list stays as it was left

const verdictOf = (number, judge = state.judge) => verdicts.length ? verdicts[judge][number] : UNJUDGED;
const pill = (verdict) => make("span", { class: `pill v${verdict}` }, VERDICTS[verdict]);

scripts.start = async () => {
  const all = await floats(blob("scores"));
  scores = index.measures.map((_, at) => all.subarray(at * index.scored, (at + 1) * index.scored));
  const codes = await inflate(blob("verdicts"));
  verdicts = index.judges.map((_, at) => codes.subarray(at * index.scored, (at + 1) * index.scored));
};

let unpacking = null;
function unpack(told) {
  unpacking ??= (async () => {
    for (let chunk = 0; chunk * index.chunk < index.shown; chunk++) {
      for (const each of await parsed(`chunk-${chunk}`)) { each.number = answers.length; answers.push(each); }
      told(answers.length / index.shown);
    }
  })();
  return unpacking;
}

scripts.answers = async ([word]) => {
  if (answers.length < index.shown) {
    const wait = make("p", { class: "soft", role: "status" }, "Unpacking the answers…");
    document.getElementById("main").replaceChildren(wait);
    await unpack((share) => { wait.textContent = `Unpacking the answers… ${Math.round(100 * share)} %`; });
  }
  browser ??= makeBrowser();
  browser.open(/^\d{1,9}$/.test(word) ? Number(word) : null);
  return [browser.root];
};

function makeBrowser() {
  const told = make("span", { class: "soft", role: "status" });
  const side = make("div", { class: "side" });
  const list = longList((one) => goTo(one.number), drawLine);
  const filters = filterBar(apply);
  const part = index.shown < index.answers ? `The first ${index.shown.toLocaleString("en")} of ${index.answers.toLocaleString("en")} answers; all are in answers.jsonl and in every figure.` : null;
  const root = make("div", { class: "browse" }, make("div", { class: "near" }, filters.root, make("div", { class: "bar told" }, told, filters.clear),
    list.root, part ? make("p", { class: "note warn" }, part) : null), side);
  let [current, settling] = [null, null];

  function drawLine(one) {
    const value = filters.value(one);
    return [make("div", { class: "first" }, pill(verdictOf(one.number)), make("span", { class: "asks" }, brief(one.question, 160)),
      value === null ? null : make("span", { class: "num soft" }, figure(value))), make("div", { class: "second" }, tokenLine(one.main, 180))];
  }

  function apply() {
    list.show(filters.chosen());
    const all = `${answers.length.toLocaleString("en")} answers`;
    told.textContent = list.items.length === answers.length ? all : `${list.items.length.toLocaleString("en")} of ${all}`;
    if (current) { list.point(current, false); if (!isNarrow()) draw(); }
  }

  function draw() {
    const place = list.items.indexOf(current);
    side.replaceChildren(answerCard(current, place, list.items.length, (by) => list.choose(place + by)));
  }

  // Wide: the answer changes beside the list. Narrow: it is a place of its own, which the browser's back button leaves.
  function goTo(number) {
    if (isNarrow() && !root.classList.contains("single")) { location.hash = `#/answers/${number}`; return; }
    current = answers[number];
    draw();
    clearTimeout(settling);
    settling = setTimeout(address, 150);
  }

  // Once it rests: browsers forbid a page to change its address a hundred times in a few seconds, as a held key would.
  function address() {
    if (!root.isConnected || isNarrow()) return;
    history.replaceState(null, "", `#/answers/${current.number}`);
    document.body.dataset.shown = location.hash;
  }

  function open(number) {
    const given = number !== null && number < answers.length;
    root.classList.toggle("single", given);
    current = given ? answers[number] : isNarrow() ? null : current ?? list.items[0] ?? null;
    if (current) draw(); else side.replaceChildren();
    requestAnimationFrame(() => { if (list.root.clientHeight) { list.restore(); if (current) list.point(current); } });
  }

  apply();
  return { root, open, recolour: () => { list.show(list.items, true); list.point(current, false); } };
}

// ---- what is listed, and in which order

function filterBar(changed) {
  let waiting = null;
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(changed, 100); };
  const again = () => { dress_(); changed(); };
  const search = make("input", { type: "search", placeholder: "words of question, answer or reference", "aria-label": "filter by words", oninput: soon });
  const orders = [["order", "order of the questions"], ["tokens", "length of the answer"], ...(index.judges.length ? [["p", "judge's p(correct)"]] : []), ...index.measures.map((name, at) => [at, name])];
  const [shown, order] = [new Set(), { by: "order", descending: false }];
  Object.assign(state, { sort: "order" });
  const ordering = widgets.choose({ key: "sort", label: "sort by", options: orders, changed: (value) => { order.by = state.sort = value; again(); } });
  const turn = make("button", { type: "button", title: "turn the order round", "aria-label": "descending", onclick: () => { order.descending = !order.descending; again(); } });
  const boxes = VERDICTS.map((_, verdict) => make("button", { type: "button", class: `pill v${verdict}`, onclick: () => { if (!shown.delete(verdict)) shown.add(verdict); again(); } }));
  const judge = index.judges.length > 1 ? make("select", { "aria-label": "verdicts of", onchange: () => { state.judge = judge.selectedIndex; again(); } },
    ...index.judges.map((name) => make("option", {}, plain(name)))) : null;
  const [from, to] = ["from", "to"].map((word) => make("input", { type: "number", step: "any", placeholder: word, "aria-label": `score ${word}`, oninput: soon }));
  const range = make("span", { class: "together range" }, from, to);
  const clear = make("button", { type: "button", class: "plain", onclick: () => { for (const input of [search, from, to]) input.value = ""; shown.clear(); again(); } }, "show all");

  function dress_() {
    const counts = VERDICTS.map(() => 0);
    for (const { number } of answers) counts[verdictOf(number)]++;
    boxes.forEach((box, verdict) => {
      box.textContent = `${VERDICTS[verdict]} ${counts[verdict].toLocaleString("en")}`;
      box.hidden = !index.judges.length || counts[verdict] === 0 && !shown.has(verdict); // what filters is seen
      box.setAttribute("aria-pressed", String(shown.has(verdict)));
    });
    turn.textContent = order.descending ? "↓" : "↑";
    turn.setAttribute("aria-pressed", String(order.descending));
    if (judge) judge.selectedIndex = state.judge;
  }

  // What the list is sorted by, of one answer: a number, NaN where there is none, null for the order of the questions.
  function value(one) {
    if (order.by === "order") return null;
    if (order.by === "tokens") return one.main.tokens;
    return order.by === "p" ? one.judgments[state.judge]?.p ?? NaN : scores[order.by][one.number];
  }

  const wordsOf = (one) => one.words ??= [one.id, one.question, one.main.text, ...one.references].map(beginning).join("\n").toLowerCase();

  function chosen() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const [low, high] = [from, to].map((input) => input.value === "" ? null : Number(input.value));
    range.hidden = order.by === "order";
    clear.hidden = !(words.length || shown.size || low !== null || high !== null);
    const within = (key) => key === null || low === null && high === null || present(key) && key >= (low ?? -Infinity) && key <= (high ?? Infinity);
    const found = answers.filter((one) => (!shown.size || shown.has(verdictOf(one.number))) && within(value(one)) && words.every((word) => wordsOf(one).includes(word)));
    const sign = order.descending ? -1 : 1;
    if (order.by === "order") return order.descending ? found.reverse() : found;
    return found.map((one) => [value(one), one]).sort(([a, one], [b, other]) => {
      if (!present(a) || !present(b)) return present(a) ? -1 : present(b) ? 1 : one.number - other.number; // without a value: always last
      return sign * (a - b) || one.number - other.number;
    }).map(([, one]) => one);
  }

  dress_();
  const root = make("div", { class: "filters" }, search, make("div", { class: "bar" }, ordering, turn, range, judge), make("div", { class: "bar pills" }, ...boxes));
  return { root, clear, chosen, value };
}

// ---- a list of which only the lines in view exist; chosen(item) is called when one is chosen by hand

function longList(chosen, draw) {
  let [items, front, asked, kept] = [[], -1, false, 0]; // kept: where it was scrolled to: a hidden element forgets
  const lines = new Map(); // place -> node
  const space = make("div", { class: "space" });
  const root = make("div", { class: "list", role: "listbox", tabindex: 0, "aria-label": "answers", onscroll: later, onkeydown: keys,
    onclick: ({ target }) => { const line = target.closest(".line"); if (line) choose(Number(line.dataset.place)); } }, space);
  new ResizeObserver(later).observe(root);

  function later() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; if (root.clientHeight) { kept = root.scrollTop; fill(); } });
  }

  function fill() {
    const from = Math.max(0, Math.floor(root.scrollTop / LINE) - BEYOND);
    const to = Math.min(items.length, Math.ceil((root.scrollTop + root.clientHeight) / LINE) + BEYOND);
    for (const [place, node] of lines) if (place < from || place >= to) { node.remove(); lines.delete(place); }
    for (let place = from; place < to; place++) {
      if (lines.has(place)) continue;
      const node = make("div", { class: "line", role: "option", id: `line-${place}`, "aria-posinset": place + 1, "aria-setsize": items.length,
        "aria-selected": String(place === front), "data-place": place }, ...draw(items[place]));
      node.style.transform = `translateY(${place * LINE}px)`;
      lines.set(place, node);
      space.append(node);
    }
  }

  function mark(place) {
    lines.get(front)?.setAttribute("aria-selected", "false");
    front = place;
    lines.get(front)?.setAttribute("aria-selected", "true");
    if (front >= 0) root.setAttribute("aria-activedescendant", `line-${front}`);
    else root.removeAttribute("aria-activedescendant");
  }

  function reveal(place) {
    root.scrollTop = Math.min(place * LINE, Math.max(root.scrollTop, (place + 1) * LINE - root.clientHeight));
    fill();
  }

  function choose(place) {
    if (place < 0 || place >= items.length) return;
    reveal(place);
    mark(place);
    chosen(items[place]);
  }

  function keys(event) {
    const page = Math.max(1, Math.floor(root.clientHeight / LINE) - 1);
    const to = { ArrowDown: front + 1, ArrowUp: front - 1, PageDown: front + page, PageUp: front - page, Home: 0, End: items.length - 1, Enter: front }[event.key];
    if (to === undefined || !items.length) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(items.length - 1, to)));
  }

  return {
    root,
    choose,
    get items() { return items; },
    // Other items, or the same in another form; stays where it is when asked to.
    show(found, stay = false) {
      items = found;
      space.style.height = `${items.length * LINE}px`;
      for (const node of lines.values()) node.remove();
      lines.clear();
      if (!stay) root.scrollTop = 0;
      mark(-1);
      fill();
    },
    restore() { root.scrollTop = kept; fill(); },
    // Marks an item without telling that it was chosen.
    point(item, go = true) {
      const place = items.indexOf(item);
      if (place >= 0 && go) reveal(place);
      mark(place);
    },
  };
}

// ---- tokens, in the colours of what is known of them

// By what: its word, the words of the classes, the edges between them, and the value of a token.
const SCALES = {
  nll: { word: "probability", classes: ["p ≥ 90 %", "50 to 90 %", "10 to 50 %", "1 to 10 %", "below 1 %"], edges: [0.10536, 0.69315, 2.30259, 4.60517], value: (main, at) => main.nll[at] },
  relevance: { word: "relevance", classes: ["below 0.05", "0.05 to 0.15", "0.15 to 0.3", "0.3 to 0.5", "above 0.5"], edges: [0.05, 0.15, 0.3, 0.5], value: (main, at) => main.relevance?.[at] },
  share: { word: "share of token-SAR", classes: ["below 2 %", "2 to 10 %", "10 to 25 %", "25 to 50 %", "above 50 %"], edges: [0.02, 0.1, 0.25, 0.5], value: share },
};

// A token's part in sum R(z) · NLL(z): what it brings to token-SAR.
function share(main, at) {
  if (!main.relevance || main.cut) return null;
  main.parts ??= (() => {
    const each = main.nll.map((nll, i) => (nll ?? NaN) * (main.relevance[i] ?? 0));
    const all = each.reduce((a, b) => a + b, 0);
    return each.map((part) => all > 0 ? part / all : null);
  })();
  return main.parts[at];
}

const inThought = (main, at) => main.thought.some(([from, to]) => at >= from && at < to);
const warmth = () => state.colour === "nll" ? "warm" : "cool";

function colourOf(main, at) {
  if (inThought(main, at)) return "thought";
  const { value, edges } = SCALES[state.colour];
  const found = value(main, at);
  return present(found) ? `${warmth()} c${edges.filter((edge) => found > edge).length}` : "unknown";
}

function tokenWords(main, at, piece) {
  const [nll, relevance, part] = [main.nll[at], main.relevance?.[at], share(main, at)];
  return [`token ${at + 1} of ${main.tokens}`, piece === "" ? "no character of its own" : JSON.stringify(piece),
    present(nll) ? `p ${probability(nll)}, NLL ${figure(nll)} nats` : "log-prob not finite", inThought(main, at) ? "part of the thought" : null,
    present(relevance) ? `relevance ${figure(relevance)}` : null, present(part) ? `${percent(part)} of token-SAR` : null].filter(Boolean);
}

function probability(nll) {
  const p = Math.exp(-nll);
  return p > 0.9995 && p < 1 ? "> 99.9 %" : p === 0 ? "< 10⁻³⁰⁰" : p < 0.001 ? p.toExponential(1) : `${(100 * p).toFixed(1)} %`;
}

// The pieces of an answer, token by token, up to some characters.
function pieces(main, most = Infinity) {
  const out = [];
  let from = 0;
  for (const length of main.lengths) {
    if (from > most) break;
    out.push(main.text.slice(from, from + length));
    from += length;
  }
  return out;
}

// One line of a text, for lists.
function brief(text, most) {
  const whole = beginning(text);
  return make("bdi", { dir: "auto" }, marked(whole.slice(0, most).replace(/\s+/g, " ")), whole.length > most ? "…" : null);
}

function tokenLine(main, most) {
  const shown = pieces(main, most).map((piece, at) => make("span", { class: `t ${colourOf(main, at)}` }, marked(piece.replace(/\s+/g, " "))));
  return make("bdi", { dir: "auto" }, main.text.trim() === "" ? make("span", { class: "soft" }, main.cut ? "…" : "(empty)") : shown);
}

// An answer as tokens that can be pointed at, or walked through with the arrow keys. told(words) of the one in front.
function tokenText(main, told) {
  const shown = pieces(main);
  const spans = shown.map((piece, at) => make("span", { class: `t ${colourOf(main, at)}${piece === "" ? " empty" : ""}` },
    piece === "" ? "▫" : marked(piece).flatMap((node) => typeof node === "string" ? breaks(node) : [node])));
  const places = new Map(spans.map((span, at) => [span, at]));
  let front = -1;
  function choose(at, loud) {
    spans[front]?.classList.remove("front");
    front = at;
    spans[front].classList.add("front");
    const words = tokenWords(main, front, shown[front]);
    told(words);
    if (loud) { say(words.join(", ")); spans[front].scrollIntoView({ block: "nearest" }); }
    return words;
  }
  const box = make("div", { class: "text tokens", dir: "auto", tabindex: 0, role: "group", "aria-label": "the answer by tokens: arrow keys walk through it",
    onmouseover: ({ target, clientX, clientY }) => { const at = places.get(target.closest(".t")); if (at !== undefined) showTip(clientX, clientY, choose(at, false)); },
    onmouseleave: hideTip,
    onkeydown: (event) => {
      const to = { ArrowRight: front + 1, ArrowDown: front + 1, ArrowLeft: front - 1, ArrowUp: front - 1, Home: 0, End: spans.length - 1 }[event.key];
      if (to === undefined || !spans.length) return;
      event.preventDefault();
      choose(Math.max(0, Math.min(spans.length - 1, to)), true);
    } }, spans.length ? spans : make("span", { class: "soft" }, main.cut ? "" : "(an empty answer)"), leftOut(main.cut));
  return { box, recolour: () => spans.forEach((span, at) => { span.className = `t ${colourOf(main, at)}${shown[at] === "" ? " empty" : ""}${at === front ? " front" : ""}`; }) };
}

// A line feed is shown, and breaks the line.
const breaks = (text) => text.split("\n").flatMap((part, at) => at ? [make("span", { class: "sign" }, "↵"), "\n", part] : [part]).filter((part) => part !== "");

// By what tokens are coloured: buttons where there is a choice, and what the colours mean.
function scale(changed) {
  const { word, classes } = SCALES[state.colour];
  const choices = make("div", { class: "choice", role: "group", "aria-label": "colour tokens by" }, ...Object.entries(SCALES).map(([name, each]) =>
    make("button", { type: "button", "aria-pressed": String(state.colour === name), onclick: () => { state.colour = name; changed(); } }, each.word)));
  return [index.relevance ? choices : null, make("div", { class: "scale", role: "img", "aria-label": `${word}: ${classes.join(", ")}` }, make("span", { class: "soft" }, `${word}:`),
    ...classes.map((each, at) => make("span", { class: `t ${warmth()} c${at}` }, each)), make("span", { class: "t unknown" }, state.colour === "nll" ? "not finite" : "not known"))];
}

// ---- one answer

const part = (word, ...children) => make("section", { class: "part" }, make("h3", {}, word), ...children);

function answerCard(one, place, count, step) {
  const readout = make("p", { class: "readout note", "aria-live": "off" }, "Point at a token, or walk through them with the arrow keys.");
  const tokens = tokenText(one.main, (words) => { readout.replaceChildren(...marked(words.join(" · "))); });
  const bar = make("div", { class: "bar" });
  const recolour = () => { bar.replaceChildren(...scale(() => { recolour(); browser.recolour(); }).filter(Boolean)); tokens.recolour(); };
  recolour();
  const go = (word, by) => make("button", { type: "button", onclick: () => step(by), disabled: place < 0 || place + by < 0 || place + by >= count }, word);
  return make("article", { class: "card answer", "aria-label": `answer ${one.number + 1}` },
    make("div", { class: "bar" }, make("a", { class: "back", href: "#/answers" }, "← all answers"), go("Previous", -1), go("Next", 1),
      make("span", { class: "soft" }, place >= 0 ? `${place + 1} of ${count}` : "not in the list as filtered", " · ", brief(one.id, 80))),
    textBox(one.question, { class: "question", role: "heading", "aria-level": "2" }),
    one.context !== null ? make("details", {}, make("summary", {}, "Context"), textBox(one.context)) : null,
    part("References", make("ul", { class: "references" }, ...one.references.map((each) => make("li", {}, textBox(each, { class: "" }))))),
    part("Answer", bar, tokens.box, readout, make("p", { class: "note" }, ending(one))),
    index.judges.length ? part("Judgments", ...one.judgments.map((each, judge) => judgment(each, judge, one))) : null,
    one.samples.length || one.more ? part("Samples", sampleTable(one), make("p", { class: "note" }, sampleNote(one))) : null,
    index.measures.length ? part("Scores", make("p", { class: "note" }, "In grey the share of answers that score less, ties by half."), ...scoreLists(one)) : null);
}

const ENDS = { eos: "an end token", stop: "a stop string", length: "as many tokens as were allowed", nan: "numbers of the model that are not finite (NaN): this is no answer" };

function ending({ main, prompt: [tokens, cut] }) {
  const last = present(main.end) ? ` (p ${probability(main.end)}, NLL ${figure(main.end)} nats)` : "";
  return `${main.tokens} token${main.tokens === 1 ? "" : "s"}; ended by ${ENDS[main.finish]}${last}. Prompt: ${tokens} tokens${cut ? `, ${cut} of the context left out` : ""}.`;
}

function judgment(found, judge, { number }) {
  const figures = [["p(correct)", found?.p], ["mass", found?.mass], ["score", found?.score]].filter(([, value]) => present(value)).map(([word, value]) => `${word} ${figure(value)}`);
  return make("div", { class: "part" }, make("div", { class: "bar" }, make("b", {}, brief(index.judges[judge], 60)), pill(verdictOf(number, judge)), make("span", { class: "soft" }, figures.join(", "))),
    present(found?.note) ? make("p", { class: "note" }, marked(beginning(found.note))) : null, present(found?.reply) ? textBox(found.reply) : null);
}

// The 42 weightings are folded away.
function scoreLists(one) {
  const list = (weightings) => make("dl", { class: "figures scores" }, ...index.measures.map((name, at) => name.startsWith("weighted-nll:") !== weightings ? null : scoreOf(name, at, one)));
  const count = index.measures.filter((name) => name.startsWith("weighted-nll:")).length;
  return [list(false), count ? make("details", { class: "how" }, make("summary", {}, `${count} token weightings`), list(true)) : null];
}

function scoreOf(name, at, { number }) {
  const value = scores[at][number];
  return make("div", {}, make("dt", {}, marked(name)), make("dd", { title: present(value) ? null : "not defined for this answer" },
    present(value) ? `${figure(value)} ` : "– ", make("span", { class: "soft" }, present(value) ? percent(below(at, value)) : "")));
}

// The share of the defined scores that are below a value, ties by half.
function below(measure, value) {
  const known = scores[measure].filter(present);
  const [less, equal] = [known.filter((each) => each < value).length, known.filter((each) => each === value).length];
  return known.length > 1 ? (less + (equal - 1) / 2) / (known.length - 1) : 0.5;
}

const clustered = ({ samples }) => samples.some((each) => present(each.cluster));
const sampleNote = (one) => [clustered(one) ? "Samples of one number mean the same." : "", one.more ? `${one.more} more samples are in answers.jsonl.` : ""].filter(Boolean).join(" ");

// Those of one meaning together, under its number.
function sampleTable(one) {
  const judged = [...index.judges.keys()].filter((judge) => one.samples.some((each) => present(each.verdicts[judge])));
  const sorted = [...one.samples].sort((a, b) => (a.cluster ?? 0) - (b.cluster ?? 0));
  const cells = (each, at) => {
    const opens = clustered(one) && each.cluster !== sorted[at - 1]?.cluster;
    return make("tr", { class: opens ? "opens" : null }, clustered(one) ? make("td", { class: "num" }, opens && present(each.cluster) ? String(each.cluster + 1) : "") : null,
      make("td", {}, textBox(each.text, { class: "" }), each.thought !== null ? make("details", {}, make("summary", { class: "soft" }, "thought"), textBox(each.thought)) : null),
      make("td", { class: "num" }, figure(each.nll)), make("td", { class: "num" }, String(each.tokens)), ...judged.map((judge) => make("td", {}, pill(each.verdicts[judge] ?? UNJUDGED))));
  };
  const heads = [clustered(one) ? ["meaning", "num"] : null, ["sample", null], ["NLL", "num"], ["tokens", "num"], ...judged.map((judge) => [index.judges[judge], null])].filter(Boolean);
  return make("div", { class: "scroll" }, make("table", { "aria-label": "samples" },
    make("thead", {}, make("tr", {}, ...heads.map(([word, kind]) => make("th", { scope: "col", class: kind }, brief(word, 24))))), make("tbody", {}, ...sorted.map(cells))));
}
