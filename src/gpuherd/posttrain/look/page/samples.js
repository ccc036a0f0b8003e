// Completions of a policy, a problem at a time, beside another policy's on the same problem.

async function samplesView() {
  if (!index.samples.length) return [make("section", { class: "card" }, make("p", {}, "No completions are there to look at."))];
  const options = index.samples.map((each, at) => [at, policyWords(index.rows[each.row])]);
  const first = index.samples.findIndex((each) => index.rows[each.row].own && index.rows[each.row].algorithm !== index.reference);
  state.sample = Math.min(state.sample ?? Math.max(0, first), index.samples.length - 1);
  const mine = await completions(state.sample);
  const other = state.beside === null || state.beside === undefined ? null : await completions(state.beside);
  const kept = mine.map((_, at) => at).filter((at) => state.kind === "all" || mine[at].completions.some((each) => each[2] === (state.kind === "right")));
  if (!kept.includes(state.problem)) state.problem = kept[0] ?? 0;
  const again = () => show();
  const place = kept.indexOf(state.problem);
  const step = (by) => { state.problem = kept[Math.max(0, Math.min(kept.length - 1, place + by))]; again(); };
  const judged = mine.some((each) => each.completions.some((one) => one[2] !== null));
  const bar = make("div", { class: "bar" }, select("policy", options, state.sample, (value) => { state.sample = Number(value); again(); }),
    select("beside", [["", "nothing"], ...options], state.beside ?? "", (value) => { state.beside = value === "" ? null : Number(value); again(); }),
    judged ? select("with", [["all", "all"], ["right", "a right completion"], ["wrong", "a wrong completion"]], state.kind, (value) => { state.kind = value; again(); }) : null,
    make("span", { class: "together" }, make("button", { type: "button", disabled: place <= 0, onclick: () => step(-1), id: "earlier" }, "Earlier"),
      make("span", {}, kept.length ? `${place + 1} of ${kept.length}` : "none"), make("button", { type: "button", disabled: place < 0 || place >= kept.length - 1, onclick: () => step(1), id: "later" }, "Later")));
  const notes = [index.left_out ? `The page has no room for the completions of ${index.left_out} more policies.` : null, "The first problems of each evaluation; answers.jsonl has all."].filter(Boolean);
  if (!kept.length) return [bar, make("section", { class: "card" }, make("p", {}, "No problem of these fits."))];
  const problem = mine[state.problem];
  const twin = other?.find((each) => each.id === problem.id);
  const columns = [completionsCard(problem, state.sample), other ? twin ? completionsCard(twin, state.beside) : make("section", { class: "card" }, make("p", {}, "That policy was not asked this problem, or the page has no room for it.")) : null].filter(Boolean);
  return [bar, make("section", { class: "card" }, make("h2", {}, `Problem ${problem.id}`), textBox(problem.prompt)),
    make("div", { class: columns.length > 1 ? "pair" : null }, ...columns), make("p", { class: "note" }, notes.join(" "))];
}

function completionsCard(problem, sample) {
  return make("section", { class: "card completions" }, make("h3", {}, policyWords(index.rows[index.samples[sample].row])), ...problem.completions.map((each, at) => completionBox(each, at)),
    problem.more ? make("p", { class: "note" }, `${problem.more} more are in answers.jsonl`) : null);
}

function completionBox([text, reward, correct, tokens, finished, kl, note], at) {
  const verdict = correct === null ? null : make("span", { class: `pill ${correct ? "right" : "wrong"}` }, correct ? "right" : "wrong");
  return make("article", { class: "completion", "aria-label": `sample ${at + 1}` }, make("div", { class: "bar told" }, make("b", {}, `sample ${at + 1}`), verdict, make("span", {}, `reward ${figure(reward)}`),
    make("span", { class: "soft" }, `${tokens} tokens${finished ? "" : ", cut by the limit"}${present(kl) ? `, KL ${figure(kl)} nats` : ""}`)),
  textBox(text), note ? make("p", { class: "note" }, ...marked(Array.isArray(note) ? `${note[0]}…` : note)) : null);
}

// A whole text in a box of its own, that what stands in it can't leave; it may have been cut: [beginning, characters left out].
function textBox(text) {
  const [shown, out] = Array.isArray(text) ? text : [text, 0];
  return make("div", { dir: "auto", class: "text", tabindex: 0 }, ...(shown === "" ? [make("span", { class: "soft" }, "(empty)")] : marked(shown)), out ? make("span", { class: "left-out" }, ` … ${out.toLocaleString("en")} more characters are in answers.jsonl`) : null);
}
