// Completions of a policy, a problem at a time, beside another policy's on the same problem.

const completions = once((number) => parsed(`chunk-${number}`));

records.samples = async () => {
  const mine = await completions(state.sample);
  const other = state.beside === "" ? null : await completions(state.beside);
  const fits = ({ completions: all }) => state.kind === "all" || all.some((each) => each[state.kind]); // "right" or "wrong"
  const kept = [...mine.keys()].filter((at) => fits(mine[at]));
  if (!kept.includes(state.problem)) state.problem = kept[0] ?? 0;
  const place = kept.indexOf(state.problem);
  const problem = kept.length ? mine[state.problem] : null;
  const found = problem ? [[problem, state.sample], ...(other ? [[other.find(({ id }) => id === problem.id), state.beside]] : [])] : [];
  const cards = found.map(([one, sample]) => one ? { ...one, known: true, policy: index.samples[sample] } : {});
  const policies = index.samples.map((words, at) => [at, words]);
  return { ...problem, problem, cards, layout: other ? "pair" : null, policies, others: [["", "nothing"], ...policies], left_out: index.left_out,
    judged: mine.some((each) => each.completions.some(({ right, wrong }) => right || wrong)), place: kept.length ? `${place + 1} of ${kept.length}` : "none",
    earlier: kept[place - 1], later: kept[place + 1], first: kept[place - 1] === undefined, last: kept[place + 1] === undefined };
};
