"""A statistic as it is kept: its name, its description, its file, and the task of the jobs that measure it.

``statistics/<statistic>.jsonl`` in the run's folder has a line a question, in the order of the questions. It is written
once, the description (``.json``) last, and checked when it is read. What the jobs are to do stands in ``task.json`` in
the folder of their work. Knows no model.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.qa.described import descriptions, read_description
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.record import Answered
from gpuherd.qa.span import Span, span_in
from gpuherd.runs.files import write_whole
from gpuherd.runs.shards import ShardedDirectory
from gpuherd.runs.spec import digest_of

FORMAT = 1
_REMEDY = "remove it and its .json, and score again"


class BadStatistic(GpuherdError):
    """A statistic's files are damaged, of a newer gpuherd, or not of this run."""

    exit_code = ExitCode.BAD_INPUT


@dataclass(frozen=True, slots=True)
class Spec:
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
class Meta:
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

    spec: Spec
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


def spec_values(spec: Spec) -> dict[str, Any]:
    """The statistic as JSON values."""
    return {
        "kind": spec.kind,
        "model": spec.model,
        "model_sha256": spec.model_sha256,
        "settings": dict(spec.settings),
    }


def spec_of(value: Any) -> Spec:
    """What ``spec_values`` described. Raises BadStatistic."""
    try:
        return Spec(str(value["kind"]), str(value["model"]), str(value["model_sha256"]), dict(value["settings"]))
    except (ValueError, KeyError, TypeError) as problem:
        raise BadStatistic(f"no description of a statistic: {type(problem).__name__}: {problem}") from None


def meta_values(meta: Meta) -> dict[str, Any]:
    """The statistic as JSON values, as they stand in its ``.json``."""
    return {
        "format": FORMAT,
        "name": meta.name,
        **spec_values(meta.spec),
        "answers_sha256": meta.answers_sha256,
        "sha256": meta.sha256,
        "items": meta.items,
        "undefined": dict(meta.undefined),
        "remarks": list(meta.remarks),
        "versions": dict(meta.versions),
        "made": meta.made,
    }


def meta_of(value: Any) -> Meta:
    """What ``meta_values`` described. Raises BadStatistic."""
    if isinstance(value, dict) and isinstance(value.get("format"), int) and value["format"] > FORMAT:
        raise BadStatistic(
            f"written by a newer gpuherd (format {value['format']}, known here: {FORMAT}); update gpuherd"
        )
    try:
        return Meta(
            spec=spec_of(value),
            answers_sha256=str(value["answers_sha256"]),
            sha256=str(value["sha256"]),
            items=int(value["items"]),
            undefined={str(reason): int(number) for reason, number in value["undefined"].items()},
            remarks=tuple(str(each) for each in value["remarks"]),
            versions={str(library): str(version) for library, version in value["versions"].items()},
            made=str(value["made"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise BadStatistic(f"no description of a statistic: {type(problem).__name__}: {problem}") from None


# --- files --------------------------------------------------------------------------------------------------------


def statistics_of(folder: QADirectory, answers_sha256: str) -> list[Meta]:
    """The complete statistics of these answers, the oldest first. One that can't be read is logged and left out."""
    return descriptions(folder.statistics, lambda name: statistic_named(folder, name, answers_sha256), BadStatistic)


def is_there(folder: QADirectory, name: str) -> bool:
    """Whether this statistic was measured."""
    return folder.statistic(name, ".json").is_file()


def statistic_named(folder: QADirectory, name: str, answers_sha256: str) -> Meta:
    """The statistic of this name. Raises BadStatistic."""
    path = folder.statistic(name, ".json")
    meta = read_description(path, meta_of, BadStatistic, _REMEDY)
    if meta.answers_sha256 != answers_sha256:
        raise BadStatistic(f"{path} was measured on other answers; {_REMEDY}")
    return meta


def rows(folder: QADirectory, meta: Meta) -> Iterator[dict[str, Any]]:
    """What was measured of each question, in their order. Raises BadStatistic where it is not as it was written."""
    path = folder.statistic(meta.name)
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise BadStatistic(f"can't read {path}: {problem.strerror}; {_REMEDY}") from None
    if hashlib.sha256(data).hexdigest() != meta.sha256:
        raise BadStatistic(f"{path} has been changed since it was written; {_REMEDY}")
    for number, line in enumerate(data.splitlines()):
        value = json.loads(line)
        if value.get("number") != number:
            raise BadStatistic(f"{path}, line {number + 1}: not what belongs there; {_REMEDY}")
        yield value


@dataclass(frozen=True, slots=True)
class Task:
    """A statistic to be measured on the answers with this digest, of the run in this folder."""

    spec: Spec
    run: str
    answers_sha256: str


def task_path(folder: ShardedDirectory) -> Path:
    """Where it is written."""
    return folder.root / "task.json"


def write_task(folder: ShardedDirectory, task: Task) -> None:
    """Writes it. Raises CannotWrite."""
    values = {"run": task.run, "answers_sha256": task.answers_sha256, **spec_values(task.spec)}
    write_whole(task_path(folder), json.dumps(values, indent=2).encode() + b"\n")


def read_task(folder: ShardedDirectory) -> Task:
    """What was written. Raises BadStatistic."""
    path = task_path(folder)
    try:
        value = json.loads(path.read_bytes())
        return Task(spec_of(value), str(value["run"]), str(value["answers_sha256"]))
    except OSError as problem:
        raise BadStatistic(f"{path} can't be read: {problem.strerror}; gpuherd score writes it") from None
    except (ValueError, KeyError, TypeError) as problem:
        raise BadStatistic(f"{path} is damaged: {problem}; remove {folder.root} and score again") from None


# --- lines --------------------------------------------------------------------------------------------------------


def line(answered: Answered, values: Mapping[str, Any], why: str | None = None) -> str:
    """A question's line. A value that can't be had is null, with the reason in ``why``."""
    reason = {} if why is None else {"why": why}
    named = {"number": answered.number, "id": answered.question.id, **values, **reason}
    return json.dumps(named, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def short(value: float) -> float:
    """The same to float32, which is what models compute in, in as few digits as are needed for that."""
    single: float = struct.unpack("<f", struct.pack("<f", value))[0]
    for digits in (6, 7, 8):
        found = float(f"{single:.{digits}g}")
        if struct.unpack("<f", struct.pack("<f", found))[0] == single:
            return found
    return single
