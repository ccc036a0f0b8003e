"""The answers as one Parquet table, a row a generation: for those who look at them with pandas, polars or DuckDB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gpuherd.atomic import replacing
from gpuherd.errors import CannotWrite, naming_extras
from gpuherd.qa.record import Answered

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
