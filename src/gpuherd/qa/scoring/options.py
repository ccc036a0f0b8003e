"""The options of a scoring, and what follows from them: measures, and where what they need is taken from.

Light: declarations and decisions. The options of statistics are their own (``statistics``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import new_class
from typing import TYPE_CHECKING

from gpuherd.errors import UsageError
from gpuherd.qa.measures.evidence import EvidenceNeed
from gpuherd.qa.measures.registry import Measure, measure_named
from gpuherd.qa.statistics.files import StatisticSpec
from gpuherd.qa.statistics.registry import Has, NeedSource, Planning, option_classes, statistics

if TYPE_CHECKING:
    # At run time every statistic that is found takes part. Type checkers know the keywords of these.
    from gpuherd.qa.statistics.equivalence import EquivalenceOptions
    from gpuherd.qa.statistics.self_evaluation import PTrueOptions

    class _OfAllStatistics(PTrueOptions, EquivalenceOptions): ...

else:
    _OfAllStatistics = new_class("_OfAllStatistics", option_classes())

ALL, LOG_PROBS = "all", "log-probs"
ANSWERS_ALONE: frozenset[str] = frozenset({EvidenceNeed.GREEDY, EvidenceNeed.SAMPLES})


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(_OfAllStatistics):
    """A scoring of one run: what all scorings have, and the options of each statistic."""


@dataclass(frozen=True, slots=True)
class MeasureSelection:
    """The measures that are computed.

    Attributes:
        measures: in the order of the registry, or as they were named.
        sources: for each of their needs besides the answers.
        left_out: the others that were meant, each with the reason.
    """

    measures: tuple[Measure, ...]
    sources: Mapping[str, NeedSource]
    left_out: tuple[tuple[str, str], ...]

    @property
    def statistics(self) -> tuple[StatisticSpec, ...]:
        """The statistics that these measures are computed from, each once."""
        found = {source.spec.name: source.spec for source in self.sources.values() if source.spec is not None}
        return tuple(found.values())


def selected_measures(names: Sequence[str], known: Sequence[Measure]) -> tuple[tuple[Measure, ...], frozenset[str]]:
    """The measures that these words mean, each once, and the names of those that were named one by one: these must be
    computed, while of many that one word means some may be left out.

    No words, and ``all``, are all; ``log-probs`` those that need the answers alone; the beginning of names up to their
    colon is all that begin so. Raises UsageError for a word that means nothing.
    """
    if not names:
        return tuple(known), frozenset()
    found: dict[str, Measure] = {}
    must = set()
    for name in names:
        if name in (ALL, LOG_PROBS):
            chosen = [each for each in known if name == ALL or each.needs <= ANSWERS_ALONE]
        elif any(name in _names(each) for each in known):
            chosen = [measure_named(name)]
            must.add(chosen[0].name)
        else:
            family = [each for each in known if any(word.startswith(f"{name}:") for word in _names(each))]
            chosen = family or [measure_named(name)]
        found.update((each.name, each) for each in chosen)
    return tuple(found.values()), frozenset(must)


def costly_needs() -> frozenset[str]:
    """The needs that take the generator again; they are measured only if a measure is named."""
    return frozenset(need for each in statistics() if each.costly for need in each.needs)


def requested_needs(options: ScoreOptions, measures: Sequence[Measure]) -> frozenset[str]:
    """The needs that may be measured for these measures: not the costly ones if no measure was named."""
    needs = frozenset(need for each in measures for need in each.needs)
    return needs if options.measures else needs - costly_needs()


def planned_specs(options: ScoreOptions, planning: Planning) -> dict[str, StatisticSpec]:
    """The statistics that could be measured by the models that are named, by the names that ``sources`` knows.

    Raises MissingModel, BadModel, UsageError where a model that was named can't be used.
    """
    return {name: spec for each in statistics() for name, spec in each.plan(options, planning).items()}


def sources(options: ScoreOptions, has: Has, planned: Mapping[str, StatisticSpec]) -> dict[str, NeedSource | str]:
    """For every need where it is met from, or the reason why it isn't.

    Args:
        planned: what could be measured by the models that are named in the options.
    """
    samples: NeedSource | str = "the run has no samples; generate with --samples 10, say"
    if has.samples:
        samples = NeedSource("answers")
    found: dict[str, NeedSource | str] = {
        EvidenceNeed.GREEDY: NeedSource("answers") if has.greedy else "the run has no greedy answers",
        EvidenceNeed.SAMPLES: samples,
    }
    for each in statistics():
        if each.of_samples and not has.samples:
            found |= dict.fromkeys(each.needs, samples)
        else:
            found |= {need: each.source(need, options, has, planned) for need in each.needs}
    order: dict[str, int] = {need: place for place, need in enumerate(EvidenceNeed)}  # in which statistics are measured
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def choose(
    measures: Sequence[Measure], sources: Mapping[str, NeedSource | str], *, must: Collection[str]
) -> MeasureSelection:
    """The measures whose needs are met. ``sources``: a reason in place of a source where a need can't be met.

    Raises UsageError where one whose name is in ``must`` can't be computed, or none of them can.
    """
    chosen, left_out = [], []
    for each in measures:
        met_or_why = {need: sources.get(need, f"no statistic measures {need}") for need in sorted(each.needs)}
        why = next((found for found in met_or_why.values() if isinstance(found, str)), None)
        if why is None:
            chosen.append(each)
        elif each.name in must:
            raise UsageError(f"{each.name} can't be computed: {why}")
        else:
            left_out.append((each.name, why))
    if not chosen:
        raise UsageError(f"no measure can be computed: {left_out[0][1] if left_out else 'none was asked for'}")
    used = {need for each in chosen for need in each.needs}
    met = {need: source for need, source in sources.items() if need in used and isinstance(source, NeedSource)}
    return MeasureSelection(tuple(chosen), met, tuple(left_out))


def _names(each: Measure) -> tuple[str, ...]:
    return (each.name, *each.aliases)
