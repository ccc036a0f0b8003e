"""Arrays as short text for a page, and how many of them fit. Pure.

A blob is the arrays' bytes, those of one weight together (the first bytes of all numbers, then the second, ...), which
lets zlib halve them; then deflated, in base64, which no HTML parser can take for a tag. The page's script undoes it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gpuherd.esd.tables.sketch import Sketch

    Floats = NDArray[np.float64]

_LEVEL = 6
# Of the 23 bits of a float32's fraction: an error of 5e-7 relative, and counts to two million exactly. A page shows
# five digits of a figure, differences of alpha, and counts to a million in full.
_BITS = 20


def packed_json(value: Any) -> str:
    """A JSON value as text for a page: deflated, base64."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _text(text.encode("utf-8", "surrogatepass"))


def packed_floats(values: Floats) -> str:
    """Numbers as float32, to 5e-7 relative; NaN stays NaN, and so becomes what no float32 holds (above 3.4e38)."""
    import numpy as np

    with np.errstate(over="ignore"):
        words = np.asarray(values, np.float32).view(np.uint32)
    drop = 23 - _BITS
    # A carry out of the fraction rounds the exponent up, as it should; NaN must not become infinite.
    rounded = (words + np.uint32(1 << (drop - 1))) & np.uint32(0xFFFFFFFF ^ ((1 << drop) - 1))
    known = np.isfinite(words.view(np.float32)) & np.isfinite(rounded.view(np.float32))
    return _text(_by_weight(np.where(known, rounded, np.uint32(0x7FC00000)).astype("<u4")))


def packed_spectra(sketches: Sequence[Sketch | None], points: int) -> str:
    """The sketches of a model's layers, each thinned to ``points``; None for a layer that has none.

    Layout: for each layer 6 float32 (how many points, the ends of x and of y, the fullest bin), then its histogram, a
    byte a bin: ln(1 + count) as a fraction of that of the fullest bin, within 2 % of the count. Then all x, then all y:
    differences of 16-bit fractions between the ends.
    """
    import numpy as np

    from gpuherd.esd.tables.sketch import HISTOGRAM_BINS

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
    parts = [_by_weight(head.astype("<f4")), bins.tobytes(), *(_by_weight(each.astype("<u2")) for each in body)]
    return _text(b"".join(parts))


def thinned(count: int, points: int) -> list[int]:
    """Indices of at most ``points`` of ``count``, evenly, with both ends."""
    if count <= points:
        return list(range(count))
    return sorted({round(step * (count - 1) / (points - 1)) for step in range(points)})


def _by_weight(values: NDArray[Any]) -> bytes:
    """The bytes of an array, all first bytes first."""
    import numpy as np

    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()


def _text(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, _LEVEL)).decode("ascii")
