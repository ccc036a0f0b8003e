"""Figures of several runs that differ in their seed alone: the bootstrap over seeds and problems together. Pure; numpy.

A resample draws runs, and problems in them. Of S runs S - 1 are drawn (Rao and Wu 1988, JASA 83:231): with S draws the
variance between runs would come out too small by (S - 1) / S, a third of it at three seeds. Runs that were asked the
same problems are resampled with the same draw of problems (problems and seeds are crossed: Owen 2007, "The pigeonhole
bootstrap"), others each with their own.

With as few as two or three seeds no interval can be trusted far: the runs' own values always stand beside it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from gpuherd.posttrain.eval.metrics import Ratio
from gpuherd.qa.bootstrap import BootstrapPlan, Floats, figure_of, resamples
from gpuherd.qa.intervals import Figure

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
