"""Reads the list of models to analyse: a CSV file in either of the guides' two forms.

Knows what a good row looks like. A bad row becomes one sentence and the rest is read on; only a list that can't be read
at all is an error. Does not look at any model. Light: the worker reads it before numpy may be imported.
"""

from __future__ import annotations

import csv
import io
import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.errors import BadModel, BadModelList
from gpuherd.models.names import parse_model

if TYPE_CHECKING:
    from _csv import Reader as CsvReader

ID_COLUMNS = ("model_id", "full_name")
RELATION_COLUMN = "base_model_relation"
BASE_COLUMN = "source_model"


class Relation(StrEnum):
    """What a model is to its ``source_model``. Only for an adapter does it matter to the analysis."""

    BASE = "base"
    FINETUNE = "finetune"
    MERGE = "merge"
    QUANTIZED = "quantized"
    ADAPTER = "adapter"
    UNKNOWN = "unknown"


# Every word that the public model lists use, and the spellings of the same by hand. "source" is a base model,
# "unknown…" says that the list's author could not find out: such a model is analysed like any other.
RELATION_WORDS: Mapping[str, Relation] = {relation.value: relation for relation in Relation} | {
    "": Relation.BASE,
    "source": Relation.BASE,
    "finetuned": Relation.FINETUNE,
    "fine-tune": Relation.FINETUNE,
    "fine-tuned": Relation.FINETUNE,
    "merged": Relation.MERGE,
    "quantised": Relation.QUANTIZED,
    "lora": Relation.ADAPTER,
    "qlora": Relation.ADAPTER,
    "dora": Relation.ADAPTER,
    "peft": Relation.ADAPTER,
    "unknown-annotated": Relation.UNKNOWN,
    "unknown-readme-extracted": Relation.UNKNOWN,
}


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A row of the list.

    Attributes:
        line: line of the file where the row starts; the header is line 1. None for a model given without a list.
        model_id: Hugging Face id or path, as written.
        source_model: the model that it comes from, None if the cell is empty.
        relation: the relation as written in the list.
        extra: the cells of all other columns, by column name, in the order of the list.
    """

    line: int | None
    model_id: str
    source_model: str | None = None
    relation: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> Relation:
        """What the word for the relation means; UNKNOWN where that is not known either."""
        return relation_of(self.relation) or Relation.UNKNOWN


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row of the list (None: the single model) that is not analysed, its id as far as there is one, and why in one
    sentence."""

    line: int | None
    model_id: str
    reason: str

    def where(self, model_list: str | None) -> str:
        """What people need to find it: file and row, or the model."""
        return self.model_id if self.line is None else f"{model_list}: row {self.line}"


@dataclass(frozen=True, slots=True)
class ModelList:
    """What a list holds: good rows, and bad ones."""

    rows: tuple[ModelRow, ...]
    problems: tuple[RefusedRow, ...]


def quoted_cell(text: str, width: int = 60) -> str:
    """Text from a file, safe to print on one line of a terminal: quoted, escaped, and cut."""
    whole = ascii(text)
    return whole if len(whole) <= width else f"{whole[: width - 12]}…{whole[-1]} ({len(text)} characters)"


def relation_of(word: str) -> Relation | None:
    """What a relation word means, None if it is not known."""
    return RELATION_WORDS.get("-".join(word.lower().replace("_", " ").replace("-", " ").split()))


def read_model_list(path: str | os.PathLike[str], *, limit: int | None = None) -> ModelList:
    """The list in ``path``, at most its first ``limit`` rows.

    Raises:
        BadModelList: the file is missing, not a CSV file in UTF-8, has no row, or lacks a needed column.
    """
    name = os.fspath(path)
    reader = csv.reader(io.StringIO(_content(name), newline=""), strict=True)
    try:
        header = [cell.strip() for cell in next(reader, [])]
        model = _model_column(name, header)
        records = list(_records(reader))[:limit]
    except csv.Error as problem:
        raise BadModelList(f"{name}: not a CSV file at line {reader.line_num}: {problem}") from None
    if not records:
        raise BadModelList(f"{name}: the list has a header but no models")
    rows: list[ModelRow] = []
    problems: list[RefusedRow] = []
    first_line: dict[str, int] = {}
    for line, cells in records:
        read = _read_row(line, cells, header, model, first_line)
        if isinstance(read, ModelRow):
            rows.append(read)
        else:
            problems.append(read)
    return ModelList(tuple(rows), tuple(problems))


