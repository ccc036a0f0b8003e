"""The metrics of a policy's completions with their intervals, of one run and over several seeds. Pure; numpy, no torch.

Every metric here is a ratio of two sums over problems (a mean is one whose lower sum is their number), so that a
resample of the problems is a product of matrices, and a metric's interval and its difference to another policy's on the
same problems come from one set of numbers.

Over several runs that differ in their seed alone, a resample draws runs, and problems in them. Of S runs S - 1 are
drawn (Rao and Wu 1988, JASA 83:231): with S draws the variance between runs would come out too small by (S - 1) / S, a
third of it at three seeds. Runs on the same problems are resampled with the same draw of problems (problems and seeds
are crossed: Owen 2007, "The pigeonhole bootstrap"), others each with their own. With as few as two or three seeds no
interval can be trusted far: the runs' own values always stand next to it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np

from gpuherd.posttrain.eval.answers import Scores, kl_pairs
from gpuherd.posttrain.eval.results import AtK, EvaluationOptions, Metrics, Tie, TokenKL
from gpuherd.qa.bootstrap import NO_SPREAD, BootstrapPlan, Floats, Weights, figure_of, figures, resamples
from gpuherd.qa.intervals import Figure, wilson

# ---- of one run

REWARD, PASS_1, FIRST, KL, KL_TOKEN, TOKENS, FINISHED = (
    "reward", "pass@1", "first", "kl", "kl a token", "tokens", "finished",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ratio:
    """A metric as sum(top) / sum(bottom) over problems; both (problems,). ``share``: it is a mean of 0 to 1."""

    top: Floats
    bottom: Floats
    share: bool = False

    @property
    def value(self) -> float:
        """NaN where the lower sum is 0."""
        bottom = float(self.bottom.sum())
        return float(self.top.sum()) / bottom if bottom else float("nan")

    def weighted(self, weights: Weights | Floats) -> Floats:
        """Under each weighting of the problems, (rows, problems): (rows,), NaN where the lower sum is 0."""
        exact = weights.astype(np.float64, copy=False)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((exact @ self.top) / (exact @ self.bottom))


def pass_at(n: int, right: int, k: int) -> float:
    """P(at least one of k completions is right), from ``right`` of n: 1 - C(n - right, k) / C(n, k), without bias (Chen
    et al. 2021, arXiv 2107.03374, eq. 1).

    >>> pass_at(4, 1, 2), pass_at(4, 0, 2), pass_at(4, 3, 2)
    (0.5, 0.0, 1.0)
    """
    return 1 - comb(n - right, k) / comb(n, k)


def vote(answers: Sequence[int | None], correct: Sequence[bool], tie: Tie) -> float:
    """What a majority vote earns, 0 to 1. Completions without an answer abstain; without any vote it earns nothing.

    An answer is right where the first completion that gave it is.

    Args:
        answers: equal numbers are equal answers.
        correct: whether each completion is right.

    >>> vote([7, 8, 7], [True, False, True], Tie.UNIQUE)
    1.0
    >>> [vote([7, 8], [False, True], tie) for tie in (Tie.SHARE, Tie.FIRST, Tie.UNIQUE)]
    [0.5, 0.0, 0.0]
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    modes = [answer for answer, count in votes.items() if count == most]  # in the order of their first completions
    right = [float(correct[answers.index(answer)]) for answer in modes]
    if tie is Tie.UNIQUE and len(modes) > 1:
        return 0.0
    return right[0] if tie is Tie.FIRST else sum(right) / len(right)


def majority(answers: Sequence[int | None], correct: Sequence[bool], k: int, tie: Tie) -> float:
    """maj@k of one problem: the mean of ``vote`` over the disjoint groups of k samples, in the order of the draws."""
    starts = range(0, len(answers) - k + 1, k)
    return sum(vote(answers[at : at + k], correct[at : at + k], tie) for at in starts) / len(starts)


def ratios(scores: Scores, options: EvaluationOptions) -> dict[str, Ratio]:
    """The metrics of these completions by name: REWARD, TOKENS, FINISHED, where there is right and wrong PASS_1, FIRST,
    "pass@k" and "maj@k", and where it was measured KL and KL_TOKEN."""
    ones = np.ones(len(scores.problems))
    found = {
        REWARD: Ratio(_row_means(scores.reward), ones),
        TOKENS: Ratio(_row_means(scores.tokens), ones),
        FINISHED: Ratio(_row_means(scores.finished), ones, share=True),
    }
    if scores.correct is not None:
        right = np.array(scores.correct, dtype=np.float64)
        found[PASS_1] = Ratio(right.mean(axis=1), ones, share=True)
        found[FIRST] = Ratio(right[:, 0], ones, share=True)
        for k in _pass_ks(scores, options):
            each = [pass_at(scores.samples, sum(row), k) for row in scores.correct]
            found[f"pass@{k}"] = Ratio(np.array(each), ones, share=True)
        for k in majority_ks(scores.samples, options):
            votes = [majority(*row, k, options.tie) for row in zip(scores.answer, scores.correct, strict=True)]
            found[f"maj@{k}"] = Ratio(np.array(votes), ones, share=True)
    if scores.kl is not None:
        total, count, tokens = (np.array(each, dtype=np.float64) for each in zip(*kl_pairs(scores), strict=True))
        found[KL] = Ratio(total, count)
        found[KL_TOKEN] = Ratio(total, tokens)
    return found


