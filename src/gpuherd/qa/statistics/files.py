"""A statistic as it is kept: its name, its description, its file, and the task of the jobs that measure it.

``statistics/<statistic>.jsonl`` in the run's folder has a line a question, in the order of the questions. It is written
once, the description (``.json``) last, and checked when it is read. What the jobs are to do stands in ``task.json`` in
the folder of their work. Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.lm.backend import as_float32
from gpuherd.qa.folder import DescribedResults, QADirectory
from gpuherd.qa.record import Answered
from gpuherd.qa.span import Span, span_in
from gpuherd.runs import records
from gpuherd.runs.spec import digest_of


class BadStatistic(GpuherdError):
    """A statistic's files are damaged, of a newer gpuherd, or not of this run."""

    exit_code = ExitCode.BAD_INPUT


@dataclass(frozen=True, slots=True)
class StatisticSpec:
    """A statistic before it is measured: all that its values depend on besides the answers.

    Attributes:
        kind: what is measured: the ``kind`` of a statistic of the registry.
        model: as the user named it.
        model_sha256: of the model's files.
        settings: how, as plain JSON values.
    """

    kind: str
    model: str
    model_sha256: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of its files: the kind and 8 hex digits. The model's name has no part in it, its files have."""
        text = json.dumps([self.kind, self.model_sha256, dict(self.settings)], sort_keys=True)
        return f"{self.kind}-{digest_of(text)[:8]}"

    @property
    def span(self) -> Span:
        """Which part of the generations it is of; one that names none is of all that was written."""
        return span_in(self.settings)


@dataclass(frozen=True, slots=True)
class StatisticMeta:
    """A statistic that is whole.

    Attributes:
        spec: what it is.
        answers_sha256: of the run's answers that it was measured on.
        sha256: of its file.
        items: how many questions it has, and of these
        undefined: how many have no value, by reason.
        remarks: what people should know of it.
        versions: of the libraries that took part.
        made: when, as ISO 8601 in UTC.
    """

    spec: StatisticSpec
    answers_sha256: str
    sha256: str
    items: int
    undefined: Mapping[str, int]
    remarks: tuple[str, ...]
    versions: Mapping[str, str]
    made: str

    @property
    def name(self) -> str:
        """Of its files."""
        return self.spec.name


def _encoded(meta: StatisticMeta) -> dict[str, Any]:
    """With the fields of the specification among the others."""
    values = records.jsonable(meta)
    return {"name": meta.name, **values.pop("spec"), **values}


def _decoded(values: Any) -> StatisticMeta:
    meta: StatisticMeta = records.read(StatisticMeta, {**values, "spec": values})
    return meta


STATISTICS = DescribedResults(
    noun="statistic",
    description=StatisticMeta,
    path=QADirectory.statistic,
    error=BadStatistic,
    remedy="remove it and its .json, and score again",
    encode=_encoded,
    decode=_decoded,
)

# --- files --------------------------------------------------------------------------------------------------------


def statistics_of(folder: QADirectory, answers_sha256: str) -> list[StatisticMeta]:
    """The complete statistics of these answers, the oldest first. One that can't be read is logged and left out."""
    return STATISTICS.all_in(folder, lambda folder, name: statistic_named(folder, name, answers_sha256))


def statistic_named(folder: QADirectory, name: str, answers_sha256: str) -> StatisticMeta:
    """The statistic of this name. Raises BadStatistic."""
    meta = STATISTICS.read(folder, name)
    if meta.answers_sha256 != answers_sha256:
        raise BadStatistic(f"{folder.statistic(name, '.json')} was measured on other answers; {STATISTICS.remedy}")
    return meta


def rows(folder: QADirectory, meta: StatisticMeta) -> list[dict[str, Any]]:
    """The values of each question, in order. Raises BadStatistic if the file is not as it was written."""
    return [json.loads(line) for line in STATISTICS.content(folder, meta).splitlines()]


@dataclass(frozen=True, slots=True)
class StatisticTask:
    """A statistic to be measured on the answers with this digest, of the run in this folder."""

    run: str
    answers_sha256: str
    spec: StatisticSpec


# --- lines --------------------------------------------------------------------------------------------------------


def line(answered: Answered, values: Mapping[str, Any], why: str | None = None) -> str:
    """A question's line. A value that can't be had is null, with the reason in ``why``."""
    reason = {} if why is None else {"why": why}
    named = {"number": answered.number, "id": answered.question.id, **values, **reason}
    return json.dumps(named, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def short(value: float) -> float:
    """The same to float32, which is what models compute in, in as few digits as are needed for that."""
    single = as_float32(value)
    shorter = (float(f"{single:.{digits}g}") for digits in (6, 7, 8))
    return next((each for each in shorter if as_float32(each) == single), single)
