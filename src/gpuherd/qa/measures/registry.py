"""The one list of uncertainty measures: a new one is one function that names what it needs.

    @measure("ln-nll", needs=[Need.GREEDY], source="Malinin & Gales 2021 (arXiv 2002.07650), eq. 5")
    def length_normalised_nll(evidence: Evidence) -> float: ...

Higher is more uncertain, in every measure. Where it is not defined for a question (an empty answer, say), the function
raises ``Undefined`` with the reason; it never gives 0, which would be certainty. It takes what it looks at through
``given``, which raises that where something was not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuherd.errors import UsageError
from gpuherd.options import did_you_mean
from gpuherd.qa.measures.evidence import Evidence, Need

Function = Callable[[Evidence], float]


class Undefined(Exception):
    """A measure has no value for this question; the message is the reason, the same for all such questions."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure: its exact name (its variant behind a colon), other names, needs, and where its formula is from."""

    name: str
    function: Function
    needs: frozenset[Need]
    source: str
    summary: str
    aliases: tuple[str, ...] = ()


FORMULAS_VERSION = 2  # of all measures: where a formula changes, a scoring made before is not taken for a new one

_MEASURES: dict[str, Measure] = {}
_ALIASES: dict[str, str] = {}


def measure(
    name: str, *, needs: Sequence[Need], source: str, aliases: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Registers the function that follows; the first line of its docstring is its summary in lists."""

    def register(function: Function) -> Function:
        taken = {*_MEASURES, *_ALIASES}
        for each in (name, *aliases):
            if each in taken:
                raise ValueError(f"there is a measure {each!r} already")
        summary = (function.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        _MEASURES[name] = Measure(name, function, frozenset(needs), source, summary, tuple(aliases))
        _ALIASES.update(dict.fromkeys(aliases, name))
        return function

    return register


def measures() -> tuple[Measure, ...]:
    """All measures, in the order of their registration."""
    _load()
    return tuple(_MEASURES.values())


def measure_named(name: str) -> Measure:
    """The measure of this name or alias. Raises UsageError, which names the nearest."""
    _load()
    found = _MEASURES.get(_ALIASES.get(name, name))
    if found is None:
        hint = did_you_mean(name, [*_MEASURES, *_ALIASES], "gpuherd score --list shows all", most=3)
        raise UsageError(f"there is no measure {name!r}{hint}")
    return found


def _load() -> None:
    """Imports the modules that register measures."""
    import gpuherd.qa.measures.all  # noqa: F401
