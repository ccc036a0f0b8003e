"""Finishes a run: all answers in one file, the table, and last of all done.json, from which on nothing changes."""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from gpuherd.qa.folder import FORMAT, QADirectory
from gpuherd.qa.generation.answers import counted
from gpuherd.qa.generation.parquet import write_table
from gpuherd.qa.generation.prepared import Prepared
from gpuherd.qa.record import Answered
from gpuherd.qa.record_json import BadRecord, answered_of
from gpuherd.qa.runs import run_of_path
from gpuherd.qa.working.gathering import Damaged, gather, sha256_of, write_values
from gpuherd.qa.working.sharding import Shard

logger = logging.getLogger(__name__)


def finish(folder: QADirectory, prepared: Prepared, shards: Sequence[Shard]) -> Mapping[str, Any]:
    """Writes answers.jsonl, answers.parquet and done.json, unless another start of the same command has been quicker.
    Returns what the last one holds.

    Raises Damaged where a shard lacks lines or has one that is no answer, CannotWrite.
    """
    with _alone(folder):
        return run_of_path(folder.root).done if folder.done.exists() else _finish(folder, prepared, shards)


@contextmanager
def _alone(folder: QADirectory) -> Iterator[None]:
    """Waits until no other start of the same command finishes the run."""
    # The queue is free again when the jobs are done, so that another start may come as far as this at the same time.
    with folder.plan.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _finish(folder: QADirectory, prepared: Prepared, shards: Sequence[Shard]) -> Mapping[str, Any]:
    written = gather(folder, shards, folder.answers)
    counts = counted(_answers(folder, shards))
    write_table(folder.answers_table, _answers(folder, shards), guided=prepared.guide is not None)
    made = [_shard_record(folder, number) for number, shard in enumerate(shards) if shard.items]
    done = {
        "format": FORMAT,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "questions": written.lines,
        "answers_sha256": written.sha256,
        "answers_bytes": folder.answers.stat().st_size,
        "table_sha256": sha256_of(folder.answers_table),
        "questions_sha256": prepared.record["questions_sha256"],
        "prompts_sha256": prepared.record["prompts_sha256"],
        "counts": {**counts.to_dict(), "refused": len(prepared.refused), "prompts_cut": prepared.cut},
        "engine": _one_of(made, "engine"),
        "dtype": _one_of(made, "dtype"),
        "batch_size": _one_of(made, "batch_size"),
        "versions": {**prepared.record["versions"], **(_one_of(made, "versions") or {})},
        "shards": made,
    }
    write_values(folder.done, done)
    clear_shards(folder, len(shards))
    return done


def clear_shards(folder: QADirectory, shards: int) -> None:
    """Removes the shards' lines of a run that is done: all of them stand in its answers."""
    for number in range(shards):
        with suppress(OSError):
            folder.shard(number).unlink(missing_ok=True)


def _answers(folder: QADirectory, shards: Sequence[Shard]) -> Iterator[Answered]:
    with folder.answers.open("rb") as file:
        for number, line in enumerate(file):
            try:
                answered = answered_of(line)
            except BadRecord as problem:
                raise _damaged(folder, shards, number, f"is damaged: {problem}") from None
            if answered.number != number:
                raise _damaged(folder, shards, number, f"has the number {answered.number}")
            yield answered


def _damaged(folder: QADirectory, shards: Sequence[Shard], item: int, told: str) -> Damaged:
    """The error of an answer that is none, with what to remove: the shard that has it, and no other."""
    number = next(number for number, shard in enumerate(shards) if item in shard.items)
    remedy = f"remove {folder.shard(number)} and {folder.shard_done(number)} and start the same command again"
    return Damaged(f"the answer to question {item}, from 0, {told}; {remedy}")


def _shard_record(folder: QADirectory, number: int) -> dict[str, Any]:
    try:
        found = json.loads(folder.shard_done(number).read_bytes())
        return {"shard": number, **found}
    except (OSError, ValueError, TypeError) as problem:
        raise Damaged(f"{folder.shard_done(number)} can't be read: {problem}; remove it and start again") from None


def _one_of(made: Sequence[Mapping[str, Any]], name: str) -> Any:
    """What all shards say alike; a list of all where they differ, as after an update of torch half-way."""
    values = [each.get(name) for each in made]
    different = [value for place, value in enumerate(values) if value not in values[:place]]
    return different[0] if len(different) == 1 else different
