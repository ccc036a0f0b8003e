"""Scorings in a run's folder: their description and their files, written once, the description last; read back checked.

``scores/<scoring>.csv`` and ``.parquet`` have a row a question: number, id, a column a measure, empty where it is
undefined. ``scores/<scoring>.json`` says how they were made; a scoring without it is not there. Computes nothing.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpuherd.errors import ExitCode, GpuherdError, naming_extras
from gpuherd.qa.folder import DescribedResults, QADirectory
from gpuherd.qa.measures.registry import ScoreTable
from gpuherd.qa.span import Span, span_in

_KEYS = ("number", "id")
# What a spreadsheet takes for a formula, and our own mark, so that taking it off gives the text back.
_MARK = "'"
_MARKED = ("=", "+", "-", "@", _MARK)


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
    settings: Mapping[str, Any] = field(default_factory=dict)
    questions: int
    measures: tuple[ScoredMeasure, ...]
    answers_sha256: str
    sha256: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    made: str = ""

    @property
    def span(self) -> Span:
        """Which part of the generations was measured; a scoring that names none measured all that was written."""
        return span_in(self.settings)


SCORINGS = DescribedResults(
    noun="scoring",
    description=ScoringMeta,
    path=QADirectory.scoring,
    error=BadScoring,
    remedy="remove it and its .json, and score again",
    flag="--scores",
    command="gpuherd score {run}",
    suffix=".csv",
)

# --- files --------------------------------------------------------------------------------------------------------


def scorings_of(folder: QADirectory) -> list[ScoringMeta]:
    """The complete scorings of a run, the oldest first. One that can't be read is logged and left out."""
    return SCORINGS.all_in(folder)


def scoring_named(folder: QADirectory, name: str | None) -> ScoringMeta:
    """The scoring of this name, or the one whose name begins so; without a name the latest.

    Raises:
        UsageError: there is none, or more than one; it lists them.
        BadScoring: it is damaged, or of a newer gpuherd.
    """
    if name is None and (there := scorings_of(folder)):
        return there[-1]
    return SCORINGS.named(folder, name or "", lambda each: f"{len(each.measures)} measures")


def scores(folder: QADirectory, meta: ScoringMeta) -> ScoreTable:
    """The scores, every number to the bit as it was computed. Raises BadScoring where the file is not as it was
    written."""
    data = SCORINGS.content(folder, meta)
    try:
        names, rows = _cells(data.decode("utf-8"))
        ids = tuple(_unmarked(row[1]) for row in rows)
        columns = {
            name: tuple(float(row[place]) if row[place] else None for row in rows)
            for place, name in enumerate(names, start=len(_KEYS))
        }
    except (ValueError, IndexError, csv.Error) as problem:
        raise BadScoring(f"{folder.scoring(meta.name, '.csv')} is no table of scores: {problem}; score again") from None
    return ScoreTable(ids, columns)


def write_scoring(folder: QADirectory, meta: ScoringMeta, table: ScoreTable) -> ScoringMeta:
    """Writes a scoring, its description last. Returns that with the digest of the CSV file.

    An existing scoring of this name is left as it is and returned. Raises CannotWrite, and MissingExtra where pyarrow
    is missing.
    """
    data = csv_text(table).encode("utf-8")
    complete = replace(meta, sha256=hashlib.sha256(data).hexdigest())
    return SCORINGS.write(folder, complete, {".csv": data, ".parquet": _parquet(table)})


def csv_text(table: ScoreTable) -> str:
    """The table as CSV. Floats by repr, which gives the same number back; ids so that no spreadsheet runs them."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_MINIMAL)
    writer.writerow([*_KEYS, *table.columns])
    for number, each in enumerate(table.ids):
        writer.writerow([number, _marked(each), *(_cell(column[number]) for column in table.columns.values())])
    return out.getvalue()


def _cells(text: str) -> tuple[list[str], list[list[str]]]:
    """The names of the measures, and the cells of each row. An id may be longer than the 128 KiB of ``csv``."""
    before = csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    try:
        lines = csv.reader(io.StringIO(text, newline=""))
        return next(lines, [])[len(_KEYS) :], list(lines)
    finally:
        csv.field_size_limit(before)


def _parquet(table: ScoreTable) -> bytes:
    with naming_extras({"pyarrow": "qa", "pyarrow.parquet": "qa"}, "score tables as Parquet take"):
        import pyarrow
        import pyarrow.parquet
    ids = [each.encode("utf-8", "backslashreplace").decode("utf-8") for each in table.ids]
    columns: dict[str, Sequence[Any]] = {"number": list(range(len(ids))), "id": ids}
    fields = [("number", pyarrow.int64()), ("id", pyarrow.string())]
    for name, column in table.columns.items():
        columns[name] = column
        fields.append((name, pyarrow.float64()))
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns, schema=pyarrow.schema(fields)), out)
    return out.getvalue()


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    if not math.isfinite(value):
        raise ValueError(f"{value} is no score")
    return repr(float(value))


def _marked(text: str) -> str:
    """A text as a cell: one that a spreadsheet would run gets a mark in front; of one that would drive a terminal, all
    that is not printable is written as Python escapes, behind a mark and a backslash."""
    if not text.isprintable():
        return f"{_MARK}\\{text.encode('unicode_escape').decode('ascii')}"
    return f"{_MARK}{text}" if text.startswith(_MARKED) else text


def _unmarked(text: str) -> str:
    if text.startswith(f"{_MARK}\\"):
        return text[2:].encode("ascii").decode("unicode_escape")
    return text.removeprefix(_MARK)
