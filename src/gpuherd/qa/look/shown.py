"""What the page of a run shows: everything that was read of it. Plain frozen data; ``reading`` fills it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuherd.qa.judging.audit import Audit
from gpuherd.qa.judging.files import JudgingMeta
from gpuherd.qa.judging.verdicts import Judgment
from gpuherd.qa.record import Answered
from gpuherd.qa.span import Span

if TYPE_CHECKING:
    from gpuherd.qa.evaluation.result import Evaluation


@dataclass(frozen=True, slots=True)
class Judged:
    """A judging, with its judgments by question and answer: ``(id, which)``."""

    meta: JudgingMeta
    judgments: Mapping[tuple[str, str], Judgment]


@dataclass(frozen=True, slots=True)
class MeasureScores:
    """A measure with a value a question, in the order of the questions; None where it is not defined.

    Attributes:
        source: where its formula is from.
        summary: what it is, in a line.
        undefined: how many questions have none, by reason.
    """

    name: str
    values: Sequence[float | None]
    source: str = ""
    summary: str = ""
    undefined: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shown:
    """A run as its page shows it.

    Attributes:
        title: the run's name.
        facts: what stands at the head: (what, value).
        settings: how the answers were made: (name, value), in order.
        answers: all of them, in the order of the questions.
        judgings: the evaluation's judge first.
        scores: of each measure, the evaluation's order.
        relevance: of each token of the main answer, by question id; what is not there was not measured.
        clusters: of each sample, by question id.
        audits: of the judgings, in their order.
        span: which part of the generations scores are of.
        evaluation: what came out, where the run was evaluated.
        notes: what a reader must know first.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    settings: Sequence[tuple[str, str]]
    answers: Sequence[Answered]
    judgings: Sequence[Judged] = ()
    scores: Sequence[MeasureScores] = ()
    relevance: Mapping[str, Sequence[float]] = field(default_factory=dict)
    clusters: Mapping[str, Sequence[int]] = field(default_factory=dict)
    audits: Sequence[Audit] = ()
    span: Span = "answer"
    evaluation: Evaluation | None = None
    notes: Sequence[str] = ()
