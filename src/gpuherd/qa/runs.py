"""Finds and opens runs of answers: their options, their results, and every answer, checked against its digest.

A run is complete when it has a done.json; from then on nothing in it changes, and judgings, scores and evaluations are
added next to it. A run that is unfinished, damaged or of a newer gpuherd is reported as such, never misread.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.options import nearest
from gpuherd.qa.folder import FORMAT, KIND, QADirectory
from gpuherd.qa.record import Answered, BadRecord, Question, answered_of
from gpuherd.runs import records
from gpuherd.runs.files import sha256_of

_CHUNK = 1 << 20
_MOST_NAMED = 3


class NoSuchRun(GpuherdError):
    """No run has this name."""

    exit_code = ExitCode.MISSING


class UnfinishedRun(GpuherdError):
    """The run does not have all its answers yet."""

    exit_code = ExitCode.BAD_INPUT


class NewerRun(GpuherdError):
    """The run was written by a newer gpuherd, whose files this one might misread."""

    exit_code = ExitCode.BAD_INPUT


class DamagedRun(GpuherdError):
    """A file of the run has changed since it was written."""

    exit_code = ExitCode.BAD_INPUT


@dataclass(frozen=True)
class Run:
    """A complete run.

    Attributes:
        folder: its paths.
        record: the content of run.json: options, data, model.
        done: the content of done.json: digests, counts, versions.
    """

    folder: QADirectory
    record: Mapping[str, Any]
    done: Mapping[str, Any]

    @property
    def run_id(self) -> str:
        """Its name."""
        return self.folder.root.name

    @property
    def config(self) -> Mapping[str, Any]:
        """The options of its first start."""
        found: Mapping[str, Any] = self.record["config"]
        return found

    @property
    def answers_sha256(self) -> str:
        """The digest of its answers, which every judging, scoring and evaluation of them records."""
        return str(self.done["answers_sha256"])

    @property
    def questions(self) -> int:
        """The number of questions."""
        return int(self.done["questions"])

    def check(self, digest: Callable[[Path], str] | None = None) -> None:
        """Compares each finished file with its digest. Raises DamagedRun.

        Args:
            digest: gives a file's SHA-256 in hex, and raises DamagedRun; by default each file is read.
        """
        digest = digest or _sha256
        if digest(self.folder.answers) != self.answers_sha256:
            raise _changed(self)
        for path, name in (
            (self.folder.answers_table, "table_sha256"),
            (self.folder.questions, "questions_sha256"),
            (self.folder.prompts, "prompts_sha256"),
        ):
            if name in self.done and digest(path) != self.done[name]:
                raise DamagedRun(
                    f"{path} is damaged: it was changed after it had been finished; bring back the file as it was, or "
                    "generate the run anew"
                )

    def answers(self) -> Iterator[Answered]:
        """All answers, in order. Raises DamagedRun, before the first one if the file has changed."""
        path = self.folder.answers
        try:
            with path.open("rb") as file:
                digest = hashlib.sha256()
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                if digest.hexdigest() != self.answers_sha256:
                    raise _changed(self)
                file.seek(0)
                yield from _parsed(file, path)
        except OSError as problem:
            raise DamagedRun(f"{path} can't be read: {problem.strerror}") from None


def open_run(run_id: str, runs_dir: str | Path) -> Run:
    """The complete run of this name: a folder in ``runs_dir``, or the path of one.

    Raises:
        NoSuchRun: the message has the nearest names.
        UnfinishedRun: with the command that continues it.
        NewerRun, DamagedRun.
    """
    return run_of_path(folder_of(run_id, runs_dir))


def folder_of(run_id: str, runs_dir: str | Path) -> Path:
    """The folder of the run of this name. Raises NoSuchRun."""
    try:
        if run_id not in ("", ".", "..") and "/" not in run_id and "\0" not in run_id:
            inside = Path(runs_dir) / run_id
            if inside.is_dir():
                return inside
        if "\0" not in run_id and ("/" in run_id or Path(run_id, "run.json").is_file()) and Path(run_id).is_dir():
            return Path(run_id)
    except OSError:
        pass  # not a possible file name, or no permission
    names = [path.name for path in _folders(Path(runs_dir))]
    near = [name for name in names if name.startswith(run_id)] if run_id else []
    near += [name for name in nearest(run_id, names, _MOST_NAMED, 0.4) if name not in near]
    if near:
        hint = f"did you mean {' or '.join(near[:_MOST_NAMED])}?"
    else:
        hint = "gpuherd runs lists all" if names else "no run is there; gpuherd generate makes one"
    raise NoSuchRun(f"there is no run {run_id!r} in {runs_dir}; {hint}")


def run_of_path(path: str | Path) -> Run:
    """The complete run in this folder. Raises as ``open_run``."""
    folder = QADirectory(path)
    record = record_of(folder)
    if not folder.done.exists():
        name, place = folder.root.name, folder.root.parent
        remedy = f"{shlex.join(['gpuherd', 'generate', '--resume', name, '--runs-dir', str(place)])} goes on with it"
        raise UnfinishedRun(f"run {name} does not have all its answers yet; {remedy}")
    done = _values(folder.done)
    _refuse_newer(folder, done)
    for name, kind in (("answers_sha256", str), ("questions", int), ("answers_bytes", int)):
        if not isinstance(done.get(name), kind):
            raise DamagedRun(f"{folder.done} says nothing of {name}; generate the run anew")
    run = Run(folder, record, done)
    try:
        size = folder.answers.stat().st_size
    except OSError as problem:
        raise DamagedRun(f"{folder.answers} can't be read: {problem.strerror}; generate the run anew") from None
    if size != done["answers_bytes"]:
        raise _changed(run)
    return run


def _sha256(path: Path) -> str:
    """A file's digest, in hex. Raises DamagedRun if it can't be read."""
    try:
        return sha256_of(path)
    except OSError as problem:
        raise DamagedRun(f"{path} can't be read: {problem.strerror}; generate the run anew") from None


def _parsed(lines: Iterator[bytes], path: Path) -> Iterator[Answered]:
    for number, line in enumerate(lines):
        try:
            answered = answered_of(line)
        except BadRecord as problem:
            raise DamagedRun(f"{path}, line {number + 1}: {problem}") from None
        if answered.number != number:
            raise DamagedRun(f"{path}, line {number + 1} is the answer to question {answered.number}, from 0")
        yield answered


def _changed(run: Run) -> DamagedRun:
    """The error of answers that have changed, with the first line that is damaged, if there is one."""
    path = run.folder.answers
    reason = "it was changed after it had been finished"
    try:
        with path.open("rb") as file:
            lines = sum(1 for _ in _parsed(file, path))
        if lines != run.questions:
            reason = f"it has {lines} answers and should have {run.questions}"
    except DamagedRun as problem:
        reason = str(problem).removeprefix(f"{path}, ")
    return DamagedRun(f"{path} is damaged: {reason}; bring back the file as it was, or generate the run anew")


def record_of(folder: QADirectory) -> Mapping[str, Any]:
    """The content of a run's run.json, finished or not. Raises NoSuchRun, NewerRun, DamagedRun."""
    if not folder.root.is_dir() or not folder.run_json.exists():
        raise NoSuchRun(f"{folder.root} is no run of answers: it has no run.json")
    record = _values(folder.run_json)
    if record.get("kind") != KIND:
        raise NoSuchRun(f"{folder.root} is no run of answers, but of another command")
    _refuse_newer(folder, record)
    if not isinstance(record.get("config"), dict) or not isinstance(record.get("identity"), dict):
        raise DamagedRun(f"{folder.run_json} doesn't say what was asked")
    return record


