"""The two policies that collect data for a classifier: the one of the round before, and the reference. One model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuherd.posttrain.types import Collecting, Problem

if TYPE_CHECKING:
    from gpuherd.posttrain.rollout.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Samplers:
    """Both, with the reference's weights in memory once.

    Attributes:
        policy: of the round before; in the first round the reference itself.
        reference: what completions are drawn from whose rewards are learnt.
    """

    policy: Sampler
    reference: Sampler

    @property
    def guided(self) -> bool:
        """Whether the two differ."""
        return self.policy is not self.reference


def load_samplers(work: Collecting) -> Samplers:
    """The samplers of a job. Raises what loading raises."""
    from gpuherd.posttrain.rollout.sampler import Sampler

    policy = Sampler(work.policy, work.precision, work.device, work.sampling)
    if work.policy == work.reference:
        return Samplers(policy, policy)
    if (work.policy.model, work.policy.adapter) == (work.reference.model, work.reference.adapter):
        module = policy.model.module
        return Samplers(policy, Sampler.over(module, policy.tokenizer, work.sampling, device=work.device))
    return Samplers(policy, Sampler(work.reference, work.precision, work.device, work.sampling))


def some_at_once(work: Collecting) -> Iterator[Sequence[Problem]]:
    """The job's problems, so many at a time as one batch has rows."""
    step = max(1, work.sampling.batch_size)
    for start in range(0, len(work.problems), step):
        yield work.problems[start : start + step]
