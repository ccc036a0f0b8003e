"""What a judging says of itself: who judged what, how, and what came out. Plain frozen data and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, get_args

from gpuherd.errors import GpuherdError
from gpuherd.qa.judging.verdict import Verdict
from gpuherd.runs import records

FORMAT = 1

Answers = Literal["greedy", "samples", "all"]
ANSWERS: tuple[Answers, ...] = get_args(Answers)


class Kind(StrEnum):
    """How verdicts come about: five rules, a model of ours, or a model behind an address."""

    EXACT = "exact"
    CONTAINS = "contains"
    SQUAD = "squad"
    ROUGE = "rouge"
    MATH = "math"
    MODEL = "model"
    URL = "url"


RULES = (Kind.EXACT, Kind.CONTAINS, Kind.SQUAD, Kind.ROUGE, Kind.MATH)


class BadJudging(GpuherdError):
    """A judging's files are damaged, of a newer gpuherd, or not of this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingMeta:
    """A judging that is whole.

    Attributes:
        name: of its files, ``<judge>-<8 hex of all that the verdicts depend on>``.
        judge: as the user said it.
        kind: how it judged.
        answers: which answers: the greedy ones, the samples, or all.
        answers_sha256: of the run's answers.jsonl that was judged.
        counts: judgments by verdict; every verdict stands in it.
        sha256: of the file of judgments.
        model: the model that judged, None for rules.
        threshold: from which score (rules) or probability (models) on an answer is correct, None where nothing is
            compared.
        prompt_sha256: of the judge's prompt, None for rules.
        settings: everything else that the verdicts depend on.
        versions: of the libraries that took part.
        made: when, as ISO 8601 in UTC.
    """

    name: str
    judge: str
    kind: Kind
    model: str | None = None
    threshold: float | None = None
    prompt_sha256: str | None = None
    answers: Answers
    answers_sha256: str
    counts: Mapping[Verdict, int]
    settings: Mapping[str, Any] = field(default_factory=dict)
    sha256: str
    versions: Mapping[str, str] = field(default_factory=dict)
    made: str = ""

    @property
    def total(self) -> int:
        """How many answers were judged."""
        return sum(self.counts.values())


def meta_values(meta: JudgingMeta) -> dict[str, Any]:
    """The judging as JSON values, as they stand in its ``.json``."""
    return {"format": FORMAT, **records.plain(_with_all_counts(meta))}


def meta_of(value: Any) -> JudgingMeta:
    """The judging that ``meta_values`` described. Raises BadJudging."""
    if isinstance(value, dict) and isinstance(value.get("format"), int) and value["format"] > FORMAT:
        raise BadJudging(f"written by a newer gpuherd (format {value['format']}, known here: {FORMAT}); update gpuherd")
    try:
        return _with_all_counts(records.read(JudgingMeta, value))
    except (ValueError, KeyError, TypeError) as problem:
        raise BadJudging(f"no description of a judging: {type(problem).__name__}: {problem}") from None


def _with_all_counts(meta: JudgingMeta) -> JudgingMeta:
    """Every verdict stands in the counts; files of versions before a verdict lack it."""
    return replace(meta, counts={verdict: meta.counts.get(verdict, 0) for verdict in Verdict})
