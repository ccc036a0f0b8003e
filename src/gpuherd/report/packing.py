"""Arrays and JSON as short text for a page. Pure.

A blob is the arrays' bytes, those of one weight together (the first bytes of all numbers, then the second, ...), which
lets zlib halve them; then deflated, in base64, which no HTML parser can take for a tag. ``assets/page.js`` undoes it.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_LEVEL = 6
# Of the 23 bits of a float32's fraction: an error of 5e-7 relative, and counts to two million exactly. A page shows
# five digits of a figure, differences of alpha, and counts to a million in full.
_BITS = 20


def packed_json(value: Any) -> str:
    """A JSON value as text for a page: deflated, base64. Half a pair of surrogates comes back as just that."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Written as \ud800, which is how JSON escapes it: a browser's UTF-8 has no such thing.
    return as_text(text.encode("utf-8", "backslashreplace"))


def packed_floats(values: Floats) -> str:
    """Numbers as float32, to 5e-7 relative; NaN stays NaN, and so becomes what no float32 holds (above 3.4e38)."""
    import numpy as np

    with np.errstate(over="ignore"):
        words = np.asarray(values, np.float32).view(np.uint32)
    drop = 23 - _BITS
    # A carry out of the fraction rounds the exponent up, as it should; NaN must not become infinite.
    rounded = (words + np.uint32(1 << (drop - 1))) & np.uint32(0xFFFFFFFF ^ ((1 << drop) - 1))
    known = np.isfinite(words.view(np.float32)) & np.isfinite(rounded.view(np.float32))
    return as_text(by_weight(np.where(known, rounded, np.uint32(0x7FC00000)).astype("<u4")))


def by_weight(values: NDArray[Any]) -> bytes:
    """The bytes of an array, all first bytes first."""
    import numpy as np

    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()


def as_text(data: bytes) -> str:
    """Bytes, deflated, in base64."""
    return base64.b64encode(zlib.compress(data, _LEVEL)).decode("ascii")
