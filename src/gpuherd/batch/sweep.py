"""Combinations of a matrix, settings of a sweep, and the placeholders that they fill. Pure.

A value goes into a word of a command after the command was split into words: it is never split, and no shell reads it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, product
from typing import Protocol

from gpuherd.jobs.run_dir import safe_name
from gpuherd.options import did_you_mean, yes_no

# --- matrix and placeholders --------------------------------------------------------------------------------------

Combination = Mapping[str, str]

KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][A-Za-z0-9_]*)\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}", re.ASCII)
# Letters without a meaning for a shell: any other sign of a value would become a part of the shell's line.
_PLAIN = re.compile(r"[A-Za-z0-9._+=@:,/%-]*", re.ASCII)


def size(axes: Mapping[str, Sequence[str]]) -> int:
    """The number of combinations, without making them."""
    return math.prod(len(values) for values in axes.values())


def combinations(
    axes: Mapping[str, Sequence[str]], include: Sequence[Combination], exclude: Sequence[Combination]
) -> Iterator[Combination]:
    """Every combination, the last axis fastest, then the entries of ``include``; each once.

    A combination that contains an entry of ``exclude`` is left out.

    >>> [c["lr"] + c["seed"] for c in combinations({"lr": ["a", "b"], "seed": ["1", "2"]}, [], [{"seed": "2"}])]
    ['a1', 'b1']
    """
    made = set()
    for values in product(*axes.values()) if axes else ():
        found = dict(zip(axes, values, strict=True))
        if not any(part.items() <= found.items() for part in exclude):
            made.add(frozenset(found.items()))
            yield found
    for extra in include:
        if frozenset(extra.items()) not in made:
            made.add(frozenset(extra.items()))
            yield {key: extra[key] for key in axes} if axes else extra


def filled(text: str, values: Combination, *, for_shell: bool = False) -> str:
    """The text with each ``{key}`` replaced; ``{{key}}`` is ``{key}`` itself. All other braces are plain letters.

    Raises ValueError for an unknown key, with the nearest, and with ``for_shell`` for a value that a shell would not
    read as one plain word.

    >>> filled("--lr={lr} {{x}}", {"lr": "0.1"})
    '--lr=0.1 {x}'
    """

    def value(found: re.Match[str]) -> str:
        if found[1] is not None:
            return f"{{{found[1]}}}"
        key = found[2]
        if key not in values:
            hint = did_you_mean(key, values, f"write {{{{{key}}}}} for the word itself", show="{{{}}}".format)
            raise ValueError(f"{{{key}}} is no key of the matrix{hint}")
        if for_shell and not _PLAIN.fullmatch(values[key]):
            raise ValueError(
                f"the value {values[key]!r} of {key} can't be put into a line for a shell; give command as a list"
            )
        return values[key]

    return _PLACEHOLDER.sub(value, text)


def has_placeholder(text: str) -> bool:
    """Whether the text has a ``{key}`` to replace."""
    return any(found[2] is not None for found in _PLACEHOLDER.finditer(text))


def name_part(values: Combination) -> str:
    """The part of a job's name that distinguishes the jobs of a matrix.

    >>> name_part({"lr": "0.1", "seed": "2"})
    'lr0.1-seed2'
    """
    return "-".join(key + (safe_name(value) if value else "") for key, value in values.items())


# --- distributions of a sweep's parameters ------------------------------------------------------------------------
#
# A distribution turns 64 random bits into a value; one with finitely many values also lists them in order. Values are
# words, as a person would write them: a drawn real number has six significant digits within its range, and the job gets
# exactly that number.

_BITS = 64
_DIGITS = 6
_MOST_DIGITS = 17  # a float has no more
_WHOLE = re.compile(r"[+-]?\d{1,15}", re.ASCII)
# Bounded before it becomes a number: 1e-999999999 as an exact fraction would fill the memory.
_REAL = re.compile(r"[+-]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][+-]?\d{1,3})?", re.ASCII)
_BETWEEN = ("low", "high", "step", "log")
_NORMAL = ("mean", "std")
# The names of these keys in other tools.
_ELSEWHERE = {
    "min": "low",
    "max": "high",
    "start": "low",
    "stop": "high",
    "q": "step",
    "mu": "mean",
    "loc": "mean",
    "sigma": "std",
    "stddev": "std",
    "scale": "std",
}
_AS_A_LIST = ("values", "value", "choices", "choice")


class BadParameter(ValueError):
    """A parameter's description is wrong. ``key``: which of its keys is at fault, None for all together."""

    def __init__(self, text: str, key: str | None = None):
        super().__init__(text)
        self.key = key