def _model_column(file: str, header: Sequence[str]) -> str:
    """The column that names the models. Raises BadModelList for a header that can't be used."""
    if not any(header):
        raise BadModelList(f"{file}: the list is empty; its first line must name the columns")
    found = f"found: {', '.join(quoted_cell(name, 40) for name in header[:12])}"
    ids = [name for name in ID_COLUMNS if name in header]
    missing = [name for name in (RELATION_COLUMN, BASE_COLUMN) if name not in header]
    if not ids:
        missing.insert(0, " or ".join(ID_COLUMNS))
    if missing:
        hint = "; columns must be separated by commas" if len(header) == 1 else ""
        raise BadModelList(f"{file}: missing column {', '.join(missing)} ({found}){hint}")
    if len(ids) > 1:
        raise BadModelList(f"{file}: has both columns {' and '.join(ids)}; keep the one that names the models")
    twice = [name for name in header if name and header.count(name) > 1]
    if twice:
        raise BadModelList(f"{file}: two columns are called {quoted_cell(twice[0])}")
    return ids[0]


def _content(name: str) -> str:
    """The text of the file, without a byte order mark."""
    path = Path(name)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise BadModelList(f"{name}: there is no such model list") from None
    except OSError as problem:
        raise BadModelList(f"{name}: the model list can't be read: {problem.strerror}") from None
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise BadModelList(f"{name}: is in UTF-16; save the list as CSV in UTF-8")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = raw.count(b"\n", 0, problem.start) + 1
        raise BadModelList(f"{name}: line {line} is not in UTF-8; save the list as CSV in UTF-8") from None
    if not text.strip():
        raise BadModelList(f"{name}: the list is empty")
    return text


def _records(reader: CsvReader) -> list[tuple[int, list[str]]]:
    """The rows that are not blank, each with the line at which it starts."""
    records = []
    start = reader.line_num + 1
    for cells in reader:
        if any(cell.strip() for cell in cells):
            records.append((start, cells))
        start = reader.line_num + 1
    return records


def _read_row(
    line: int, cells: Sequence[str], header: Sequence[str], model: str, first_line: dict[str, int]
) -> ModelRow | RefusedRow:
    """One row, checked; ``first_line`` says where an id was seen first and is added to."""
    width = len(header)
    if len(cells) < width or any(cells[width:]):
        return RefusedRow(line, cells[0], f"has {len(cells)} cells where the header has {width}")
    cell = dict(zip(header, cells[:width], strict=True))
    model_id = cell[model].strip(" \t")
    base = cell[BASE_COLUMN].strip(" \t")
    word = cell[RELATION_COLUMN].strip(" \t")
    kind = relation_of(word)
    problem = _id_problem(model_id) or _base_problem(base, kind)
    if problem:
        return RefusedRow(line, model_id, problem)
    if kind is None:
        words = "base, finetune, merge, quantized, adapter, lora, qlora, peft, unknown, or nothing"
        return RefusedRow(line, model_id, f"unknown relation {quoted_cell(word)}; known: {words}")
    if model_id in first_line:
        return RefusedRow(line, model_id, f"{quoted_cell(model_id)} is a duplicate of row {first_line[model_id]}")
    first_line[model_id] = line
    known = ("", model, RELATION_COLUMN, BASE_COLUMN)
    extra = {name: text for name, text in cell.items() if name not in known}
    return ModelRow(line, model_id, base or None, word, extra)


def _id_problem(text: str) -> str | None:
    """Why ``text`` can't name a model, None if it can."""
    try:
        parse_model(text)
    except BadModel as problem:
        return str(problem)
    return None


def _base_problem(text: str, kind: Relation | None) -> str | None:
    """Why ``text`` can't stand in the column of the base. Only an adapter's base is ever opened; else it is lineage,
    and may be several models, or one that has gone."""
    if text and kind is Relation.ADAPTER:
        problem = _id_problem(text)
        return None if problem is None else f"its base: {problem}"
    if any(unicodedata.category(letter) == "Cc" for letter in text):
        return f"its base {quoted_cell(text)} contains a control character or a line break"
    return None
