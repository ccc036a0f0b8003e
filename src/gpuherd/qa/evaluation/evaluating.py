"""A whole evaluation: every measure under every judging. Pure: what ``reading`` read comes in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpuherd.qa.evaluation.labels import Labels, labels
from gpuherd.qa.evaluation.lengths import positions, prefixes
from gpuherd.qa.evaluation.measuring import Scores, differences, measure_result
from gpuherd.qa.evaluation.result import ByJudge, Settings
from gpuherd.qa.judging.label_quality import OF_CLASSES, Judged, Warned, doubts_of_classes
from gpuherd.qa.measures.evidence import Answer

Track = Callable[[Sequence[str], str], Iterable[str]]


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores that are evaluated.

    Attributes:
        columns: by the measure's name its value for each question, in the order of the questions; None: undefined.
        reasons: by the measure's name why it is undefined, with counts over all questions.
    """

    columns: Mapping[str, Scores]
    reasons: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Judging:
    """A judging with what is known against its verdicts on the answers that are evaluated."""

    judged: Judged
    judge: str
    warnings: tuple[Warned, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """All that an evaluation is made of.

    Attributes:
        ids: of the questions, in order.
        which: the answer that is evaluated, ``greedy`` or ``sample-0``.
        answers: this answer of each question by the scoring's rule for the end token; None where a log-prob is missing.
    """

    ids: Sequence[str]
    which: str
    answers: Sequence[Answer | None]
    scored: Scored
    judgings: Sequence[Judging]


def evaluate(asked: Asked, settings: Settings, track: Track) -> tuple[ByJudge, ...]:
    """The evaluation under each judging.

    Args:
        track: passes names on and may show how far it is, under a title.
    """
    return tuple(_by_judge(asked, judging, settings, track) for judging in asked.judgings)


def _by_judge(asked: Asked, judging: Judging, settings: Settings, track: Track) -> ByJudge:
    found = labels(asked.ids, judging.judged.judgments, asked.which, settings.not_attempted)
    columns = asked.scored.columns
    return ByJudge(
        judging=judging.judged.name,
        judge=judging.judge,
        which=asked.which,
        counts=found.counts,
        right=found.right,
        wrong=found.wrong_ones,
        left_out=found.left_out,
        warnings=_warnings(judging.warnings, found, settings.confidence),
        measures=tuple(
            measure_result(
                name, columns[name], found.wrong, undefined(columns[name], found, asked.scored.reasons[name]), settings
            )
            for name in track([*columns], "measures")
        ),
        differences=differences(columns, found.wrong, settings, lambda names: track(names, "differences"))
        if settings.against in columns
        else (),
        prefixes=prefixes(asked.answers, found.wrong, settings),
        positions=positions(asked.answers, found.wrong, settings),
    )


def _warnings(audited: Sequence[Warned], found: Labels, confidence: float) -> tuple[Warned, ...]:
    """What the audit says; of classes what holds for the labels as they are counted here, in its place."""
    classes = doubts_of_classes(found.right, found.wrong_ones, len(found.wrong), confidence)
    at = next((place for place, each in enumerate(audited) if each.kind in OF_CLASSES), len(audited))
    before, after = ([each for each in part if each.kind not in OF_CLASSES] for part in (audited[:at], audited[at:]))
    return (*before, *classes, *after)


def undefined(scores: Scores, found: Labels, reasons: Mapping[str, int]) -> dict[str, int]:
    """How many answers with a label have no score, by reason. The scoring counts reasons over all questions: where it
    has several, which one holds for how many of the labelled ones is not known, and they stand together."""
    missing = sum(score is None and label is not None for score, label in zip(scores, found.wrong, strict=True))
    return {"; or ".join(reasons) or "no value": missing} if missing else {}
