// One answer: question, references, the answer by tokens, scores, judgments, samples.

function pill(code) {
  return make("span", { class: `pill v${code}` }, VERDICT_WORDS[code]);
}

// step(by): to the one before or behind it in the list.
function answerView(one, { step, place, count }) {
  const readout = make("p", { class: "readout note", "aria-live": "off" });
  const rest = "Point at a token, or walk through them with the arrow keys.";
  const told = (words) => { readout.replaceChildren(...(words.length ? marked(words.join(" · ")) : [rest])); };
  told([]);
  const tokens = tokenText(one.main, told);
  const scale = make("div", { class: "bar" });
  const recolour = () => {
    scale.replaceChildren(...[scaleChoice(() => { recolour(); changedColour(); }), scaleLegend()].filter(Boolean));
    tokens.recolour();
  };
  recolour();
  return make("article", { class: "card answer", "aria-label": `answer ${one.number + 1}` },
    make("div", { class: "bar" },
      make("a", { class: "back", href: "#/answers" }, "← all answers"),
      make("button", { type: "button", onclick: () => step(-1), disabled: place <= 0 }, "Previous"),
      make("button", { type: "button", onclick: () => step(1), disabled: place < 0 || place + 1 >= count }, "Next"),
      make("span", { class: "soft" }, place >= 0 ? `${place + 1} of ${count}` : "not in the list as filtered", " · ", line(one.id, 80))),
    textBox(one.question, { class: "question", role: "heading", "aria-level": "2" }),
    one.context !== null ? make("details", {}, make("summary", {}, "Context"), textBox(one.context)) : null,
    part("References", make("ul", { class: "references" }, ...one.references.map((each) => make("li", {}, textBox(each))))),
    part("Answer", scale, tokens.box, readout, make("p", { class: "note" }, ending(one))),
    index.judges.length ? part("Judgments", judgmentTable(one)) : null,
    one.samples.length || one.more ? part("Samples", sampleTable(one)) : null,
    index.measures.length ? part("Scores", make("p", { class: "note" }, "In grey the share of answers that score less, ties by half."), scoreList(one, false), weightedScores(one)) : null);
}

const part = (word, ...children) => make("section", { class: "part" }, make("h3", {}, word), ...children);

function ending({ main, prompt: [tokens, cut] }) {
  const why = { eos: "an end token", stop: "a stop string", length: "as many tokens as were allowed", nan: "numbers of the model that are not finite (NaN): this is no answer" }[main.finish];
  const last = present(main.end) ? ` (p ${probability(main.end)}, NLL ${figure(main.end)} nats)` : "";
  return `${main.tokens} token${main.tokens === 1 ? "" : "s"}; ended by ${why}${last}. Prompt: ${tokens} tokens${cut ? `, ${cut} of the context left out` : ""}.`;
}

function judgmentTable(one) {
  const rows = one.judgments.map((judgment, judge) => {
    const code = verdictOf(one.number, judge);
    const figures = judgment === null ? "" : [["p(correct)", judgment.p], ["mass", judgment.mass], ["score", judgment.score]]
      .filter(([, value]) => present(value)).map(([word, value]) => `${word} ${figure(value)}`).join(", ");
    return make("div", { class: "judgment" }, make("div", { class: "bar" }, make("b", {}, line(index.judges[judge].name, 60)), pill(code), make("span", { class: "soft" }, figures)),
      present(judgment?.note) ? make("p", { class: "note" }, ...marked(beginning(judgment.note))) : null,
      present(judgment?.reply) ? textBox(judgment.reply, { class: "reply" }) : null);
  });
  return make("div", {}, ...rows);
}

const isWeighting = ({ name }) => name.startsWith("weighted-nll:");

// The 42 weightings are folded away.
function weightedScores(one) {
  const count = index.measures.filter(isWeighting).length;
  return count ? make("details", { class: "how" }, make("summary", {}, `${count} token weightings`), scoreList(one, true)) : null;
}

function scoreList(one, weightings) {
  return make("dl", { class: "scores" }, ...index.measures.map(({ name }, at) => {
    if (isWeighting({ name }) !== weightings) return null;
    const value = scores[at][one.number];
    return make("div", {}, make("dt", {}, name), make("dd", { title: present(value) ? null : "not defined for this answer" },
      present(value) ? `${figure(value)} ` : "– ", make("span", { class: "soft" }, present(value) ? percent(below(at, value)) : "")));
  }).filter(Boolean));
}

// The share of the defined scores that are below a value, ties by half.
function below(measure, value) {
  let [less, equal, all] = [0, 0, 0];
  for (const each of scores[measure]) if (present(each)) { all++; if (each < value) less++; else if (each === value) equal++; }
  return all > 1 ? (less + (equal - 1) / 2) / (all - 1) : 0.5;
}

function sampleTable(one) {
  const order = [...one.samples.keys()].sort((a, b) => (one.samples[a].cluster ?? 0) - (one.samples[b].cluster ?? 0) || a - b);
  const clustered = one.samples.some((each) => present(each.cluster));
  const judged = index.judges.map((_, judge) => judge).filter((judge) => one.samples.some((each) => present(each.verdicts[judge])));
  let last = null;
  const rows = order.map((at) => {
    const each = one.samples[at];
    const opens = clustered && each.cluster !== last;
    last = each.cluster;
    return make("tr", { class: opens ? "opens" : null },
      clustered ? make("td", { class: "num" }, opens && present(each.cluster) ? String(each.cluster + 1) : "") : null,
      make("td", {}, textBox(each.text), each.thought !== null ? make("details", {}, make("summary", { class: "soft" }, "thought"), textBox(each.thought)) : null),
      make("td", { class: "num" }, figure(each.nll)), make("td", { class: "num" }, String(each.tokens)),
      ...judged.map((judge) => make("td", {}, pill(each.verdicts[judge] ?? UNJUDGED))));
  });
  const head = [clustered ? ["meaning", "num least"] : null, ["sample", null], ["NLL", "num"], ["tokens", "num"], ...judged.map((judge) => [index.judges[judge].name, null])].filter(Boolean);
  return make("div", {}, make("div", { class: "scroll" }, make("table", { "aria-label": "samples" }, make("thead", {}, make("tr", {}, ...head.map(([word, kind]) => make("th", { scope: "col", class: kind }, line(word, 24))))), make("tbody", {}, ...rows))),
    make("p", { class: "note" }, [clustered ? "Samples of one number mean the same." : "", one.more ? `${one.more} more samples are in answers.jsonl.` : ""].filter(Boolean).join(" ")));
}