class Distribution(Protocol):
    """The distribution of a parameter's values."""

    def size(self) -> int | None:
        """The number of values, None for a continuous distribution."""
        ...

    def values(self) -> Iterator[str]:
        """All values, in order; for a distribution with a ``size``."""
        ...

    def draw(self, bits: int) -> str:
        """The value for 64 random bits."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these words, all equally likely.

    >>> Choice(("adam", "sgd")).draw(2**63)
    'sgd'
    """

    words: tuple[str, ...]

    def size(self) -> int | None:
        return len(self.words)

    def values(self) -> Iterator[str]:
        return iter(self.words)

    def draw(self, bits: int) -> str:
        return self.words[bits * len(self.words) >> _BITS]


@dataclass(frozen=True, slots=True)
class SteppedRange:
    """``low``, ``low + step`` and so on, ``count`` numbers, all equally likely. Exact: 0.1, 0.2, 0.3.

    >>> list(Steps(Fraction("0.1"), Fraction("0.1"), 3, whole=False).values())
    ['0.1', '0.2', '0.3']
    """

    low: Fraction
    step: Fraction
    count: int
    whole: bool

    def size(self) -> int | None:
        return self.count

    def values(self) -> Iterator[str]:
        return (self._at(index) for index in range(self.count))

    def draw(self, bits: int) -> str:
        return self._at(bits * self.count >> _BITS)

    def _at(self, index: int) -> str:
        value = self.low + index * self.step
        return str(int(value)) if self.whole else repr(float(value))


@dataclass(frozen=True, slots=True)
class Between:
    """A real number, uniform; with ``log`` its logarithm is uniform.

    >>> Between(1e-5, 1e-1, log=True).draw(2**63)
    '0.001'
    """

    low: float
    high: float
    log: bool

    def size(self) -> int | None:
        return 1 if self.low == self.high else None

    def values(self) -> Iterator[str]:
        return iter([repr(self.low)])

    def draw(self, bits: int) -> str:
        part = _unit(bits)
        if self.log:
            value = math.exp((1 - part) * math.log(self.low) + part * math.log(self.high))
        else:
            value = (1 - part) * self.low + part * self.high
        rounded = _rounded(value, self._digits())
        # Rounding may step over a bound.
        return rounded if self.low <= float(rounded) <= self.high else repr(min(max(value, self.low), self.high))

    def _digits(self) -> int:
        """As many digits as distinguish values of this range as well as six do in a range from 0."""
        largest, span = max(abs(self.low), abs(self.high)), self.high - self.low
        if not 0 < span < largest:
            return _DIGITS
        return _DIGITS + math.floor(math.log10(largest) - math.log10(span))


@dataclass(frozen=True, slots=True)
class WholeLog:
    """A whole number above 0 whose logarithm is uniform.

    >>> [WholeLog(1, 1000).draw(bits) for bits in (0, 2**63, 2**64 - 1)]
    ['1', '22', '1000']
    """

    low: int
    high: int

    def size(self) -> int | None:
        return 1 if self.low == self.high else None

    def values(self) -> Iterator[str]:
        return iter([str(self.low)])

    def draw(self, bits: int) -> str:
        # From half a step below to half a step above, so that both ends are as likely as their neighbours.
        part = _unit(bits)
        value = math.exp((1 - part) * math.log(self.low - 0.5) + part * math.log(self.high + 0.5))
        return str(min(max(round(value), self.low), self.high))


@dataclass(frozen=True, slots=True)
class Normal:
    """A normally distributed number.

    >>> Normal(0.0, 1.0).draw(2**62)
    '-0.67449'
    """

    mean: float
    std: float

    def size(self) -> int | None:
        return None

    def values(self) -> Iterator[str]:
        return iter(())

    def draw(self, bits: int) -> str:
        from statistics import NormalDist  # slow to import, and seldom needed

        return _rounded(NormalDist(self.mean, self.std).inv_cdf(_unit(bits)), _DIGITS)


def one_of(words: Sequence[str]) -> Choice:
    """One of a list. Raises BadParameter for an empty list and for a word that occurs twice."""
    if not words:
        raise BadParameter("has no values")
    if len(set(words)) < len(words):
        raise BadParameter("has a value twice")
    return Choice(tuple(words))


def check_keys(keys: Iterable[str]) -> None:
    """Raises BadParameter for the first key that no distribution has, with the right one if another tool uses it."""
    for key in keys:
        if key in _AS_A_LIST:
            raise BadParameter("write the values as a list: [a, b, c]", key)
        if key not in (*_BETWEEN, *_NORMAL):
            meant = _ELSEWHERE.get(key)
            hint = f"did you mean {meant}?" if meant else "possible: low, high, step, log; mean, std; or a list"
            raise BadParameter(f"unknown key {key!r}; {hint}", key)


def described(given: Mapping[str, str]) -> Distribution:
    """The distribution that keys like ``low`` and ``high`` describe. Raises BadParameter with a sentence.

    >>> described({"low": "1", "high": "8"}).size(), described({"low": "0.0", "high": "1", "step": "0.5"}).size()
    (8, 3)
    """
    check_keys(given)
    if given.keys() & set(_NORMAL):
        return _normal(given)
    for key in ("low", "high"):
        if key not in given:
            raise BadParameter(f"says nothing of {key}; write {{low: 1, high: 8}}, or a list")
    return _between(given)


