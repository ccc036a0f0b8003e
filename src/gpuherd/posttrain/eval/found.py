"""Results that were found on disk, with what their figures were made of: read once, kept small."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.posttrain.eval.files import BadResult, read_result, read_scores
from gpuherd.posttrain.eval.options import EvaluationOptions, Tie
from gpuherd.posttrain.eval.result import RESULT, AtK, Evaluation, Metrics, Point
from gpuherd.posttrain.eval.scores import Scores

if TYPE_CHECKING:
    from gpuherd.posttrain.eval.metrics import Ratio


@dataclass(frozen=True, slots=True)
class Table:
    """Of a point: the ids of its problems, and its metrics as sums over them, by name."""

    problems: tuple[str, ...]
    ratios: Mapping[str, Ratio]


@dataclass(frozen=True)
class Found:
    """A result and where it lies."""

    folder: Path
    evaluation: Evaluation

    @cached_property
    def tables(self) -> Mapping[str, Table]:
        """By the name of the file of scores; read when they are first asked for. Raises BadResult."""
        return {each.scores: self._table(each) for each in self.evaluation.points}

    def table(self, point: Point) -> Table:
        """Of one of the result's points. Raises BadResult."""
        return self.tables[point.scores]

    @property
    def settings(self) -> str:
        """How it was drawn and from what its distance is: only results in which this is equal can be compared. The seed
        of the draws is no part of it."""
        sampling = {name: value for name, value in self.evaluation.sampling.items() if name not in _NO_MATTER}
        told = [self.evaluation.split, sampling, self.evaluation.reference]
        return json.dumps(told, sort_keys=True)

    def _table(self, point: Point) -> Table:
        from gpuherd.posttrain.eval.metrics import ratios

        scores = read_scores(self.folder / point.scores)
        if not _fits(scores, point.metrics):
            raise BadResult(f"{self.folder / point.scores} is not of the figures in {self.folder / RESULT}")
        return Table(scores.problems, ratios(scores, _asked_of(point.metrics)))


_NO_MATTER = ("seed", "batch_size")


def find_results(root: Path) -> tuple[list[Found], list[str]]:
    """The results below a folder, in the order of their paths, and a sentence for each that can't be read."""
    found, damaged = [], []
    for path in sorted(root.rglob(RESULT)):
        try:
            found.append(Found(path.parent, read_result(path)))
        except BadResult as problem:
            damaged.append(str(problem))
    return found, damaged


def _fits(scores: Scores, metrics: Metrics) -> bool:
    """Whether figures can be of these scores."""
    ks = [each.k for each in (*metrics.pass_at, *metrics.majority)]
    same = (len(scores.problems), scores.samples) == (metrics.problems, metrics.samples)
    whole = (scores.correct is None) == (metrics.pass_at_1 is None) and (scores.kl is None) == (metrics.kl is None)
    return same and whole and all(1 <= k <= scores.samples for k in ks)


def _asked_of(metrics: Metrics) -> EvaluationOptions:
    """The options by which a result's figures were made of its scores."""
    return EvaluationOptions(
        samples=metrics.samples, pass_at=_ks(metrics.pass_at), majority_at=_ks(metrics.majority), tie=Tie(metrics.tie)
    )


def _ks(figures: tuple[AtK, ...]) -> tuple[int, ...]:
    return tuple(each.k for each in figures)
