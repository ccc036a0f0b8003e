"""Questions with everything measured, made from ``random.Random`` alone: the same numbers on every machine."""

from __future__ import annotations

import math
import random
import struct

import numpy as np

from gpuherd.qa.measures.evidence import Evidence, ScoredText

WORDS = ("the", "a", "Paris", "London", "rivers", "flowing", "in", "1954", "1955", "was", "not", "born", "Danube", "by")


def evidence(seed: int, *, samples: int | None = None, tokens: int | None = None) -> Evidence:
    """A question with 2 to 12 samples of 1 to 60 tokens; some samples are drawn twice, some relevances are 0.

    Every fifth has ties: log-probs from three values, similarities from three.
    """
    draw = random.Random(seed)
    tied = seed % 5 == 4
    count = samples or draw.randrange(2, 13)
    answers = [_answer(draw, tokens or draw.randrange(1, 61), tied) for _ in range(count)]
    for place in range(1, count):
        if draw.random() < 0.2:
            answers[place] = answers[place - 1]
    return Evidence(
        id=f"question-{seed}",
        greedy=_answer(draw, tokens or draw.randrange(1, 61), tied),
        samples=tuple(answers),
        similarity=_matrix(draw, count, tied, symmetric=True),
        clusters=_clusters(draw, count),
        affinity=_matrix(draw, count, tied, symmetric=False),
        p_true=math.log(1 - draw.random()),
        p_ik=draw.random(),
    )


def _answer(draw: random.Random, tokens: int, tied: bool) -> ScoredText:
    if tied:
        log_probs = [draw.choice((-0.5, -1.0, -2.25)) for _ in range(tokens)]
    else:
        log_probs = [_float32(3 * math.log(1 - draw.random())) for _ in range(tokens)]
    relevance = [0.0 if draw.random() < 0.1 else draw.random() for _ in range(tokens)]
    relevance[0] = 0.25 + draw.random() / 2  # not all 0: what the peers can't divide by has its own tests
    text = " ".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 9)))
    return ScoredText(tuple(log_probs), text, tuple(relevance))


def _matrix(draw: random.Random, count: int, tied: bool, *, symmetric: bool) -> np.ndarray:
    matrix = np.ones((count, count))
    for row in range(count):
        for column in range(count):
            if row != column:
                matrix[row, column] = draw.choice((0.0, 0.5, 1.0)) if tied else draw.random()
    if symmetric:
        matrix = np.triu(matrix) + np.triu(matrix, 1).T
    return matrix


def _clusters(draw: random.Random, count: int) -> tuple[int, ...]:
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(draw.randrange(1, 6), len(numbers)) for _ in range(count))


def _float32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded
