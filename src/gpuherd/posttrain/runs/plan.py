"""Algorithm x data set x model pair x round becomes steps: collect, train, evaluate, and what each needs. Pure.

Of one combination the rounds follow each other: what a round collects needs the policy of the round before, its
training needs what was collected. Combinations know nothing of each other, so they fill the machine side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpuherd.errors import UsageError
from gpuherd.jobs.run_dir import safe_name
from gpuherd.posttrain.eval.result import REFERENCE


class Phase(StrEnum):
    """What a job does."""

    COLLECT = "collect"
    TRAIN = "train"
    EVALUATE = "evaluate"


@dataclass(frozen=True, slots=True)
class Combination:
    """An algorithm on a data set with a pair of models.

    Attributes:
        algorithm: its name in the experiment.
        collects: whether rows are collected before a training (else it samples while it trains, or needs none).
        off_policy: whether what it learns from may come from an older policy.
        shards: jobs that collect a round's rows.
        evaluated_on: names of data sets.
    """

    algorithm: str
    dataset: str
    family: str
    collects: bool
    off_policy: bool
    shards: int
    evaluated_on: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A job of the experiment.

    Attributes:
        algorithm: the name in the experiment; REFERENCE for the evaluation of a model as it came.
        round: from 0; None of a reference.
        shard, shards: of a collection: which, of how many.
        evaluated_on: of an evaluation: the data set whose problems are asked.
        policy_round: the round whose policy is asked, or gone on from; None: the reference.
        needs: names of steps that must have succeeded.
    """

    phase: Phase
    algorithm: str
    dataset: str
    family: str
    round: int | None
    shard: int = 0
    shards: int = 1
    evaluated_on: str | None = None
    policy_round: int | None = None
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``<algorithm>_<data set>_<family>_r<round>_<phase>[_<shard>]``.

        >>> Step(Phase.COLLECT, "PITA", "gsm8k", "llama32", 1, 2, 4).name
        'PITA_gsm8k_llama32_r1_collect_2'
        """
        parts = [safe_name(self.algorithm), safe_name(self.dataset), safe_name(self.family)]
        parts += [] if self.round is None else [f"r{self.round}"]
        parts.append(self.phase.value)
        if self.phase is Phase.COLLECT and self.shards > 1:
            parts.append(str(self.shard))
        if self.evaluated_on is not None and self.evaluated_on != self.dataset:
            parts.append(safe_name(self.evaluated_on))
        return "_".join(parts)


def plan_steps(
    combinations: Sequence[Combination], rounds: int, *, asynchronous: bool = False, references: bool = True
) -> tuple[Step, ...]:
    """All steps, earlier rounds first; each after those that it needs.

    Args:
        asynchronous: what a round collects is asked of the policy before the last, where the algorithm allows it: then
            it is collected while the last one is still trained. That policy is fixed by the plan and not by what
            happens to be finished, so that results don't depend on how fast things go.
        references: evaluate the models as they came, on each data set that something is evaluated on.

    Raises UsageError: two steps would have one name.
    """
    steps = _references(combinations) if references else []
    for number in range(rounds):
        for each in combinations:
            steps += _round(each, number, asynchronous=asynchronous and each.off_policy)
    names: dict[str, Step] = {}
    for step in steps:
        other = names.setdefault(step.name, step)
        if other is not step:
            raise UsageError(
                f"two jobs would be named {step.name}: of {_of(other)} and of {_of(step)}; rename one of them"
            )
    return tuple(steps)


def _round(of: Combination, number: int, *, asynchronous: bool) -> list[Step]:
    """A round of one combination."""
    before = None if number == 0 else number - 1
    trained = () if before is None else (_train(of, before).name,)
    asked = before
    if asynchronous:
        asked = number - 2 if number >= 2 else None
    collected = [
        Step(
            Phase.COLLECT,
            of.algorithm,
            of.dataset,
            of.family,
            number,
            shard,
            of.shards,
            policy_round=asked,
            needs=() if asked is None else (_train(of, asked).name,),
        )
        for shard in range(of.shards if of.collects else 0)
    ]
    train = Step(
        Phase.TRAIN,
        of.algorithm,
        of.dataset,
        of.family,
        number,
        policy_round=before,
        needs=(*trained, *(each.name for each in collected)),
    )
    evaluations = [
        Step(
            Phase.EVALUATE,
            of.algorithm,
            of.dataset,
            of.family,
            number,
            evaluated_on=name,
            policy_round=number,
            needs=(train.name,),
        )
        for name in of.evaluated_on
    ]
    return [*collected, train, *evaluations]


def _train(of: Combination, number: int) -> Step:
    return Step(Phase.TRAIN, of.algorithm, of.dataset, of.family, number)


def _references(combinations: Sequence[Combination]) -> list[Step]:
    pairs = dict.fromkeys((each.family, name) for each in combinations for name in each.evaluated_on)
    return [Step(Phase.EVALUATE, REFERENCE, name, family, None, evaluated_on=name) for family, name in pairs]


def _of(step: Step) -> str:
    words = [step.algorithm, step.dataset, step.family]
    return " / ".join(words if step.evaluated_on is None else [*words, step.evaluated_on])
