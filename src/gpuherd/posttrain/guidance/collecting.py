"""How the guided algorithms collect: rollouts that switch policies (Q#, CD), and comparisons (PITA, Q#-HF).

Q#'s Algorithm 1 (Zhou et al. 2025, arXiv 2502.20548): a switch time h is drawn, the policy pi_k of the round before
writes h - 1 tokens, the reference the others, and each token from h on is an example with the reward of the whole. So
prefixes are those that a guided policy comes to, and rewards are still draws from the law under the reference. In the
first round pi_k is the reference: h = 1.

PITA (Bobbili et al. 2025, arXiv 2507.20067, and its code): the policy of the round before answers greedily; the answer
is cut at a place t, uniform on 1 (``first_cut``) to its length - 1; from there the reference goes on greedily (y_a, the
paper's y_ref) and by a draw (y_b); the preferred one is drawn with Bradley and Terry's probability, or is the one of
the higher score. (In the code it is the guided policy that goes on, from the second round on; the paper's expectation
is the reference's.)
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuherd.posttrain.guidance.data import uniform, whole_number
from gpuherd.posttrain.guidance.options import ComparingOptions
from gpuherd.posttrain.types import Collecting, Comparison, Problem, Reward, Rollout

if TYPE_CHECKING:
    from gpuherd.posttrain.rollout.sampler import Prefix, RolloutBackend

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Samplers:
    """The two policies that collect, with the reference's weights in memory once.

    Attributes:
        policy: of the round before; in the first round the reference itself.
        reference: draws the completions whose rewards are learnt.
    """

    policy: RolloutBackend
    reference: RolloutBackend

    @property
    def guided(self) -> bool:
        """Whether the two differ."""
        return self.policy is not self.reference


def _load_samplers(work: Collecting) -> _Samplers:
    """The samplers of a job: by its backend where the reference answers alone, by transformers where a classifier
    guides, since vLLM knows none, and both policies are then one model in memory. Raises what loading raises."""
    from gpuherd.posttrain.rollout.sampler import Sampler, sampler_of

    if work.policy == work.reference:
        reference = sampler_of(work)
        return _Samplers(reference, reference)
    policy = Sampler(work.policy, work.precision, work.device, work.sampling)
    if (work.policy.model, work.policy.adapter) == (work.reference.model, work.reference.adapter):
        module = policy.model.module
        return _Samplers(policy, Sampler.over(module, policy.tokenizer, work.sampling, device=work.device))
    return _Samplers(policy, Sampler(work.reference, work.precision, work.device, work.sampling))


def _batches(work: Collecting) -> Iterator[Sequence[Problem]]:
    """The job's problems in batches of as many as the sampling decodes at once."""
    step = max(1, work.sampling.batch_size)
    for start in range(0, len(work.problems), step):
        yield work.problems[start : start + step]


def switched_rollouts(work: Collecting, samples: int) -> Iterator[Rollout]:
    """So many rollouts of each of the job's problems, in their order, switched from the policy to the reference."""
    samplers = _load_samplers(work)
    for problems in _batches(work):
        if samplers.guided:
            yield from _switched(samplers, work, problems, samples)
        else:
            yield from _drawn(samplers, work, problems, samples)


def reference_rollouts(work: Collecting, samples: int) -> Iterator[Rollout]:
    """So many rollouts of each of the job's problems, in their order, by the reference alone; each round's anew."""
    from gpuherd.posttrain.rollout.sampler import sampler_of

    reference = sampler_of(replace(work, policy=work.reference))
    for problems in _batches(work):
        yield from _drawn(_Samplers(reference, reference), work, problems, samples)


def _drawn(samplers: _Samplers, work: Collecting, problems: Sequence[Problem], samples: int) -> list[Rollout]:
    return samplers.reference.rollouts(
        work.task, problems, samples, stream=f"round {work.round}", reward_batch_size=work.reward_batch_size
    )


def _switched(samplers: _Samplers, work: Collecting, problems: Sequence[Problem], samples: int) -> Iterator[Rollout]:
    from gpuherd.posttrain.rollout.sampler import Continuation, Prefix, rollout_of, scored

    prompts = [samplers.policy.prompt_ids(each) for each in problems]
    named = list(zip(problems, prompts, strict=True))
    begun = samplers.policy.continuations(
        [Prefix(f"{problem.id}\nroll-in {work.round}", prompt) for problem, prompt in named], samples
    )
    prefixes: list[Prefix] = []
    for (problem, prompt), answers in zip(named, begun, strict=True):
        for sample, answer in enumerate(answers):
            kept = rolled_in(len(answer.ids), work.sampling.seed, work.round, problem.id, sample)
            prefixes.append(Prefix(f"{problem.id}\nroll-out {work.round} {sample}", prompt, answer.ids[:kept]))
    ended = [only for (only,) in samplers.reference.continuations(prefixes)]
    texts = [
        samplers.reference.text((*prefix.ids, *answer.ids)) for prefix, answer in zip(prefixes, ended, strict=True)
    ]
    problem_of = [problem for problem in problems for _ in range(samples)]
    read = [samplers.reference.scored_text(each) for each in texts]
    rewards = scored(work.task, problem_of, read, work.reward_batch_size)
    for place, (prefix, answer, text, reward) in enumerate(zip(prefixes, ended, texts, rewards, strict=True)):
        kept = len(prefix.ids)
        whole = Continuation(
            ids=(*prefix.ids, *answer.ids),
            log_probs=((None,) * kept) + answer.log_probs,
            text=text,
            finished=answer.finished,
        )
        rollout = rollout_of(problem_of[place], place % samples, prefix.prompt_ids, whole, reward)
        yield behind_the_switch(rollout, kept)