def _normal(given: Mapping[str, str]) -> Normal:
    for key in given:
        if key not in _NORMAL:
            raise BadParameter(f"{key} doesn't go with mean and std", key)
    for key in _NORMAL:
        if key not in given:
            raise BadParameter(f"says nothing of {key}; write {{mean: 0, std: 1}}")
    mean, std = (float(_number(given, key)) for key in _NORMAL)
    if std <= 0:
        raise BadParameter(f"std={given['std']} is not above 0", "std")
    return Normal(mean, std)


def _between(given: Mapping[str, str]) -> Distribution:
    low, high = _number(given, "low"), _number(given, "high")
    if high < low:
        raise BadParameter(f"high={given['high']} is below low={given['low']}", "high")
    try:
        log = yes_no(given.get("log", "false"))
    except ValueError as problem:
        raise BadParameter(f"log: {problem}", "log") from None
    whole = all(_WHOLE.fullmatch(given[key]) for key in ("low", "high", "step") if key in given)
    if log and "step" in given:
        raise BadParameter("step doesn't go with log: true; leave one of them out, or write a list", "step")
    if log and low <= 0:
        raise BadParameter(f"low={given['low']} is not above 0, and has no logarithm", "low")
    if "step" in given:
        step = _number(given, "step")
        if step <= 0:
            raise BadParameter(f"step={given['step']} is not above 0", "step")
        return SteppedRange(low, step, int((high - low) // step) + 1, whole)
    if whole:
        return WholeLog(int(low), int(high)) if log else SteppedRange(low, Fraction(1), int(high - low) + 1, whole)
    return Between(float(low), float(high), log)


def _number(given: Mapping[str, str], key: str) -> Fraction:
    word = given[key]
    if not _REAL.fullmatch(word):
        raise BadParameter(f"{key}={word!r} is not a number", key)
    exact = Fraction(word)
    if not math.isfinite(float(word)) or (float(word) == 0) != (exact == 0):
        raise BadParameter(f"{key}={word!r} is beyond what a program could hold", key)
    return exact


def _unit(bits: int) -> float:
    """A number above 0 and below 1."""
    return ((bits >> (_BITS - 52)) + 0.5) * 2.0**-52


def _rounded(value: float, digits: int) -> str:
    return f"{value:.{min(digits, _MOST_DIGITS)}g}"


# --- settings of a sweep ------------------------------------------------------------------------------------------
#
# Every combination of the parameters' values, or a number of drawn ones. A draw depends only on the seed, the
# parameter's name and the number of the draw, and on nothing else in the file: more samples continue where fewer ended,
# and a new parameter leaves the draws of the others unchanged.

# A setting that was drawn before is drawn again, until this many times as many draws were made. Drawing all of n
# settings takes about n * ln(n) draws, and there are never more than a million.
_PATIENCE = 20
_LEAST_DRAWS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The parameters of a sweep. ``samples`` None: all combinations, in order; else this many different, drawn ones."""

    parameters: Mapping[str, Distribution]
    samples: int | None = None
    seed: int = 0

    def combinations(self) -> int | None:
        """The number of combinations, None for infinitely many."""
        sizes = [parameter.size() for parameter in self.parameters.values()]
        return None if None in sizes else math.prod(size for size in sizes if size is not None)

    def size(self) -> int | None:
        """The number of settings; None for a grid over a continuous parameter."""
        return self.combinations() if self.samples is None else self.samples

    def settings(self) -> Iterator[Mapping[str, str]]:
        """The settings. Raises ValueError when it finds too few different ones."""
        return self._grid() if self.samples is None else self._drawn(self.samples)

    def _grid(self) -> Iterator[Mapping[str, str]]:
        for values in product(*(parameter.values() for parameter in self.parameters.values())):
            yield dict(zip(self.parameters, values, strict=True))

    def _drawn(self, samples: int) -> Iterator[Mapping[str, str]]:
        made: set[tuple[str, ...]] = set()
        for number in count():
            values = tuple(
                parameter.draw(random_bits(self.seed, name, number)) for name, parameter in self.parameters.items()
            )
            if values not in made:
                made.add(values)
                yield dict(zip(self.parameters, values, strict=True))
            if len(made) == samples:
                return
            if number >= max(_LEAST_DRAWS, _PATIENCE * samples):
                raise ValueError(
                    f"only {len(made)} different settings were found in {number + 1} draws; ask for fewer samples"
                )


def random_bits(seed: int, name: str, number: int) -> int:
    """64 random bits, the same for the same key on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{name}\0{number}".encode(), digest_size=8).digest(), "big")
