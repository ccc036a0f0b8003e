"""The one list of uncertainty measures: a new one is one function that names what it needs.

    @measure("ln-nll", needs=[Need.GREEDY], source="Malinin & Gales 2021 (arXiv 2002.07650), eq. 5")
    def length_normalised_nll(evidence: Evidence) -> float: ...

Higher is more uncertain, in every measure. Where it is not defined for a question (an empty answer, say), the function
raises ``Undefined`` with the reason; it never gives 0, which would be certainty. It takes what it looks at through
``given``, which raises that where something was not measured. ``compute`` makes a column of each measure.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuherd.errors import UsageError
from gpuherd.options import did_you_mean
from gpuherd.qa.measures import given
from gpuherd.qa.measures.evidence import Evidence, Undefined

Function = Callable[[Evidence], float]


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure: its exact name (its variant behind a colon), other names, needs, and where its formula is from."""

    name: str
    function: Function
    needs: frozenset[str]
    source: str
    summary: str
    aliases: tuple[str, ...] = ()


_FAMILIES = ("likelihood", "samples", "weighting")  # modules, in the order in which their measures are shown

FORMULAS_VERSION = 2  # of all measures: where a formula changes, a scoring made before is not taken for a new one

_MEASURES: dict[str, Measure] = {}
_ALIASES: dict[str, str] = {}


def measure(
    name: str, *, needs: Sequence[str], source: str, aliases: Sequence[str] = ()
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
    """All measures: the families in their order, then those of other modules; whatever was imported first."""
    _load()
    return tuple(sorted(_MEASURES.values(), key=_place))


def _place(each: Measure) -> int:
    """Of the family that a measure is of, among all."""
    module = each.function.__module__.rpartition(".")[2]
    return _FAMILIES.index(module) if module in _FAMILIES else len(_FAMILIES)


def measure_named(name: str) -> Measure:
    """The measure of this name or alias. Raises UsageError, which names the nearest."""
    _load()
    found = _MEASURES.get(_ALIASES.get(name, name))
    if found is None:
        hint = did_you_mean(name, [*_MEASURES, *_ALIASES], "gpuherd score --list shows all", most=3)
        raise UsageError(f"there is no measure {name!r}{hint}")
    return found


def _load() -> None:
    """Imports the modules of this package, which register measures: the families in their order, then all others."""
    import gpuherd.qa.measures as package

    others = sorted(each.name for each in pkgutil.iter_modules(package.__path__))
    for module in dict.fromkeys((*_FAMILIES, *others)):
        importlib.import_module(f"{package.__name__}.{module}")


# --- computed ---------------------------------------------------------------------------------------------------------

NOT_FINITE = "its value is beyond the range of a float64"


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """Scores of a run.

    Attributes:
        ids: of the questions, in order.
        columns: by the measure's exact name its value for each question, higher is more uncertain; None: undefined.
        undefined: by the measure's exact name how many questions it is undefined for, by reason; empty for one that is
            defined throughout. A table that was read has none: its description has them.
    """

    ids: tuple[str, ...]
    columns: Mapping[str, tuple[float | None, ...]]
    undefined: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def defined(self, name: str) -> int:
        """How many questions have a value of the measure of this exact name."""
        return len(self.ids) - sum(self.undefined[name].values())


def compute(names: Iterable[str], evidences: Iterable[Evidence]) -> ScoreTable:
    """Each of these measures (by name or alias; each once, in this order) for each question.

    Raises UsageError for a name that is none, and BadEvidence where what was measured doesn't fit the answers.
    """
    chosen = {each.name: each for each in map(measure_named, names)}
    columns: dict[str, list[float | None]] = {name: [] for name in chosen}
    undefined: dict[str, Counter[str]] = {name: Counter() for name in chosen}
    ids = []
    for evidence in evidences:
        given.check(evidence)
        ids.append(evidence.id)
        for name, each in chosen.items():
            value = value_of(each, evidence)
            if isinstance(value, Undefined):
                undefined[name][str(value)] += 1
                columns[name].append(None)
            else:
                columns[name].append(value)
    return ScoreTable(
        tuple(ids),
        {name: tuple(column) for name, column in columns.items()},
        {name: dict(sorted(reasons.items())) for name, reasons in undefined.items()},
    )


def value_of(each: Measure, evidence: Evidence) -> float | Undefined:
    """The measure's value for a question, never -0.0 and always finite; or why there is none."""
    try:
        value = each.function(evidence)
    except Undefined as reason:
        return reason
    return value + 0.0 if math.isfinite(value) else Undefined(NOT_FINITE)
