"""Finishes a run: all answers in one file and as a table, and last of all done.json, from which on nothing changes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpuherd.atomic import replacing
from gpuherd.errors import CannotWrite, naming_extras
from gpuherd.qa.folder import FORMAT, QADirectory
from gpuherd.qa.generation.answers import counted
from gpuherd.qa.generation.prepared import Prepared
from gpuherd.qa.record import Answered, BadRecord, answered_of
from gpuherd.qa.runs import run_of_path
from gpuherd.runs.files import locked, sha256_of, write_values
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import Damaged, gather, shard_records
from gpuherd.runs.spec import now

logger = logging.getLogger(__name__)


def finish(folder: QADirectory, prepared: Prepared, shards: Sequence[Shard]) -> Mapping[str, Any]:
    """Writes answers.jsonl, answers.parquet and done.json, unless another start of the same command has been quicker.
    Returns what the last one holds.

    Raises Damaged where a shard lacks lines or has one that is no answer, CannotWrite.
    """
    # The queue is free again when the jobs are done, so that another start may come as far as this at the same time.
    with locked(folder.plan):
        return run_of_path(folder.root).done if folder.done.exists() else _finish(folder, prepared, shards)


def _finish(folder: QADirectory, prepared: Prepared, shards: Sequence[Shard]) -> Mapping[str, Any]:
    written = gather(folder, shards, folder.answers)
    counts = counted(_answers(folder, shards))
    write_table(folder.answers_table, _answers(folder, shards), guided=prepared.guide is not None)
    made = shard_records(folder, shards)
    done = {
        "format": FORMAT,
        "finished": now(),
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


def _one_of(made: Sequence[Mapping[str, Any]], name: str) -> Any:
    """What all shards say alike; a list of all where they differ, as after an update of torch half-way."""
    values = [each.get(name) for each in made]
    different = [value for place, value in enumerate(values) if value not in values[:place]]
    return different[0] if len(different) == 1 else different


_ROWS = 2000  # held at once


def write_table(target: Path, answers: Iterable[Answered], *, guided: bool) -> None:
    """Writes the table, whole or not at all. ``guided``: whether a classifier guided the answers.

    Columns: number, id, question, answers (texts), context, prompt_sha256, prompt_tokens, prompt_cut, which, text,
    finish, token_ids (int32), log_probs (float32; null where not finite), ends (int32), end_id, end_log_prob;
    of guided answers guided_log_probs, guided_kl (float32; null where not finite), guided_end_log_prob, guided_end_kl.

    Raises CannotWrite, MissingExtra.
    """
    with naming_extras({"pyarrow": "qa"}, "tables of answers take"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    texts, numbers = pa.list_(pa.string()), pa.list_(pa.float32())
    schema = pa.schema(
        [
            ("number", pa.int32()),
            ("id", pa.string()),
            ("question", pa.string()),
            ("answers", texts),
            ("context", pa.string()),
            ("prompt_sha256", pa.string()),
            ("prompt_tokens", pa.int32()),
            ("prompt_cut", pa.int32()),
            ("which", pa.string()),
            ("text", pa.string()),
            ("finish", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("log_probs", numbers),
            ("ends", pa.list_(pa.int32())),
            ("end_id", pa.int32()),
            ("end_log_prob", pa.float32()),
            *(
                [
                    ("guided_log_probs", numbers),
                    ("guided_kl", numbers),
                    ("guided_end_log_prob", pa.float32()),
                    ("guided_end_kl", pa.float32()),
                ]
                if guided
                else []
            ),
        ]
    )
    try:
        with replacing(target) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for rows in _chunks(_rows(answers)):
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    except OSError as problem:
        raise CannotWrite(f"can't write {target}: {problem.strerror or problem}") from None


def _rows(answers: Iterable[Answered]) -> Iterator[dict[str, Any]]:
    for answered in answers:
        question, prompt = answered.question, answered.prompt
        for which, each in answered.which.items():
            yield {
                "number": answered.number,
                "id": _whole(question.id),
                "question": _whole(question.question),
                "answers": [_whole(text) for text in question.answers],
                "context": None if question.context is None else _whole(question.context),
                "prompt_sha256": prompt.sha256,
                "prompt_tokens": prompt.tokens,
                "prompt_cut": prompt.cut,
                "which": which,
                "text": _whole(each.text),
                "finish": each.finish.value,
                "token_ids": each.token_ids,
                "log_probs": each.log_probs,
                "ends": each.ends,
                "end_id": each.end_id,
                "end_log_prob": each.end_log_prob,
                **(
                    {}
                    if each.guided is None
                    else {
                        "guided_log_probs": each.guided.log_probs,
                        "guided_kl": each.guided.kl,
                        "guided_end_log_prob": each.guided.end_log_prob,
                        "guided_end_kl": each.guided.end_kl,
                    }
                ),
            }


def _whole(text: str) -> str:
    """A text that UTF-8 can hold: half a surrogate pair is none."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _chunks(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == _ROWS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
