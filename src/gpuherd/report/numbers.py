"""Numbers as words of a page: the digits that matter, a true minus sign, a dash for none. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TypeGuard

NONE = "–"
_MINUS = "\N{MINUS SIGN}"


def is_known(value: float | None) -> TypeGuard[float]:
    """Whether there is a number, and it is finite."""
    return value is not None and math.isfinite(value)


def fixed(value: float | None, digits: int = 3) -> str:
    """With so many digits behind the point, also where they are 0.

    >>> fixed(0.5), fixed(-0.25), fixed(-0.0001), fixed(None)
    ('0.500', '−0.250', '0.000', '–')
    """
    if not is_known(value):
        return NONE
    return re.sub(r"^-(0(\.0*)?)$", r"\1", f"{value:.{digits}f}").replace("-", _MINUS)


def figure(value: float | None, digits: int = 3) -> str:
    """With about four digits, whatever its size.

    >>> figure(3), figure(0.01234), figure(12.3456), figure(0.00012), figure(123456.7)
    ('3', '0.0123', '12.35', '1.20e-4', '1.23e+5')
    """
    if not is_known(value):
        return NONE
    size = abs(value)
    if value == 0 or (value == int(value) and size < 1e6):
        return str(int(value))
    if size >= 1e5 or size < 1e-3:
        return _exponent(f"{value:.2e}")
    if size < 0.1:
        return f"{value:#.{digits}g}"
    return f"{value:.{0 if size >= 1e4 else 1 if size >= 100 else min(2, digits) if size >= 10 else digits}f}"


def axis(value: float) -> str:
    """As short as can be.

    >>> axis(0.1), axis(2.0), axis(7.06e-06), axis(-1500000.0)
    ('0.1', '2', '7.1e-6', '−1.5e+6')
    """
    size = abs(value)
    small = size != 0 and (size < 1e-3 or size >= 1e6)
    words = _exponent(f"{value:.1e}").replace(".0e", "e") if small else f"{value:.6g}"
    return words.replace("-", _MINUS, 1) if value < 0 else words


def _exponent(words: str) -> str:
    """Without zeros in front: 1.2e-4."""
    return re.sub(r"e([+-])0*(\d)", r"e\1\2", words)


def percent(value: float | None) -> str:
    """100 % is all, and 0 % is nothing.

    >>> percent(1.0), percent(0.9999), percent(0.1234), percent(0.0001)
    ('100 %', '> 99.9 %', '12.3 %', '< 0.1 %')
    """
    if not is_known(value):
        return NONE
    if value in (0.0, 1.0):
        return f"{100 * value:.0f} %"
    return "< 0.1 %" if value < 0.0005 else "> 99.9 %" if value >= 0.9995 else f"{100 * value:.1f} %"


def counted(count: int, word: str) -> str:
    """
    >>> counted(1, "job"), counted(2, "job")
    ('1 job', '2 jobs')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """
    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """From the least to the largest, with a little room, and 0 within where it is near."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if 0 < low < 0.5 * high:
        low = 0.0
    room = ((high - low) or abs(high) or 1.0) * 0.06
    return (0.0 if low == 0 else low - room), high + room


def share_spread(values: Sequence[float]) -> tuple[float, float]:
    """Shares from 0 to 1; where all are small, as far as they go."""
    most = max(0.0, *values) if values else 0.0
    return 0.0, 1.06 * most if 0 < most < 0.4 else 1.0
