"""What the jobs of a judging are given and what they give back, as files and lines: token ids in, numbers or texts out.

Everything is decided before a job starts (which form, which words) and after it has ended (which verdict); a job only
measures. So another threshold needs no new job.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.qa.folder import FORMAT
from gpuherd.qa.judging.verdicts import Mode, Verdict
from gpuherd.runs import records
from gpuherd.runs.files import write_lines, write_values
from gpuherd.runs.shards import ShardedDirectory

LONGEST_REPLY = 200_000  # characters that are kept of a written reply


class BadTask(GpuherdError):
    """The files of a judging's jobs are damaged."""

    exit_code = ExitCode.BAD_INPUT


class JudgingWork(ShardedDirectory):
    """The run folder of the jobs of a judging.

    Attributes:
        task: what is the same for all cases.
        cases: the token ids of each form that is filled in, as JSON lines.
    """

    def __init__(self, root: str | Path):
        super().__init__(root)
        self.task = self.root / "task.json"
        self.cases = self.root / "cases.jsonl"


@dataclass(frozen=True, slots=True)
class Task:
    """What the jobs do with each case.

    Attributes:
        mode: weigh the verdict words, or write a reply.
        words: for each verdict the continuations that mean it, as token ids; none in text mode.
        end_ids, stop, reply_tokens: how a reply ends.
    """

    mode: Mode
    words: Mapping[Verdict, tuple[tuple[int, ...], ...]]
    end_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    reply_tokens: int = 1


def write_task(folder: JudgingWork, task: Task, cases: Iterable[Sequence[int]]) -> None:
    """Writes what the jobs are given, the task last. What is there is left: it is the same. Raises CannotWrite."""
    if folder.task.exists():
        return
    values = {"format": FORMAT, **records.plain(task)}
    write_lines(folder.cases, (json.dumps(list(ids), separators=(",", ":")).encode() for ids in cases))
    write_values(folder.task, values)


def read_task(folder: JudgingWork) -> Task:
    """The task. Raises BadTask."""
    try:
        value = json.loads(folder.task.read_bytes())
        if value["format"] > FORMAT:
            raise BadTask(f"{folder.task} is of a newer gpuherd (format {value['format']}); update gpuherd")
        task: Task = records.read(Task, value)
    except OSError as problem:
        raise BadTask(f"{folder.task} can't be read: {problem.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadTask(f"{folder.task} is damaged; remove {folder.root} to begin anew") from None
    return task


def read_cases(folder: JudgingWork) -> list[tuple[int, ...]]:
    """The token ids of each case. Raises BadTask."""
    try:
        with folder.cases.open("rb") as file:
            return [tuple(int(each) for each in json.loads(line)) for line in file]
    except OSError as problem:
        raise BadTask(f"{folder.cases} can't be read: {problem.strerror}") from None
    except (ValueError, TypeError):
        raise BadTask(f"{folder.cases} is damaged; remove {folder.root} to begin anew") from None


def weighed_line(words: Mapping[Verdict, Sequence[tuple[int, ...]]], log_probs: Sequence[float | None]) -> str:
    """A case's line in tokens mode: the log-probs of all words, in the order of ``words``."""
    left = iter(log_probs)
    values = {verdict.value: [next(left) for _ in ways] for verdict, ways in words.items()}
    return json.dumps({"log_probs": values}, allow_nan=False, separators=(",", ":"))


def reply_line(text: str, *, cut: bool) -> str:
    """A case's line in text mode; ``cut``: the reply did not end by itself."""
    return json.dumps({"reply": text[:LONGEST_REPLY], "cut": cut or len(text) > LONGEST_REPLY}, separators=(",", ":"))


def log_probs_of(line: bytes) -> dict[Verdict, list[float | None]]:
    """What ``weighed_line`` wrote. Raises BadTask."""
    return {
        Verdict(name): [None if each is None else float(each) for each in values]
        for name, values in _value(line, "log_probs").items()
    }


def reply_of(line: bytes) -> tuple[str, bool]:
    """What ``reply_line`` wrote. Raises BadTask."""
    return str(_value(line, "reply")), bool(_value(line, "cut"))


def _value(line: bytes, name: str) -> Any:
    try:
        return json.loads(line)[name]
    except (ValueError, KeyError, TypeError):
        raise BadTask(f"a judging's job wrote no {name}; remove the judging's folder in work to begin anew") from None
