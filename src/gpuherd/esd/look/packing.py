"""Spectra as short text for a page, and how many of their points fit. Pure. ``data.js`` undoes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuherd.report.packing import as_text, by_weight

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gpuherd.esd.spectrum_files import Sketch


def packed_spectra(sketches: Sequence[Sketch | None], points: int) -> str:
    """The sketches of a model's layers, each thinned to ``points``; None for a layer that has none.

    Layout: for each layer 6 float32 (how many points, the ends of x and of y, the fullest bin), then its histogram, a
    byte a bin: ln(1 + count) as a fraction of that of the fullest bin, within 2 % of the count. Then all x, then all y:
    differences of 16-bit fractions between the ends.
    """
    import numpy as np

    from gpuherd.esd.spectrum_files import HISTOGRAM_BINS

    head = np.zeros((len(sketches), 6), np.float32)
    bins = np.zeros((len(sketches), HISTOGRAM_BINS), np.uint8)
    steps: list[list[NDArray[np.uint16]]] = [[], []]
    for number, sketch in enumerate(sketches):
        if sketch is None or len(sketch.log10_lambda) < 2:
            continue
        keep = thinned(len(sketch.log10_lambda), points)
        head[number, 0] = len(keep)
        for axis, all_values in enumerate((sketch.log10_lambda, sketch.log10_ccdf)):
            values = np.asarray(all_values, np.float64)[keep]
            low, high = float(values.min()), float(values.max())
            head[number, 1 + 2 * axis : 3 + 2 * axis] = low, high
            fraction = np.rint((values - low) / (high - low or 1.0) * 65535).astype(np.uint16)
            steps[axis].append(np.diff(fraction, prepend=np.uint16(0)))
        fullest = int(sketch.histogram.max())
        head[number, 5] = fullest
        bins[number] = np.rint(255 * np.log1p(sketch.histogram) / np.log1p(max(1, fullest)))
    body = [np.concatenate(each) if each else np.zeros(0, np.uint16) for each in steps]
    parts = [by_weight(head.astype("<f4")), bins.tobytes(), *(by_weight(each.astype("<u2")) for each in body)]
    return as_text(b"".join(parts))


def thinned(count: int, points: int) -> list[int]:
    """Indices of at most ``points`` of ``count``, evenly, with both ends."""
    if count <= points:
        return list(range(count))
    return sorted({round(step * (count - 1) / (points - 1)) for step in range(points)})
