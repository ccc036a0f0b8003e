"""Groups of answers, collected to be learnt from later (``online=False``)."""

from __future__ import annotations

from collections.abc import Iterator

from gpuherd.posttrain.policy_gradient.options import PolicyOptions
from gpuherd.posttrain.types import Collecting, Rollout


def collected(work: Collecting, options: PolicyOptions) -> Iterator[Rollout]:
    """``samples_per_prompt`` answers of the policy to each problem, in their order; nothing with ``online``, where the
    training samples by itself."""
    if options.online or not work.problems:
        return
    from gpuherd.posttrain.rollout.sampler import sampler_of

    sampler = sampler_of(work)
    at_once = max(1, work.sampling.batch_size // options.samples_per_prompt)
    for start in range(0, len(work.problems), at_once):
        yield from sampler.rollouts(
            work.task,
            work.problems[start : start + at_once],
            options.samples_per_prompt,
            stream=f"round {work.round}",
            reward_batch_size=work.reward_batch_size,
        )
