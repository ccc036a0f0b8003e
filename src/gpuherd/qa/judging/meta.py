"""What a judging says of itself: who judged what, how, and what came out. Plain frozen data and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args

from gpuherd.errors import GpuherdError
from gpuherd.qa.judging.verdict import Verdict

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
    answers: Answers
    answers_sha256: str
    counts: Mapping[Verdict, int]
    sha256: str
    model: str | None = None
    threshold: float | None = None
    prompt_sha256: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    made: str = ""

    @property
    def total(self) -> int:
        """How many answers were judged."""
        return sum(self.counts.values())


def meta_values(meta: JudgingMeta) -> dict[str, Any]:
    """The judging as JSON values, as they stand in its ``.json``."""
    return {
        "format": FORMAT,
        "name": meta.name,
        "judge": meta.judge,
        "kind": meta.kind.value,
        "model": meta.model,
        "threshold": meta.threshold,
        "prompt_sha256": meta.prompt_sha256,
        "answers": meta.answers,
        "answers_sha256": meta.answers_sha256,
        "counts": {verdict.value: meta.counts.get(verdict, 0) for verdict in Verdict},
        "settings": dict(meta.settings),
        "sha256": meta.sha256,
        "versions": dict(meta.versions),
        "made": meta.made,
    }


def meta_of(value: Any) -> JudgingMeta:
    """The judging that ``meta_values`` described. Raises BadJudging."""
    if isinstance(value, dict) and isinstance(value.get("format"), int) and value["format"] > FORMAT:
        raise BadJudging(f"written by a newer gpuherd (format {value['format']}, known here: {FORMAT}); update gpuherd")
    try:
        if value["answers"] not in ANSWERS:
            raise ValueError(f"answers {value['answers']!r}")
        return JudgingMeta(
            name=_text(value["name"]),
            judge=_text(value["judge"]),
            kind=Kind(value["kind"]),
            answers=value["answers"],
            answers_sha256=_text(value["answers_sha256"]),
            counts={verdict: int(value["counts"].get(verdict.value, 0)) for verdict in Verdict},
            sha256=_text(value["sha256"]),
            model=None if value["model"] is None else _text(value["model"]),
            threshold=None if value["threshold"] is None else float(value["threshold"]),
            prompt_sha256=None if value["prompt_sha256"] is None else _text(value["prompt_sha256"]),
            settings=dict(value["settings"]),
            versions={str(library): str(version) for library, version in value["versions"].items()},
            made=_text(value["made"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise BadJudging(f"no description of a judging: {type(problem).__name__}: {problem}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
