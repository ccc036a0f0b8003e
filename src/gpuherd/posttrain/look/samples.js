// Completions of a policy, a problem at a time, beside another policy's on the same problem.

const unpackedSamples = new Map();
function completions(number) {
  if (!unpackedSamples.has(number)) unpackedSamples.set(number, parsed(`chunk-${number}`));
  return unpackedSamples.get(number);
}

scripts.samples = async () => {
  const mine = await completions(state.sample);
  const other = state.beside === "" ? null : await completions(state.beside);
  const fits = ({ completions: all }) => state.kind === "all" || all.some(([, , correct]) => correct === (state.kind === "right"));
  const kept = [...mine.keys()].filter((at) => fits(mine[at]));
  if (!kept.includes(state.problem)) state.problem = kept[0] ?? 0;
  const place = kept.indexOf(state.problem);
  const step = (word, by) => make("button", { type: "button", id: word, disabled: place < 0 || kept[place + by] === undefined,
    onclick: () => set("problem", kept[place + by]) }, word);
  const options = index.samples.map((words, at) => [at, words]);
  const judged = mine.some((each) => each.completions.some(([, , correct]) => correct !== null));
  const kinds = [["all", "all"], ["right", "a right completion"], ["wrong", "a wrong completion"]];
  const bar = make("div", { class: "bar" }, widgets.choose({ key: "sample", label: "policy", options }),
    widgets.choose({ key: "beside", label: "beside", options: [["", "nothing"], ...options] }),
    judged ? widgets.choose({ key: "kind", label: "with", options: kinds }) : null,
    make("span", { class: "together" }, step("Earlier", -1), kept.length ? `${place + 1} of ${kept.length}` : "none", step("Later", 1)));
  if (!kept.length) return [bar, make("section", { class: "card" }, make("p", {}, "No problem of these fits."))];
  const problem = mine[state.problem];
  const twin = other?.find(({ id }) => id === problem.id);
  const none = "That policy was not asked this problem, or the page has no room for it.";
  const cards = [completionsCard(problem, state.sample), !other ? null : twin ? completionsCard(twin, state.beside) : make("section", { class: "card" }, make("p", {}, none))];
  return [bar, make("section", { class: "card" }, make("h2", {}, marked(`Problem ${problem.id}`)), textBox(problem.prompt)),
    make("div", { class: other ? "pair" : null }, ...cards),
    make("p", { class: "note" }, `${index.left_out ? `The page has no room for the completions of ${index.left_out} more policies. ` : ""}The first problems of each evaluation; answers.jsonl has all.`)];
};

const completionsCard = ({ completions: all, more }, sample) =>
  make("section", { class: "card completions" }, make("h3", {}, marked(index.samples[sample])), ...all.map(completionBox),
    more ? make("p", { class: "note" }, `${more} more are in answers.jsonl`) : null);

function completionBox([text, reward, correct, tokens, finished, kl, why], at) {
  const verdict = correct === null ? null : make("span", { class: correct ? "pill right v0" : "pill wrong v1" }, correct ? "right" : "wrong");
  const facts = `${tokens} tokens${finished ? "" : ", cut by the limit"}${present(kl) ? `, KL ${figure(kl)} nats` : ""}`;
  return make("article", { class: "part", "aria-label": `sample ${at + 1}` },
    make("div", { class: "bar" }, make("b", {}, `sample ${at + 1}`), verdict, `reward ${figure(reward)}`, make("span", { class: "soft" }, facts)),
    textBox(text), why ? make("p", { class: "note" }, marked(Array.isArray(why) ? `${why[0]}…` : why)) : null);
}
