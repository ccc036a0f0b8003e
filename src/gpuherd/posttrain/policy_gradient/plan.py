"""Which problems stand in which step, which rollouts in which minibatch, which are a group; figures of a step. Pure: of
the seed and numbers alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.train_engine import StepFigures, pooled_means
from gpuherd.posttrain.policy_gradient.advantages import RunningMoments, constant_groups
from gpuherd.posttrain.types import Problem, Rollout


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a training.

    Attributes:
        sizes: of each unit (a problem, or a collected group) the rollouts that it has.
        batch_size: units of a step.
        steps: how many steps.
        minibatch_size: rollouts of an optimiser step; None: all of a step.
        passes: how often a step's rollouts are gone over.
        seed: of the order; text or a number.
    """

    sizes: tuple[int, ...]
    batch_size: int
    steps: int
    minibatch_size: int | None
    passes: int
    seed: str

    def units(self, step: int) -> list[int]:
        """The units of a step, counted from 0: every epoch in an order of its own, the last batch may be smaller."""
        epoch, place = divmod(step, steps_of(len(self.sizes), self.batch_size))
        order = _order(len(self.sizes), f"{self.seed} units {epoch}")
        return list(order[place * self.batch_size : (place + 1) * self.batch_size])

    def replacements(self, step: int, attempt: int, replaced: Sequence[int], seen: Collection[int]) -> list[int]:
        """For each of these units of a step another one that is not among ``seen``, in an order of its own for each
        attempt; where there are too few, the unit itself, to be drawn anew."""
        order = _order(len(self.sizes), f"{self.seed} again {step} {attempt}")
        others = [unit for unit in order if unit not in seen][: len(replaced)]
        return [*others, *replaced[len(others) :]]

    def minibatches(self, step: int, pass_number: int, count: int) -> list[list[int]]:
        """Places among a step's ``count`` rollouts, divided evenly; in another order for each pass."""
        parts = self._parts(count)
        order = list(range(count))
        if parts > 1:
            random.Random(f"{self.seed} minibatches {step} {pass_number}").shuffle(order)  # noqa: S311
        ends = [count * number // parts for number in range(parts + 1)]
        return [sorted(order[begin:end]) for begin, end in pairwise(ends)]

    def updates(self) -> int:
        """Optimiser steps in all, if no pass is left out."""
        return self.passes * sum(self._parts(self.count(step)) for step in range(self.steps))

    def count(self, step: int) -> int:
        """How many rollouts a step has."""
        return sum(self.sizes[unit] for unit in self.units(step))

    def updates_of(self, step: int) -> int:
        """Optimiser steps of one step."""
        return self.passes * self._parts(self.count(step))

    def _parts(self, count: int) -> int:
        return 1 if self.minibatch_size is None else max(1, -(-count // self.minibatch_size))


@lru_cache(maxsize=4)
def _order(count: int, seed: str) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(seed).shuffle(order)  # noqa: S311
    return tuple(order)


def steps_of(units: int, batch_size: int) -> int:
    """Steps of one epoch."""
    return -(-units // batch_size)


def plan_of(
    sizes: Sequence[int],
    *,
    batch_size: int,
    epochs: int,
    max_steps: int | None,
    minibatch_size: int | None,
    passes: int,
    seed: str,
) -> Plan:
    """The steps of so many epochs, no more than ``max_steps``. Raises UsageError where there is nothing."""
    if not sizes:
        raise UsageError("there is nothing to learn from: no problem, or no rollout was collected")
    steps = epochs * steps_of(len(sizes), batch_size)
    steps = steps if max_steps is None else min(steps, max_steps)
    return Plan(tuple(sizes), batch_size, steps, minibatch_size, passes, seed)


def groups_of(rollouts: Sequence[Rollout]) -> list[int]:
    """The number of each rollout's group: those with one problem and one prompt, numbered as they first come."""
    numbers: dict[tuple[str, tuple[int, ...]], int] = {}
    return [numbers.setdefault((each.problem, each.prompt_ids), len(numbers)) for each in rollouts]


def digest_of(units: Sequence[Sequence[Problem | Rollout]]) -> str:
    """What tells the problems, or the rollouts, of one training from those of another: hexadecimal digits."""
    digest = hashlib.sha256()
    for unit in units:
        for each in unit:
            said = (each.id, each.prompt, each.answers) if isinstance(each, Problem) else each.to_dict()
            digest.update(json.dumps(said).encode() + b"\n")
    return digest.hexdigest()


def grouped(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each group, in the order of their samples."""
    members: dict[int, list[Rollout]] = {}
    for each, number in zip(rollouts, groups_of(rollouts), strict=True):
        members.setdefault(number, []).append(each)
    return [sorted(each, key=lambda rollout: rollout.sample) for each in members.values()]


def figures_of(rollouts: Sequence[Rollout], learnt: Sequence[StepFigures]) -> dict[str, float | None]:
    """Of one step, by name; None where there is nothing to take a mean of.

    ``constant_groups`` is the share of groups whose rewards are all equal: all right, all wrong. The loss's own figures
    are means over all tokens that the step's updates learnt from.
    """
    rewards = [each.reward for each in rollouts]
    groups = groups_of(rollouts)
    moments = RunningMoments().after(rewards)
    verdicts = [each.correct for each in rollouts if each.correct is not None]
    losses = [each.loss for each in learnt if each.loss is not None]
    norms = [each.grad_norm for each in learnt if each.grad_norm is not None]
    return {
        "reward": moments.mean,
        "reward_std": moments.std,
        "correct": mean(verdicts),
        "finished": mean([each.finished for each in rollouts]),
        "length": mean([sum(each.by_policy) for each in rollouts]),
        "rollouts": float(len(rollouts)),
        "constant_groups": constant_groups(rewards, groups) / (max(groups, default=0) + 1),
        "loss": mean(losses),
        "grad_norm": mean(norms),
        "learning_rate": learnt[-1].learning_rate if learnt else None,
        "micro_batch": float(learnt[-1].micro_batch) if learnt else None,
        "updates": float(len(learnt)),
        **pooled_means(learnt),
    }


def mean(values: Sequence[float]) -> float | None:
    """None of none.

    >>> mean([1.0, 2.0]), mean([])
    (1.5, None)
    """
    return math.fsum(values) / len(values) if values else None
