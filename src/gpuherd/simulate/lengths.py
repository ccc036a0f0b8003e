"""Lengths of time that differ from job to job, as people write them: ``5m``, ``uniform:1m,10m``, ``lognormal:300,1``.

A spread is plain data; the caller brings the source of chance, so that the same seed gives the same lengths.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from random import Random

from gpuherd.quantities import duration_s

# Kind -> what its figures mean. The first is a time, and the second as said.
_KINDS = {
    "fixed": ("time",),
    "uniform": ("least", "most"),
    "exponential": ("mean",),
    "lognormal": ("median", "sigma of the logarithm"),
    "pareto": ("least", "exponent"),
}
_PURE_NUMBERS = ("sigma of the logarithm", "exponent")
# A draw of a heavy tail may be absurd (or infinite): nothing runs for longer than this.
_LONGEST_S = 10 * 365 * 86400.0


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution of seconds: its kind, and the figures that it takes, times in seconds."""

    kind: str
    figures: tuple[float, ...]

    def draw(self, chance: Random) -> float:
        """A length in seconds, 0 or more."""
        first = self.figures[0]
        if self.kind == "fixed":
            return first
        second = self.figures[-1]
        if self.kind == "uniform":
            drawn = chance.uniform(first, second)
        elif self.kind == "exponential":
            drawn = chance.expovariate(1 / first)
        elif self.kind == "lognormal":
            drawn = chance.lognormvariate(math.log(first), second)
        else:
            drawn = first * chance.paretovariate(second)
        return min(drawn, _LONGEST_S)


def spread(word: str) -> Spread:
    """What the word describes. Raises ValueError with a sentence.

    >>> spread("5m"), spread("lognormal:5m,1")
    (Spread(kind='fixed', figures=(300.0,)), Spread(kind='lognormal', figures=(300.0, 1.0)))
    """
    kind, colon, rest = word.partition(":")
    if not colon:
        return Spread("fixed", (duration_s(word),))
    if kind not in _KINDS:
        nearest = difflib.get_close_matches(kind, _KINDS, n=1)
        raise ValueError(
            f"{kind!r} is no kind of spread"
            + (f"; did you mean {nearest[0]}?" if nearest else f": {', '.join(_KINDS)}")
        )
    names, parts = _KINDS[kind], rest.split(",")
    if len(parts) != len(names):
        raise ValueError(f"{word!r}: {kind} takes {' and '.join(names)}, separated by a comma")
    figures = tuple(_figure(name, part, word) for name, part in zip(names, parts, strict=True))
    if kind == "uniform" and figures[0] > figures[1]:
        raise ValueError(f"{word!r}: the least is above the most")
    return Spread(kind, figures)


def _figure(name: str, part: str, word: str) -> float:
    if name not in _PURE_NUMBERS:
        return duration_s(part)
    try:
        value = float(part)
    except ValueError:
        value = -1.0
    if not 0 < value <= 100:
        raise ValueError(f"{word!r}: the {name} must be a number above 0, at most 100")
    return value
