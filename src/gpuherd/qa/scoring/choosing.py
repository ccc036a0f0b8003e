"""Which measures are computed, and where what they need is taken from; or why one can't be. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuherd.errors import UsageError
from gpuherd.qa.measures.evidence import Need
from gpuherd.qa.measures.registry import Measure, measure_named
from gpuherd.qa.scoring.options import ALL, LOG_PROBS, ScoreOptions
from gpuherd.qa.scoring.statistic import Kind, Meta, Spec
from gpuherd.qa.span import Span

# What needs the generator again, which is not begun unless somebody asks for it.
COSTLY = frozenset({Need.P_TRUE, Need.P_IK})
ANSWERS_ALONE = frozenset({Need.GREEDY, Need.SAMPLES})
_PAIRWISE = (Need.SIMILARITY, Need.EQUIVALENCE, Need.AFFINITY)


@dataclass(frozen=True, slots=True)
class Has:
    """What a run has.

    Attributes:
        greedy: whether there are greedy answers.
        samples: how many for each question.
        measured: statistics of these answers that are there, the oldest first.
    """

    greedy: bool
    samples: int
    measured: tuple[Meta, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """Where a need is met from.

    Attributes:
        said: for the scoring's record: the statistic's name and the rule, or what is done with the answers.
        spec: the statistic; None where the answers are enough.
    """

    said: str
    spec: Spec | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """What is computed.

    Attributes:
        measures: in the order of the registry, or as they were named.
        sources: for each of their needs besides the answers.
        left_out: the others that were meant, each with the reason.
    """

    measures: tuple[Measure, ...]
    sources: Mapping[Need, Source]
    left_out: tuple[tuple[str, str], ...]

    @property
    def statistics(self) -> tuple[Spec, ...]:
        """What must be there before these measures are computed, each once."""
        found = {source.spec.name: source.spec for source in self.sources.values() if source.spec is not None}
        return tuple(found.values())


def meant(names: Sequence[str], known: Sequence[Measure]) -> tuple[tuple[Measure, ...], frozenset[str]]:
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


def wanted_needs(options: ScoreOptions, measures: Sequence[Measure]) -> frozenset[Need]:
    """What may be measured for these measures: not the costly needs, where no measure was asked for."""
    needs = frozenset(need for each in measures for need in each.needs)
    return needs if options.measures else needs - COSTLY


def choose(measures: Sequence[Measure], sources: Mapping[Need, Source | str], *, must: Collection[str]) -> Choice:
    """The measures whose needs are met. ``sources``: a reason in place of a source where a need can't be met.

    Raises UsageError where one whose name is in ``must`` can't be computed, or none of them can.
    """
    chosen, left_out = [], []
    for each in measures:
        why = next((str(sources[need]) for need in sorted(each.needs) if isinstance(sources[need], str)), None)
        if why is None:
            chosen.append(each)
        elif each.name in must:
            raise UsageError(f"{each.name} can't be computed: {why}")
        else:
            left_out.append((each.name, why))
    if not chosen:
        raise UsageError(f"no measure can be computed: {left_out[0][1] if left_out else 'none was asked for'}")
    used = {need for each in chosen for need in each.needs}
    met = {need: source for need, source in sources.items() if need in used and isinstance(source, Source)}
    return Choice(tuple(chosen), met, tuple(left_out))


def sources(options: ScoreOptions, has: Has, planned: Mapping[str, Spec]) -> dict[Need, Source | str]:
    """For every need where it is met from, or the reason why it isn't.

    Args:
        planned: what could be measured by the models that are named in the options: ``relevance``,
            ``sample-relevance``, ``similarity``, ``entailment``, ``p-true``, ``hidden``.
    """
    found: dict[Need, Source | str] = {
        Need.GREEDY: Source("answers") if has.greedy else "the run has no greedy answers",
        Need.SAMPLES: Source("answers") if has.samples else "the run has no samples; generate with --samples 10, say",
        Need.RELEVANCE: _relevance(options, has, planned.get("relevance"), "greedy"),
        Need.SAMPLE_RELEVANCE: _relevance(options, has, planned.get("sample-relevance"), "samples"),
        Need.SIMILARITY: _similarity(options, has, planned),
        Need.EQUIVALENCE: _equivalence(options, has, planned),
        Need.AFFINITY: _affinity(options, has, planned),
        Need.P_TRUE: _p_true(options, has, planned),
        Need.P_IK: _p_ik(options, has, planned),
    }
    if has.samples:
        return found
    return {need: found[Need.SAMPLES] if need in _PAIRWISE else source for need, source in found.items()}


def _relevance(options: ScoreOptions, has: Has, planned: Spec | None, answers: str) -> Source | str:
    known = _latest(has, Kind.RELEVANCE, options.span, answers=answers, long_texts=options.long_texts)
    return _statistic(planned, known, "--relevance-model names a model that measures it")


def _similarity(options: ScoreOptions, has: Has, planned: Mapping[str, Spec]) -> Source | str:
    alone = options.similarity_without_question
    known = _latest(has, Kind.SIMILARITY, options.span, with_question=not alone, long_texts=options.long_texts)
    remedy = "--similarity-model (or --relevance-model, for both) names a model that measures it"
    return _statistic(planned.get("similarity"), known, remedy)


def _equivalence(options: ScoreOptions, has: Has, planned: Mapping[str, Spec]) -> Source | str:
    if options.equivalence == "math":
        return Source("math: of one result, numbers by value")
    if options.equivalence in (None, "exact"):
        return Source("exact: equal but for case, punctuation and articles")
    if options.equivalence == "embedding":
        spec = planned.get("equivalence-similarity")
        met = Source(spec.name, spec) if spec else _similarity(options, has, planned)
        return (
            met if isinstance(met, str) else Source(f"{met.said}, at least {options.equivalence_threshold}", met.spec)
        )
    spec = planned.get("entailment")
    if spec is None:
        return f"--equivalence {options.equivalence} has no model"
    return Source(f"{spec.name}, {options.equivalence_rule}", spec)


def _affinity(options: ScoreOptions, has: Has, planned: Mapping[str, Spec]) -> Source | str:
    entailment = planned.get("entailment")
    kind = options.affinity or ("jaccard" if entailment is None else "nli")
    if kind == "jaccard":
        return Source("jaccard: shared words")
    if kind == "similarity":
        return _similarity(options, has, planned)
    if entailment is None:
        return "--affinity nli takes p(entailment) of --equivalence nli or judge"
    return Source(f"{entailment.name}, p(entailment)", entailment)


def _p_true(options: ScoreOptions, has: Has, planned: Mapping[str, Spec]) -> Source | str:
    so_many = [each for each in has.measured if len(each.spec.settings.get("examples", ())) == options.p_true_examples]
    has = replace(has, measured=tuple(so_many))
    known = _latest(has, Kind.P_TRUE, options.span, form=options.p_true, ideas=options.p_true_ideas)
    return _statistic(planned.get("p-true"), known, "--measures p-true has the model asked")


def _p_ik(options: ScoreOptions, has: Has, planned: Mapping[str, Spec]) -> Source | str:
    if options.judge is None:
        return "--judge names the judging whose labels train the probe"
    met = _statistic(planned.get("hidden"), _latest(has, Kind.HIDDEN, "both"), "--measures p-ik has the model read")
    return met if isinstance(met, str) else Source(f"{met.said}, labels of {options.judge}", met.spec)


def _statistic(planned: Spec | None, there: Meta | None, remedy: str) -> Source | str:
    """A statistic of the model that is named, else that which is there already, else how to come by one."""
    spec = planned if planned is not None else None if there is None else there.spec
    return f"not measured; {remedy}" if spec is None else Source(spec.name, spec)


def _latest(has: Has, kind: Kind, span: Span, **settings: object) -> Meta | None:
    """The latest of this kind that was measured by these conventions: another one is never used in silence."""
    fitting = [
        each
        for each in has.measured
        if each.spec.kind is kind
        and each.spec.span == span
        and all(each.spec.settings.get(name) == value for name, value in settings.items())
    ]
    return fitting[-1] if fitting else None


def _names(each: Measure) -> tuple[str, ...]:
    return (each.name, *each.aliases)
