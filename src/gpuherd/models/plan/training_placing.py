"""Which cards a training takes, and the largest batch on them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.training_job import Strategy, TrainingJob
from gpuherd.models.plan.training_model import TrainingModel
from gpuherd.models.plan.training_result import TrainingLoad
from gpuherd.models.plan.training_usage import Step
from gpuherd.models.plan.workload import Reserve

_MOST = 1 << 20  # sequences: nobody asks for more


@dataclass(frozen=True, slots=True)
class Placement:
    """A training on cards, whether it fits there or not."""

    step: Step
    loads: tuple[TrainingLoad, ...]

    @property
    def cards(self) -> tuple[Card, ...]:
        """Those that it uses."""
        return tuple(load.card for load in self.loads)

    @property
    def missing(self) -> int:
        """Bytes that the fullest GPU has too little; 0 or less where it fits."""
        return max(-load.left for load in self.loads)


def place(
    model: TrainingModel,
    cards: Sequence[Card],
    job: TrainingJob,
    reserve: Reserve,
    *,
    gpus: int | None = None,
    reward: Architecture | None = None,
) -> Placement:
    """The best placement: one that fits if there is any, else the one that misses least."""
    emptiest = sorted(cards, key=lambda card: card.free, reverse=True)
    if gpus is not None:
        numbers = [gpus]
    elif job.strategy is Strategy.SINGLE:
        numbers = [1]
    else:
        numbers = list(range(1, len(cards) + 1))
        if job.strategy is Strategy.DDP:
            numbers.reverse()
    tried: list[Placement] = []
    for number in numbers:
        tried.append(_on(model, emptiest[:number], job, reserve, reward))
        if tried[-1].missing <= 0:
            return tried[-1]
    return min(tried, key=lambda placement: placement.missing)


def largest_batch(step: Step, cards: Sequence[Card], reserve: Reserve) -> int:
    """The most sequences (pairs of ``dpo``) a GPU takes in one pass on all of these cards; 0 where not one fits."""

    def fits(batch: int) -> bool:
        return all(step.usage(reserve, card, batch).total <= card.free for card in set(cards))

    if not fits(1):
        return 0
    fitting, beyond = 1, 2
    while beyond <= _MOST and fits(beyond):
        fitting, beyond = beyond, 2 * beyond
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        fitting, beyond = (middle, beyond) if fits(middle) else (fitting, middle)
    return fitting


def _on(
    model: TrainingModel,
    cards: Sequence[Card],
    job: TrainingJob,
    reserve: Reserve,
    reward: Architecture | None,
) -> Placement:
    step = Step(model, job, gpus=len(cards), reward=reward)
    return Placement(step, tuple(TrainingLoad(card, step.usage(reserve, card)) for card in cards))