def questions_in(folder: QADirectory) -> Iterator[Question]:
    """The questions of a run, in order. Raises DamagedRun."""
    try:
        with folder.questions.open("rb") as file:
            for line in file:
                yield records.read(Question, json.loads(line))
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise DamagedRun(f"{folder.questions} can't be read: {problem}") from None


def _refuse_newer(folder: QADirectory, values: Mapping[str, Any]) -> None:
    written = values.get("format")
    if not isinstance(written, int):
        raise DamagedRun(f"{folder.root}: its files don't say in which format they are")
    if written > FORMAT:
        name = folder.root.name
        raise NewerRun(f"run {name} is in format {written}, of a newer gpuherd; this one reads up to {FORMAT}: update")


def _values(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as problem:
        raise DamagedRun(f"{path} can't be read: {problem.strerror}") from None
    except (ValueError, RecursionError):
        raise DamagedRun(f"{path} is no JSON any more") from None
    if not isinstance(values, dict):
        raise DamagedRun(f"{path} is not what gpuherd writes there")
    return values


# ---- lists of runs ---------------------------------------------------------------------------------------------------


class RunState(StrEnum):
    """The state of a run."""

    COMPLETE = "complete"
    UNFINISHED = "unfinished"
    NEWER = "newer"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run in a list.

    Attributes:
        run_id: its name.
        state: ``problem`` says more unless it is complete or unfinished.
        model, dataset: their names; None if they can't be read.
        questions: their number; None before it is known.
        answered: the number of questions that have all their answers.
        samples: sampled answers to each question; None if that can't be read.
        started: when, in ISO format, UTC.
        judgings, scorings: names of the finished ones.
    """

    run_id: str
    state: RunState
    model: str | None
    dataset: str | None
    questions: int | None
    answered: int | None
    samples: int | None
    started: str | None
    judgings: tuple[str, ...]
    scorings: tuple[str, ...]
    problem: str | None = None


def list_runs(runs_dir: str | Path, digest: Callable[[Path], str] | None = None) -> list[RunLine]:
    """All runs of answers in a folder, the latest first; those of other commands are left out. The files of complete
    ones are compared with their digests (``digest`` as for ``Run.check``). Raises NoSuchRun where there is no such
    folder."""
    root = Path(runs_dir)
    if not root.is_dir():
        raise NoSuchRun(f"there is no folder {root}; --runs-dir names the one that has the runs")
    lines = [line for path in _folders(root) if (line := _line(QADirectory(path), digest)) is not None]
    return sorted(lines, key=lambda line: (line.started or "", line.run_id), reverse=True)


def _folders(root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if (path / "run.json").is_file())
    except OSError:
        return []


def _line(folder: QADirectory, digest: Callable[[Path], str] | None) -> RunLine | None:
    state, problem, record = RunState.COMPLETE, None, {}
    try:
        record = dict(record_of(folder))
        run_of_path(folder.root).check(digest)
    except NoSuchRun:
        return None
    except UnfinishedRun:
        state = RunState.UNFINISHED
    except (NewerRun, DamagedRun) as trouble:
        state, problem = RunState.NEWER if isinstance(trouble, NewerRun) else RunState.DAMAGED, str(trouble)
    config = record.get("config", {})
    questions, answered = _counts(folder, record, state)
    return RunLine(
        run_id=folder.root.name,
        state=state,
        model=_text(config.get("model")),
        dataset=_text(config.get("dataset")),
        questions=questions,
        answered=answered,
        samples=config.get("samples") if isinstance(config.get("samples"), int) else None,
        started=_text(record.get("started")),
        judgings=finished(folder.judgments),
        scorings=finished(folder.scores),
        problem=problem,
    )


def finished(place: Path) -> tuple[str, ...]:
    """The names of the finished results in a folder of a run: their ``<name>.json``, written last, exists."""
    return tuple(sorted(path.stem for path in place.glob("*.json") if not path.name.startswith(".")))


def _counts(folder: QADirectory, record: Mapping[str, Any], state: RunState) -> tuple[int | None, int | None]:
    recorded = record.get("questions")
    questions = recorded if isinstance(recorded, int) else None
    if state is RunState.COMPLETE:
        return questions, questions
    if state is not RunState.UNFINISHED:
        return questions, None
    try:
        return questions, sum(_line_breaks(path) for path in folder.shards.glob("[0-9]*.jsonl"))
    except OSError:
        return questions, None


def _line_breaks(path: Path) -> int:
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
