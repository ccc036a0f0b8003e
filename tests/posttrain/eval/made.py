"""Scores and evaluations made by hand for the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from gpuherd.posttrain.eval.answers import AnsweredProblem, Completion, Scores
from gpuherd.posttrain.eval.metrics import metrics_of
from gpuherd.posttrain.eval.results import (
    REFERENCE,
    About,
    Cost,
    Estimator,
    Evaluation,
    EvaluationOptions,
    Point,
    write_result,
    write_values,
)
from gpuherd.runs import records


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


def made_result(
    folder: Path,
    about: About,
    rates: Mapping[float | None, tuple[float, float]],
    *,
    problems: int = 40,
    samples: int = 4,
    own: float | None = None,
    texts: Callable[[int, int], str] = lambda problem, sample: f"answer {problem}.{sample}",
) -> Evaluation:
    """Writes a result as ``evaluate`` does: ``rates`` has how often it is right, and its divergence, at each eta.

    ``own``: the policy's eta; ``texts``: of a problem's and a sample's number the completion.
    """
    options = EvaluationOptions(samples=samples, resamples=100)
    points = []
    for eta, (rate, kl) in rates.items():
        label = "" if eta is None else f"-eta{eta!r}"
        scores = drawn_scores(rate, problems=problems, samples=samples, seed=about.seed, kl=kl)
        write_values(folder / f"scores{label}.json", records.jsonable(scores), indent=None)
        lines = [
            records.line_of(
                AnsweredProblem(f"p{row}", f"question {row}", (1, 2), 0.5, _completions(scores, row, texts))
            )
            for row in range(problems)
        ]
        (folder / f"answers{label}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        cost = Cost(0.5 * problems, 3 * problems * samples, 1)
        points.append(
            Point(eta, eta == own, metrics_of(scores, options), cost, f"answers{label}.jsonl", f"scores{label}.json")
        )
    guide = None if own is None else {"classifier": "c", "eta": own, "mode": "bernoulli", "top_k": 20}
    policy = {"model": "m", "adapter": None, "guide": guide}
    reference = {"model": "m", "adapter": None, "guide": None}
    made = Evaluation(about, policy, reference, "test", {"temperature": 1.0}, 0.95, tuple(points), ("a note",))
    write_result(folder, made)
    return made


def _completions(scores: Scores, row: int, texts: Callable[[int, int], str]) -> tuple[Completion, ...]:
    return tuple(
        Completion(
            (5, 6, 0),
            (-0.5, None, -1.0),
            texts(row, sample),
            True,
            scores.reward[row][sample],
            None if scores.correct is None else scores.correct[row][sample],
            None,
            None if scores.kl is None else scores.kl[row][sample],
        )
        for sample in range(scores.samples)
    )


def made_experiment(
    root: Path,
    *,
    seeds: Sequence[int] = (0,),
    texts: Callable[[int, int], str] = lambda problem, sample: f"answer {problem}.{sample}",
) -> Path:
    """Results of a reference and three methods in two rounds, as a run of ``gpuherd posttrain`` has them."""
    for seed in seeds:
        top = root / f"seed{seed}" if len(seeds) > 1 else root
        made_result(
            top / "reference" / "tiny" / "star",
            About(REFERENCE, "star", "star", "tiny", None, seed),
            {None: (0.5, 0.0)},
        )
        for number in (0, 1):
            more = 0.1 * number
            made_result(
                top / "QSharp" / "tiny" / "star" / f"r{number}",
                About("QSharp", "star", "star", "tiny", number, seed),
                {1.0: (0.55 + more, 0.5), 0.1: (0.8 + more, 2.0)},
                own=0.1,
                texts=texts,
            )
            made_result(
                top / "CD" / "tiny" / "star" / f"r{number}",
                About("CD", "star", "star", "tiny", number, seed),
                {1.0: (0.52, 0.4), 0.1: (0.6 + more, 3.0)},
                own=0.1,
                texts=texts,
            )
            made_result(
                top / "DPO" / "tiny" / "star" / f"r{number}",
                About("DPO", "star", "star", "tiny", number, seed),
                {None: (0.3, 4.0)},
            )
    return root
