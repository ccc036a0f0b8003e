// Texts in boxes and lines, and tokens in the colours of what is known of them. What strangers wrote enters as text alone.

// A whole text in a box of its own, that what stands in it can't leave; says what was cut.
function textBox(text, attributes = {}) {
  const out = leftOut(text);
  return make("div", { dir: "auto", ...attributes, class: `text ${attributes.class ?? ""}` }, ...marked(beginning(text)), out ? more(out) : null);
}

const more = (count) => make("span", { class: "left-out" }, ` … ${count.toLocaleString("en")} more characters are in answers.jsonl`);

// One line of a text, for lists.
function line(text, most) {
  const whole = beginning(text);
  const start = whole.slice(0, most).replace(/\s+/g, " ");
  return make("bdi", { dir: "auto" }, ...marked(start), whole.length > most ? "…" : null);
}

// What tokens can be coloured by: name, words of the classes from certain to not, class of a token, and what is told of it.
const SCALES = {
  nll: {
    word: "probability",
    classes: ["p ≥ 90 %", "50 to 90 %", "10 to 50 %", "1 to 10 %", "below 1 %"],
    value: (main, at) => main.nll[at],
    place: (nll) => [0.10536, 0.69315, 2.30259, 4.60517].filter((edge) => nll > edge).length,
  },
  relevance: {
    word: "relevance",
    classes: ["below 0.05", "0.05 to 0.15", "0.15 to 0.3", "0.3 to 0.5", "above 0.5"],
    value: (main, at) => main.relevance?.[at],
    place: (relevance) => [0.05, 0.15, 0.3, 0.5].filter((edge) => relevance > edge).length,
  },
  share: {
    word: "share of token-SAR",
    classes: ["below 2 %", "2 to 10 %", "10 to 25 %", "25 to 50 %", "above 50 %"],
    value: (main, at) => share(main, at),
    place: (part) => [0.02, 0.1, 0.25, 0.5].filter((edge) => part > edge).length,
  },
};

// A token's part in sum R(z) · NLL(z): what it brings to token-SAR.
function share(main, at) {
  if (!main.relevance || main.cut) return null;
  main.parts ??= (() => {
    const each = main.nll.map((nll, i) => (nll ?? NaN) * (main.relevance[i] ?? 0));
    const all = each.reduce((a, b) => a + b, 0);
    return all > 0 ? each.map((part) => part / all) : each.map(() => null);
  })();
  return main.parts[at];
}

const inThought = (main, at) => main.thought.some(([from, to]) => at >= from && at < to);

function colourClass(main, at) {
  if (inThought(main, at)) return "thought";
  const value = SCALES[state.colour].value(main, at);
  return present(value) ? `${state.colour === "nll" ? "warm" : "cool"} c${SCALES[state.colour].place(value)}` : "unknown";
}

function tokenWords(main, at, piece) {
  const nll = main.nll[at];
  const told = [`token ${at + 1} of ${main.tokens}`, piece === "" ? "no character of its own" : JSON.stringify(piece),
    present(nll) ? `p ${probability(nll)}, NLL ${figure(nll)} nats` : "log-prob not finite"];
  if (inThought(main, at)) told.push("part of the thought");
  if (present(main.relevance?.[at])) told.push(`relevance ${figure(main.relevance[at])}`);
  const part = share(main, at);
  if (present(part)) told.push(`${percent(part)} of token-SAR`);
  return told;
}

function probability(nll) {
  const p = Math.exp(-nll);
  return p > 0.9995 && p < 1 ? "> 99.9 %" : p < 0.001 ? p === 0 ? "< 10⁻³⁰⁰" : p.toExponential(1) : `${(100 * p).toFixed(1)} %`;
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

// An answer as tokens for a line of the list.
function tokenLine(main, most) {
  const shown = pieces(main, most).map((piece, at) =>
    make("span", { class: `t ${colourClass(main, at)}` }, ...marked(piece.replace(/\s+/g, " "))));
  const blank = main.text.trim() === "";
  return make("bdi", { dir: "auto" }, ...(blank ? [make("span", { class: "soft" }, main.cut ? "…" : "(empty)")] : shown));
}

// An answer as tokens that can be pointed at, or walked through with the arrow keys. told(words) of the one in front.
function tokenText(main, told) {
  const shown = pieces(main);
  const spans = shown.map((piece, at) => {
    const nodes = piece === "" ? ["▫"] : marked(piece).flatMap((node) => typeof node === "string" ? breaks(node) : [node]);
    return make("span", { class: `t ${colourClass(main, at)}${piece === "" ? " empty" : ""}` }, ...nodes);
  });
  const places = new Map(spans.map((span, at) => [span, at]));
  let front = -1;
  const choose = (at, loud) => {
    spans[front]?.classList.remove("front");
    front = at;
    spans[front]?.classList.add("front");
    const words = front < 0 ? [] : tokenWords(main, front, shown[front]);
    told(words);
    if (loud) { say(words.join(", ")); spans[front]?.scrollIntoView({ block: "nearest" }); }
  };
  const box = make("div", { class: "text tokens", dir: "auto", tabindex: 0, role: "group", "aria-label": "the answer by tokens: arrow keys walk through it",
    onmouseover: (event) => { const at = places.get(event.target.closest(".t")); if (at !== undefined) { choose(at, false); showTip(event, tokenWords(main, at, shown[at]).map(plain)); } },
    onmouseleave: hideTip,
    onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const to = event.key === "Home" ? 0 : event.key === "End" ? spans.length - 1 : step ? Math.max(0, Math.min(spans.length - 1, front + step)) : null;
      if (to === null || !spans.length) return;
      event.preventDefault();
      choose(to, true);
    } }, ...(spans.length ? spans : [make("span", { class: "soft" }, main.cut ? "" : "(an empty answer)")]), main.cut ? more(main.cut) : null);
  return { box, recolour: () => spans.forEach((span, at) => { span.className = `t ${colourClass(main, at)}${shown[at] === "" ? " empty" : ""}${at === front ? " front" : ""}`; }) };
}

// A line feed is shown, and breaks the line.
function breaks(text) {
  const parts = text.split("\n");
  return parts.flatMap((part, at) => at ? [make("span", { class: "sign" }, "↵"), "\n", part] : [part]).filter((part) => part !== "");
}

function scaleLegend() {
  const { word, classes } = SCALES[state.colour];
  return make("div", { class: "scale", role: "img", "aria-label": `${word}: ${classes.join(", ")}` }, make("span", { class: "soft" }, `${word}:`),
    ...classes.map((each, at) => make("span", { class: `t ${state.colour === "nll" ? "warm" : "cool"} c${at}` }, each)),
    make("span", { class: "t unknown" }, state.colour === "nll" ? "not finite" : "not known"));
}

// Buttons that choose what tokens are coloured by.
function scaleChoice(changed) {
  const offered = Object.keys(SCALES).filter((name) => name === "nll" || index.relevance);
  if (offered.length === 1) return null;
  return make("div", { class: "choice", role: "group", "aria-label": "colour tokens by" }, ...offered.map((name) =>
    make("button", { type: "button", "aria-pressed": String(state.colour === name), onclick: () => { state.colour = name; changed(); } }, SCALES[name].word)));
}
