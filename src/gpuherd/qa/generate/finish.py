"""Finishes a run: all answers in one file, the same as a table, and at last done.json, after which nothing changes."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.atomic import replacing
from gpuherd.errors import CannotWrite, naming_extras
from gpuherd.lm.backend import Finish, Generation, GuidedTokens
from gpuherd.qa.folder import FORMAT, QADirectory
from gpuherd.qa.generate.prepared import PreparedRun
from gpuherd.qa.record import Answered, BadRecord, answered_of
from gpuherd.qa.runs import run_of_path
from gpuherd.qa.span import is_only_thought
from gpuherd.runs.files import locked, sha256_of, write_values
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import Damaged, gather, shard_records
from gpuherd.runs.spec import now

logger = logging.getLogger(__name__)


def finish(folder: QADirectory, prepared: PreparedRun, shards: Sequence[Shard]) -> Mapping[str, Any]:
    """Writes answers.jsonl, answers.parquet and done.json, unless another start of the same command was faster.
    Returns the content of done.json.

    Raises Damaged if a shard lacks lines or has one that is no answer, CannotWrite.
    """
    # The queue is unlocked when the jobs are done, so that another start can reach this point at the same time.
    with locked(folder.plan):
        return run_of_path(folder.root).done if folder.done.exists() else _finish(folder, prepared, shards)


def _finish(folder: QADirectory, prepared: PreparedRun, shards: Sequence[Shard]) -> Mapping[str, Any]:
    written = gather(folder, shards, folder.answers)
    counts = count_answers(_answers(folder, shards))
    write_table(folder.answers_table, _answers(folder, shards), guided=prepared.guide is not None)
    records = shard_records(folder, shards)
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
        "engine": _one_of(records, "engine"),
        "dtype": _one_of(records, "dtype"),
        "batch_size": _one_of(records, "batch_size"),
        "versions": {**prepared.record["versions"], **(_one_of(records, "versions") or {})},
        "shards": records,
    }
    write_values(folder.done, done)
    clear_shards(folder, len(shards))
    return done


def clear_shards(folder: QADirectory, shards: int) -> None:
    """Removes the shards' lines of a complete run: its answers have them all."""
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


def _damaged(folder: QADirectory, shards: Sequence[Shard], item: int, problem: str) -> Damaged:
    """The error of a line that is no answer, with the remedy: to remove the shard that has it."""
    number = next(number for number, shard in enumerate(shards) if item in shard.items)
    remedy = f"remove {folder.shard(number)} and {folder.shard_done(number)} and start the same command again"
    return Damaged(f"the answer to question {item}, from 0, {problem}; {remedy}")


def _one_of(records: Sequence[Mapping[str, Any]], name: str) -> Any:
    """The value that all shards have; a list where they differ, as after an update of torch during the run."""
    values = [each.get(name) for each in records]
    different = [value for place, value in enumerate(values) if value not in values[:place]]
    return different[0] if len(different) == 1 else different


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """Counts of a run's answers.

    Attributes:
        tokens: of all answers, with end tokens.
        finish: answers by why they ended.
        empty: answers without any text.
        not_finite: log-probs that were not finite.
        only_thought: answers whose thought was never closed.
        guided: answers that a classifier guided.
        kl: the mean KL divergence of an answer from the model, summed over its tokens, in nats; of the answers whose
            divergence is finite, None if there is none.
        kl_not_finite: how many have another divergence.
    """

    questions: int
    answers: int
    tokens: int
    finish: dict[str, int]
    empty: int
    not_finite: int
    guided: int = 0
    kl: float | None = None
    kl_not_finite: int = 0
    only_thought: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return ({"kl_per_answer": self.kl, "kl_not_finite": self.kl_not_finite} if self.guided else {}) | {
            "answers": self.answers,
            "tokens": self.tokens,
            "finish": self.finish,
            "empty": self.empty,
            "log_probs_not_finite": self.not_finite,
            "only_thought": self.only_thought,
        }


def count_answers(answers: Iterable[Answered]) -> AnswerCounts:
    """The counts of these answers."""
    questions = total = tokens = empty = not_finite = only_thought = 0
    finish: Counter[str] = Counter()
    divergences: list[float | None] = []
    for answered in answers:
        questions += 1
        for each in answered.which.values():
            total += 1
            tokens += len(each.token_ids) + (each.end_id is not None)
            finish[each.finish.value] += 1
            empty += not each.text.strip()
            only_thought += is_only_thought(each)
            ended = each.end_id is not None and each.end_log_prob is None
            not_finite += sum(value is None for value in each.log_probs) + ended
            if each.guided is not None:
                divergences.append(_divergence(each, each.guided))
    known = [kl for kl in divergences if kl is not None]
    return AnswerCounts(
        questions,
        total,
        tokens,
        {kind.value: finish[kind.value] for kind in Finish},
        empty,
        not_finite,
        guided=len(divergences),
        kl=math.fsum(known) / len(known) if known else None,
        kl_not_finite=len(divergences) - len(known),
        only_thought=only_thought,
    )


def _divergence(answer: Generation, guided: GuidedTokens) -> float | None:
    """The divergence of a guided answer, summed over its tokens and its end token; None if one is not finite."""
    found = [*guided.kl, *([] if answer.end_id is None else [guided.end_kl])]
    known = [kl for kl in found if kl is not None]
    return math.fsum(known) if len(known) == len(found) else None


_ROWS_AT_ONCE = 2000


def write_table(target: Path, answers: Iterable[Answered], *, guided: bool) -> None:
    """Writes the table, atomically. ``guided``: whether a classifier guided the answers.

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
                "id": _valid_utf8(question.id),
                "question": _valid_utf8(question.question),
                "answers": [_valid_utf8(text) for text in question.answers],
                "context": None if question.context is None else _valid_utf8(question.context),
                "prompt_sha256": prompt.sha256,
                "prompt_tokens": prompt.tokens,
                "prompt_cut": prompt.cut,
                "which": which,
                "text": _valid_utf8(each.text),
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


def _valid_utf8(text: str) -> str:
    """The text with lone surrogates, which UTF-8 can't hold, replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _chunks(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == _ROWS_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
