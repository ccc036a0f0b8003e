"""How Q# and CD collect: the policy of the round before begins an answer, the reference ends it.

Q#'s Algorithm 1 (Zhou et al. 2025, arXiv 2502.20548): a switch time h is drawn, the policy pi_k of the round before
writes h - 1 tokens, the reference the others, and each token from h on is an example with the reward of the whole. So
prefixes are those that a guided policy comes to, and rewards are still draws from the law under the reference. In the
first round pi_k is the reference: h = 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuherd.posttrain.guidance.draws import whole_number
from gpuherd.posttrain.guidance.samplers import Samplers, load_samplers, some_at_once
from gpuherd.posttrain.types import Collecting, Problem, Rollout


def switched_rollouts(work: Collecting, samples: int) -> Iterator[Rollout]:
    """So many rollouts of each of the job's problems, in their order, switched from the policy to the reference."""
    samplers = load_samplers(work)
    for problems in some_at_once(work):
        if samplers.guided:
            yield from _switched(samplers, work, problems, samples)
        else:
            yield from _drawn(samplers, work, problems, samples)


def reference_rollouts(work: Collecting, samples: int) -> Iterator[Rollout]:
    """So many rollouts of each of the job's problems, in their order, by the reference alone; each round's anew."""
    from gpuherd.posttrain.rollout.sampler import Sampler

    reference = Sampler(work.reference, work.precision, work.device, work.sampling)
    for problems in some_at_once(work):
        yield from _drawn(Samplers(reference, reference), work, problems, samples)


def _drawn(samplers: Samplers, work: Collecting, problems: Sequence[Problem], samples: int) -> list[Rollout]:
    return samplers.reference.rollouts(
        work.task, problems, samples, stream=f"round {work.round}", reward_batch_size=work.reward_batch_size
    )


def _switched(samplers: Samplers, work: Collecting, problems: Sequence[Problem], samples: int) -> Iterator[Rollout]:
    from gpuherd.posttrain.rollout.sampler import Continuation, Prefix, rollout_of
    from gpuherd.posttrain.rollout.scoring import scored

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
    asked = [problem for problem in problems for _ in range(samples)]
    read = [samplers.reference.scored_text(each) for each in texts]
    rewards = scored(work.task, asked, read, work.reward_batch_size)
    for place, (prefix, answer, text, reward) in enumerate(zip(prefixes, ended, texts, rewards, strict=True)):
        kept = len(prefix.ids)
        whole = Continuation(
            ids=(*prefix.ids, *answer.ids),
            log_probs=((None,) * kept) + answer.log_probs,
            text=text,
            finished=answer.finished,
        )
        rollout = rollout_of(asked[place], place % samples, prefix.prompt_ids, whole, reward)
        yield behind_the_switch(rollout, kept)


def rolled_in(length: int, seed: int, number: int, problem: str, sample: int) -> int:
    """How many tokens of the policy's answer are kept, h - 1: h is uniform on 1 to its length, its end token counted.

    (The paper draws h up to the horizon; behind the end of an answer nothing would be left to roll out.)
    """
    return whole_number(1, length, seed, f"switch {number}", problem, sample) - 1


def behind_the_switch(rollout: Rollout, kept: int) -> Rollout:
    """The rollout with its first tokens marked as another policy's."""
    from dataclasses import replace

    mine = (False,) * kept + (True,) * (len(rollout.ids) - kept)
    return replace(rollout, rolled_in=kept, by_policy=mine)
