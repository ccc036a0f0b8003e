"""Scores and evaluations made by hand for the tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpuherd.posttrain.evaluation.result import Estimator
from gpuherd.posttrain.evaluation.scores import Scores


def made_scores(
    right: Sequence[Sequence[bool]],
    *,
    answers: Sequence[Sequence[int | None]] | None = None,
    kl: Sequence[Sequence[float | None]] | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    estimator: Estimator = Estimator.EXACT,
) -> Scores:
    """Scores of these right and wrong completions; by default right ones answer 0, wrong ones each something else."""
    rows = [list(map(bool, row)) for row in right]
    return Scores(
        problems=tuple(f"p{number}" for number in range(len(rows))),
        reward=tuple(tuple(map(float, row)) for row in rows),
        correct=tuple(map(tuple, rows)),
        answer=tuple(map(tuple, answers or [[0 if each else 1 + at for at, each in enumerate(row)] for row in rows])),
        tokens=tuple(map(tuple, tokens or [[3] * len(row) for row in rows])),
        finished=tuple(tuple([True] * len(row)) for row in rows),
        estimator=None if kl is None else estimator,
        kl=None if kl is None else tuple(map(tuple, kl)),
    )


def drawn_scores(rate: float, *, problems: int, samples: int, seed: int, kl: float | None = None) -> Scores:
    """Scores of a policy that is right about so often: each problem has its own chance, the same for all seeds."""
    chances = np.clip(rate + np.random.default_rng(0).normal(0, 0.2, problems), 0, 1)
    draw = np.random.default_rng([1, seed])
    right = draw.random((problems, samples)) < chances[:, None]
    spread = None if kl is None else (kl * draw.gamma(4, 0.25, (problems, samples))).tolist()
    return made_scores(right.tolist(), kl=spread)
