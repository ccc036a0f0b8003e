"""What a scoring says of itself: by which conventions, from what, and which measures. Frozen data and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.qa.span import Span, span_in

FORMAT = 1


class BadScoring(GpuherdError):
    """A scoring's files are damaged, of a newer gpuherd, or not of this run."""

    exit_code = ExitCode.BAD_INPUT


@dataclass(frozen=True, slots=True)
class ScoredMeasure:
    """A column of a scoring.

    Attributes:
        name: the measure's exact name.
        source: where its formula is from.
        needs: what it was computed of.
        defined: how many questions have a value.
        undefined: how many have none, by reason.
    """

    name: str
    source: str
    needs: tuple[str, ...]
    defined: int
    undefined: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringMeta:
    """A scoring that is whole.

    Attributes:
        name: of its files: 8 hex digits of all that it depends on, or as the user said.
        eos: ``include`` or ``exclude``: whether the token that ended an answer is one of its tokens.
        statistics: where each need was taken from: the name of a statistic, or in words what was done with the answers.
        settings: everything else that the values depend on.
        measures: its columns.
        questions: its rows.
        answers_sha256: of the run's answers.jsonl.
        sha256: of the CSV file.
        versions: of the libraries that took part.
        made: when, as ISO 8601 in UTC.
    """

    name: str
    eos: str
    statistics: Mapping[str, str]
    measures: tuple[ScoredMeasure, ...]
    questions: int
    answers_sha256: str
    sha256: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    made: str = ""

    @property
    def span(self) -> Span:
        """Which part of the generations was measured; a scoring that names none measured all that was written."""
        return span_in(self.settings)


def meta_values(meta: ScoringMeta) -> dict[str, Any]:
    """The scoring as JSON values, as they stand in its ``.json``."""
    return {
        "format": FORMAT,
        "name": meta.name,
        "eos": meta.eos,
        "statistics": dict(meta.statistics),
        "settings": dict(meta.settings),
        "questions": meta.questions,
        "measures": [
            {
                "name": each.name,
                "source": each.source,
                "needs": list(each.needs),
                "defined": each.defined,
                "undefined": dict(each.undefined),
            }
            for each in meta.measures
        ],
        "answers_sha256": meta.answers_sha256,
        "sha256": meta.sha256,
        "versions": dict(meta.versions),
        "made": meta.made,
    }


def meta_of(value: Any) -> ScoringMeta:
    """The scoring that ``meta_values`` described. Raises BadScoring."""
    if isinstance(value, dict) and isinstance(value.get("format"), int) and value["format"] > FORMAT:
        raise BadScoring(f"written by a newer gpuherd (format {value['format']}, known here: {FORMAT}); update gpuherd")
    try:
        return ScoringMeta(
            name=str(value["name"]),
            eos=str(value["eos"]),
            statistics={str(need): str(where) for need, where in value["statistics"].items()},
            settings=dict(value["settings"]),
            questions=int(value["questions"]),
            measures=tuple(_measure_of(each) for each in value["measures"]),
            answers_sha256=str(value["answers_sha256"]),
            sha256=str(value["sha256"]),
            versions={str(library): str(version) for library, version in value["versions"].items()},
            made=str(value["made"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise BadScoring(f"no description of a scoring: {type(problem).__name__}: {problem}") from None


def _measure_of(value: Any) -> ScoredMeasure:
    return ScoredMeasure(
        str(value["name"]),
        str(value["source"]),
        tuple(str(need) for need in value["needs"]),
        int(value["defined"]),
        {str(reason): int(number) for reason, number in value["undefined"].items()},
    )
