"""Finishes a run: all answers in one file, the same as a table, and at last done.json, after which nothing changes."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
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
        "counts": {**counts, "refused": len(prepared.refused), "prompts_cut": prepared.cut},
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


def count_answers(answers: Iterable[Answered]) -> dict[str, Any]:
    """Counts of a run's answers, as done.json has them.

    ``tokens``: of all answers, with end tokens. ``finish``: answers by why they ended. ``empty``: without any text.
    ``only_thought``: their thought was never closed. Of guided ones ``kl_per_answer``: the mean KL divergence of an
    answer from the model, summed over its tokens, in nats, of the answers whose divergence is finite (None if there is
    none); ``kl_not_finite``: how many have another.
    """
    finish = dict.fromkeys(map(str, Finish), 0)
    counts: Counter[str] = Counter()
    divergences: list[float | None] = []
    for each in (each for answered in answers for each in answered.which.values()):
        finish[each.finish] += 1
        counts["answers"] += 1
        counts["tokens"] += len(each.token_ids) + (each.end_id is not None)
        counts["empty"] += not each.text.strip()
        without_end = each.end_id is not None and each.end_log_prob is None
        counts["log_probs_not_finite"] += each.log_probs.count(None) + without_end
        counts["only_thought"] += is_only_thought(each)
        if each.guided is not None:
            divergences.append(_divergence(each, each.guided))
    known = [kl for kl in divergences if kl is not None]
    mean = math.fsum(known) / len(known) if known else None
    guided = {"kl_per_answer": mean, "kl_not_finite": len(divergences) - len(known)} if divergences else {}
    names = ("answers", "tokens", "finish", "empty", "log_probs_not_finite", "only_thought")
    return guided | {name: finish if name == "finish" else counts[name] for name in names}


def _divergence(answer: Generation, guided: GuidedTokens) -> float | None:
    """The divergence of a guided answer, summed over its tokens and its end token; None if one is not finite."""
    found = [*guided.kl, *([] if answer.end_id is None else [guided.end_kl])]
    known = [kl for kl in found if kl is not None]
    return math.fsum(known) if len(known) == len(found) else None


_ROWS_AT_ONCE = 2000


def write_table(target: Path, answers: Iterable[Answered], *, guided: bool) -> None:
    """Writes the table, a row an answer, atomically. ``guided``: whether a classifier guided the answers.

    Raises CannotWrite, MissingExtra.
    """
    with naming_extras({"pyarrow": "qa"}, "tables of answers take"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    columns = _columns(guided=guided)
    schema = pa.schema([(name, kind) for name, (kind, _) in columns.items()])
    rows = (
        {name: cell(answered, which, each) for name, (_, cell) in columns.items()}
        for answered in answers
        for which, each in answered.which.items()
    )
    try:
        with replacing(target) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            while some := list(islice(rows, _ROWS_AT_ONCE)):
                writer.write_table(pa.Table.from_pylist(some, schema=schema))
    except OSError as problem:
        raise CannotWrite(f"can't write {target}: {problem.strerror or problem}") from None


def _columns(*, guided: bool) -> dict[str, tuple[Any, Callable[[Answered, str, Generation], Any]]]:
    """Of each column its type, and its value for an answer by its name. Log-probs and divergences are null where they
    are not finite."""
    import pyarrow as pa

    number, figure, text = pa.int32(), pa.float32(), pa.string()
    numbers, figures, texts = (pa.list_(kind) for kind in (number, figure, text))
    columns: dict[str, tuple[Any, Callable[[Answered, str, Generation], Any]]] = {
        "number": (number, lambda row, _, __: row.number),
        "id": (text, lambda row, _, __: _valid_utf8(row.question.id)),
        "question": (text, lambda row, _, __: _valid_utf8(row.question.question)),
        "answers": (texts, lambda row, _, __: [*map(_valid_utf8, row.question.answers)]),
        "context": (text, lambda row, _, __: row.question.context and _valid_utf8(row.question.context)),
        "prompt_sha256": (text, lambda row, _, __: row.prompt.sha256),
        "prompt_tokens": (number, lambda row, _, __: row.prompt.tokens),
        "prompt_cut": (number, lambda row, _, __: row.prompt.cut),
        "which": (text, lambda _, which, __: which),
        "text": (text, lambda _, __, each: _valid_utf8(each.text)),
        "finish": (text, lambda _, __, each: each.finish.value),
        "token_ids": (numbers, lambda _, __, each: each.token_ids),
        "log_probs": (figures, lambda _, __, each: each.log_probs),
        "ends": (numbers, lambda _, __, each: each.ends),
        "end_id": (number, lambda _, __, each: each.end_id),
        "end_log_prob": (figure, lambda _, __, each: each.end_log_prob),
    }
    if guided:
        columns |= {
            "guided_log_probs": (figures, lambda _, __, each: each.guided and each.guided.log_probs),
            "guided_kl": (figures, lambda _, __, each: each.guided and each.guided.kl),
            "guided_end_log_prob": (figure, lambda _, __, each: each.guided and each.guided.end_log_prob),
            "guided_end_kl": (figure, lambda _, __, each: each.guided and each.guided.end_kl),
        }
    return columns


def _valid_utf8(text: str) -> str:
    """The text with lone surrogates, which UTF-8 can't hold, replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")