def metrics_of(scores: Scores, options: EvaluationOptions) -> Metrics:
    """The metrics with their bootstrap intervals over the problems (BCa)."""
    plan = BootstrapPlan(options.resamples, options.confidence, "bca", seed=0)
    found = with_intervals(ratios(scores, options), plan)
    known = sum(value is not None for row in scores.kl or () for value in row)
    return Metrics(
        problems=len(scores.problems),
        samples=scores.samples,
        reward=found[REWARD],
        pass_at_1=found.get(PASS_1),
        first=found.get(FIRST),
        pass_at=tuple(AtK(k, found[f"pass@{k}"]) for k in _pass_ks(scores, options) if PASS_1 in found),
        majority=tuple(AtK(k, found[f"maj@{k}"]) for k in majority_ks(scores.samples, options) if PASS_1 in found),
        tie=options.tie,
        kl=None if scores.estimator is None else TokenKL(scores.estimator, found[KL], found[KL_TOKEN], known),
        tokens=found[TOKENS],
        finished=found[FINISHED],
    )


def with_intervals(found: Mapping[str, Ratio], plan: BootstrapPlan) -> dict[str, Figure]:
    """Each with its interval over resampled problems; all are resampled alike. A share of which every problem says the
    same (all right, all wrong) has no spread to resample: it gets Wilson's interval of so many problems."""
    n = next(iter(found.values())).top.size
    if n < 2:
        values = {name: each.value for name, each in found.items()}
        return {
            name: Figure(None if np.isnan(value) else value, note="of one problem there is no interval")
            for name, value in values.items()
        }

    def statistics(weights: Weights) -> dict[str, Floats]:
        return {name: each.weighted(weights) for name, each in found.items()}

    made = figures(statistics, n, plan)
    return {name: counted(figure, n, plan.confidence) if found[name].share else figure for name, figure in made.items()}


def counted(figure: Figure, n: int, confidence: float) -> Figure:
    """A share that has no interval because all n problems are alike, with Wilson's; any other as it is."""
    if figure.note != NO_SPREAD or figure.value not in (0.0, 1.0):
        return figure
    interval = wilson(n if figure.value else 0, n, confidence)
    return Figure(figure.value, interval, f"Wilson's interval of {n} problems: all are alike")


def majority_ks(samples: int, options: EvaluationOptions) -> tuple[int, ...]:
    """The k of maj@k: those asked for, else all samples; a majority of one is pass@1 and left out."""
    return tuple(k for k in options.majority_at or (samples,) if 2 <= k <= samples)


def _pass_ks(scores: Scores, options: EvaluationOptions) -> tuple[int, ...]:
    return tuple(k for k in options.pass_at or (scores.samples,) if 2 <= k <= scores.samples)


def _row_means(table: Sequence[Sequence[float]]) -> Floats:
    return np.asarray(np.array(table, dtype=np.float64).mean(axis=1))


# ---- over several seeds

_MOST_KEPT = 2_000_000  # weights: 16 MB


def over_seeds(runs: Sequence[Ratio], same_problems: bool, plan: BootstrapPlan) -> Figure:
    """The mean over the runs of a metric, with its percentile interval.

    Args:
        runs: two or more, a run's metric each; with ``same_problems`` the rows are of the same problems in one order.
        plan: ``method`` is not looked at.
    """
    values = [each.value for each in runs]
    if not np.all(np.isfinite(values)):
        return Figure(None, note="not defined for every seed")
    return figure_of(float(np.mean(values)), drawn_means(runs, same_problems, plan), None, plan)


def drawn_means(runs: Sequence[Ratio], same_problems: bool, plan: BootstrapPlan, seeds: Sequence[int] = ()) -> Floats:
    """The resampled means, (resamples,): of the runs that were drawn, on the problems that were drawn. NaN where one is
    not defined. The draws depend on the plan's seed, the number of runs and their seeds, and the numbers of problems
    alone: two methods with runs of the same seeds are resampled alike, those of others on their own."""
    each = np.stack([_weighted(run, plan, 0 if same_problems else at + 1) for at, run in enumerate(runs)], axis=1)
    if len(runs) == 1:
        return np.asarray(each[:, 0])
    return np.asarray((each * _seed_weights(len(runs), plan, seeds)).sum(axis=1) / (len(runs) - 1))


def _weighted(run: Ratio, plan: BootstrapPlan, place: int) -> Floats:
    """A run's metric under each draw of problems; place 0: the draw that all runs share."""
    n, seed = run.top.size, plan.seed + 7919 * place
    if n * plan.resamples <= _MOST_KEPT:
        return run.weighted(_kept(n, plan.resamples, seed))
    return np.concatenate([run.weighted(weights) for weights in resamples(n, plan.resamples, seed)])


@lru_cache(maxsize=4)
def _kept(n: int, count: int, seed: int) -> Floats:
    """All draws of n problems: the same few are asked for again and again."""
    return np.concatenate(list(resamples(n, count, seed))).astype(np.float64)


def _seed_weights(runs: int, plan: BootstrapPlan, seeds: Sequence[int]) -> Floats:
    """How often each run was drawn, (resamples, runs); each row sums to runs - 1."""
    draw = np.random.default_rng([plan.seed, runs, zlib.crc32(repr(tuple(seeds)).encode())])
    drawn = draw.integers(0, runs, size=(plan.resamples, runs - 1))
    return np.stack([np.sum(drawn == run, axis=1) for run in range(runs)], axis=1).astype(np.float64)
