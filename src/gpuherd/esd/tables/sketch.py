"""A spectrum in a hundred points: what a log-log plot of it needs, chosen so that it looks the same.

Knows points and distances on a plot. Knows no files and no fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

# As many points as a plot needs, and the distance, in heights of the plot, that nobody sees any more.
MOST_POINTS = 100
UNSEEN = 5e-4
HISTOGRAM_BINS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """A spectrum as a few points.

    Attributes:
        log10_lambda: float32, log10 of some of the eigenvalues above the threshold, ascending; the first and the last
            of them always. Empty where there are none.
        log10_ccdf: float32, for each of them log10 of the share of eigenvalues (of those above the threshold) that are
            as large or larger: 0 at the first.
        histogram: uint32, how many of ALL eigenvalues above the threshold fall in each of 64 bins of equal width in
            log10 λ between the least and the largest.
        count: eigenvalues above the threshold.
        below: eigenvalues up to the threshold, which are in no point.
    """

    log10_lambda: Float32
    log10_ccdf: Float32
    histogram: npt.NDArray[np.uint32]
    count: int
    below: int


def sketch_of(evals: Float64, evals_thresh: float, most: int = MOST_POINTS) -> Sketch:
    """The sketch of a spectrum.

    Between two points of it, a straight line on the log-log plot is nearer to every eigenvalue left out than to be
    seen, or ``most`` points are used where they help most. The same spectrum gives the same points.

    Args:
        evals: float64, ascending, not negative.
        evals_thresh: eigenvalues up to this are only counted.
        most: points, 2 or more.
    """
    x = evals[evals > max(evals_thresh, 0.0)]
    count = len(x)
    if count == 0:
        return Sketch(np.empty(0, np.float32), np.empty(0, np.float32), np.zeros(64, np.uint32), 0, len(evals))
    logs = np.log10(x)
    # Equal eigenvalues share the ccdf of the first of them.
    first = np.maximum.accumulate(np.where(np.diff(x, prepend=-1.0) > 0, np.arange(count), 0))
    ccdf = np.log10((count - first) / count)
    chosen = _points(logs, ccdf, most)
    return Sketch(
        logs[chosen].astype(np.float32),
        ccdf[chosen].astype(np.float32),
        _histogram(logs),
        count,
        len(evals) - count,
    )


def _histogram(logs: Float64) -> npt.NDArray[np.uint32]:
    low, high = float(logs[0]), float(logs[-1])
    if high > low:
        return np.histogram(logs, bins=HISTOGRAM_BINS, range=(low, high))[0].astype(np.uint32)
    counts = np.zeros(HISTOGRAM_BINS, np.uint32)
    counts[0] = len(logs)
    return counts


def _points(x: Float64, y: Float64, most: int) -> npt.NDArray[np.int64]:
    """Indices of the points to keep: both ends, then round by round in each segment of the line drawn so far the point
    farthest from it, the worst first where not all fit into ``most``.

    This is the split of Douglas and Peucker (1973), all segments at once: a round costs O(n), and there are few.
    """
    # Lengths in widths and heights of the plot.
    x, y = x / (float(x[-1] - x[0]) or 1.0), y / (float(y[0] - y[-1]) or 1.0)
    chosen = np.unique(np.array([0, len(x) - 1], np.int64))
    while len(chosen) < most:
        worst, distances = _farthest(x, y, chosen)
        far = np.flatnonzero(distances > UNSEEN)
        if len(far) == 0:
            break
        # A stable sort: of equal distances the leftmost.
        far = far[np.argsort(-distances[far], kind="stable")][: most - len(chosen)]
        chosen = np.sort(np.concatenate([chosen, worst[far]]))
    return chosen


def _farthest(x: Float64, y: Float64, chosen: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Float64]:
    """For each segment between two chosen points: the point farthest from the line through both, and how far it is."""
    starts, stops = chosen[:-1], chosen[1:]
    lengths = stops - starts
    across, up = x[stops] - x[starts], y[stops] - y[starts]
    size = np.hypot(across, up)
    size[size == 0.0] = np.inf
    # Each point belongs to the segment that starts at it or before it; the last point to none.
    dx, dy = x[:-1] - np.repeat(x[starts], lengths), y[:-1] - np.repeat(y[starts], lengths)
    distances = np.abs(np.repeat(across / size, lengths) * dy - np.repeat(up / size, lengths) * dx)
    largest = np.maximum.reduceat(distances, starts)
    at = np.flatnonzero(distances == np.repeat(largest, lengths))
    return at[np.searchsorted(at, starts)], largest