def rolled_in(length: int, seed: int, number: int, problem: str, sample: int) -> int:
    """Number of tokens kept of the policy's answer, h - 1: h is uniform on 1 to its length, its end token counted.

    (The paper draws h up to the horizon; behind the end of an answer nothing would be left to roll out.)
    """
    return whole_number(1, length, seed, f"switch {number}", problem, sample) - 1


def behind_the_switch(rollout: Rollout, kept: int) -> Rollout:
    """The rollout with its first tokens marked as another policy's."""
    mine = (False,) * kept + (True,) * (len(rollout.ids) - kept)
    return replace(rollout, rolled_in=kept, by_policy=mine)


def comparisons(work: Collecting, options: ComparingOptions) -> Iterator[Comparison]:
    """At most ``options.samples_per_example`` comparisons of each of the job's problems, in their order.

    Left out, and counted in the log: answers that are too short to be cut (of less than two tokens, or with
    ``first_cut`` 0 of none), ends that are equal, and scores of which neither is preferred.
    """
    samplers = _load_samplers(work)
    left_out: Counter[str] = Counter()
    for problems in _batches(work):
        yield from _of_some(samplers, work, problems, options, left_out)
    if left_out:
        counts = ", ".join(f"{count} {why}" for why, count in sorted(left_out.items()))
        logger.info("comparisons left out in round %d: %s", work.round, counts)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A greedy answer cut behind ``prefix``; ``rest`` are the tokens that followed."""

    problem: Problem
    sample: int
    prefix: Prefix
    rest: tuple[int, ...]


def _of_some(
    samplers: _Samplers,
    work: Collecting,
    problems: Sequence[Problem],
    options: ComparingOptions,
    left_out: Counter[str],
) -> Iterator[Comparison]:
    from gpuherd.posttrain.rollout.sampler import scored

    cuts = _cuts(samplers, work, problems, options, left_out)
    drawn = [only.ids for (only,) in samplers.reference.continuations([each.prefix for each in cuts])] if cuts else []
    greedy = _greedy_ends(samplers, cuts)
    pairs = []
    for cut, y_a, y_b in zip(cuts, greedy, drawn, strict=True):
        if y_a == y_b:
            left_out["with equal ends"] += 1
        else:
            pairs.append((cut, y_a, y_b))
    text = samplers.reference.text
    texts = [text((*cut.prefix.ids, *end)) for cut, y_a, y_b in pairs for end in (y_a, y_b)]
    problems_of = [cut.problem for cut, _, _ in pairs for _ in range(2)]
    read = [samplers.reference.scored_text(each) for each in texts]
    rewards = scored(work.task, problems_of, read, work.reward_batch_size)
    for place, (cut, y_a, y_b) in enumerate(pairs):
        two = slice(2 * place, 2 * place + 2)
        comparison = _compared(cut, (y_a, y_b), texts[two], rewards[two], options, work)
        if comparison is None:
            left_out["with equal scores"] += 1
        else:
            yield comparison


def _cuts(
    samplers: _Samplers,
    work: Collecting,
    problems: Sequence[Problem],
    options: ComparingOptions,
    left_out: Counter[str],
) -> list[_Cut]:
    """The policy's greedy answers, each cut at ``options.samples_per_example`` places."""
    from gpuherd.posttrain.rollout.sampler import Prefix

    prompts = [samplers.policy.prompt_ids(each) for each in problems]
    named = [Prefix(each.id, prompt) for each, prompt in zip(problems, prompts, strict=True)]
    answers = [only for (only,) in samplers.policy.continuations(named, greedy=True)]
    cuts: list[_Cut] = []
    for problem, prompt, answer in zip(problems, prompts, answers, strict=True):
        length = len(answer.ids) - answer.finished
        if length <= options.first_cut:
            left_out["of answers too short to be cut"] += options.samples_per_example
            continue
        for sample in range(options.samples_per_example):
            place = whole_number(
                options.first_cut, length - 1, work.sampling.seed, f"cut {work.round}", problem.id, sample
            )
            prefix = Prefix(f"{problem.id}\nend {work.round} {sample}", prompt, answer.ids[:place])
            cuts.append(_Cut(problem, sample, prefix, answer.ids[place:]))
    return cuts


def _greedy_ends(samplers: _Samplers, cuts: Sequence[_Cut]) -> list[tuple[int, ...]]:
    """The reference's greedy continuations; where it gave the answer itself, the rest of that."""
    if not samplers.guided:
        return [each.rest for each in cuts]
    if not cuts:
        return []
    return [only.ids for (only,) in samplers.reference.continuations([each.prefix for each in cuts], greedy=True)]


def _compared(
    cut: _Cut,
    ends: tuple[tuple[int, ...], tuple[int, ...]],
    texts: Sequence[str],
    rewards: Sequence[Reward],
    options: ComparingOptions,
    work: Collecting,
) -> Comparison | None:
    draw = uniform(work.sampling.seed, f"prefer {work.round}", cut.problem.id, cut.sample)
    first = options.prefers_first(options.score(rewards[0]), options.score(rewards[1]), draw)
    if first is None:
        return None
    better, worse = (0, 1) if first else (1, 0)
    return Comparison(
        problem=cut.problem.id,
        prompt_ids=tuple(cut.prefix.prompt_ids),
        context_ids=tuple(cut.prefix.ids),
        chosen_ids=ends[better],
        rejected_ids=ends[worse],
        chosen=texts[better],
        rejected=texts[worse],
        chosen_reward=rewards[better].value,
        rejected_reward=rewards[worse].value,
    )
