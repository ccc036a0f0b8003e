"""Reads the questions of a run: by the name of a data set, from the Hub, or from a file.

No row is dropped silently: each becomes a question, or is among the refused ones with its reason.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

from gpuherd.errors import UsageError
from gpuherd.models.names import is_there, quoted, user_path
from gpuherd.options import did_you_mean, option
from gpuherd.qa.data.files import SUFFIXES, rows_of_file
from gpuherd.qa.data.questions import (
    BadQuestions,
    DataRow,
    DataSource,
    FewShotExample,
    MissingQuestions,
    QuestionCollector,
    QuestionSet,
    UncheckedQuestion,
    Unusable,
    in_seeded_order,
)
from gpuherd.qa.data.readers.benchmarks import columns_to_read, data_set_of, plain_drafts
from gpuherd.qa.data.readers.registry import DatasetReader, dataset_readers
from gpuherd.qa.record import Question

ContextRule = Literal["auto", "yes", "no"]


# An option of a group.
_questions = partial(option, group="questions")


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Which questions are asked, and which are shown as examples. Raises UsageError for numbers out of range."""

    dataset: str = _questions(
        help="a name (trivia_qa, squad_v2, nq_open, svamp, coqa, sciq, bioasq, gsm8k, truthful_qa), a data set of the "
        "Hub as org/name or org/name:config, a folder of one (or FOLDER:CONFIG), or a file: JSONL, JSON, CSV, TSV or "
        "Parquet with question, answers and perhaps context and id",
        metavar="NAME|FILE",
    )
    split: str | None = _questions(None, help="split of a data set of the Hub (default: the one that is usually asked)")
    revision: str | None = _questions(None, help="branch, tag or commit of a data set of the Hub", metavar="COMMIT")
    limit: int | None = _questions(
        None, help="ask N questions at most: the first ones, or random ones with --shuffle", parse=int, metavar="N"
    )
    shuffle: bool = _questions(False, help="ask in a random order (--seed), so that --limit is a random sample")
    few_shot: int = _questions(
        0,
        help="begin each prompt with K example questions and answers, drawn by --seed from the data set's training "
        "split; examples drawn from the questions themselves are not asked",
        parse=int,
        metavar="K",
    )
    few_shot_file: str | None = _questions(None, help="draw the examples from this file", metavar="FILE")
    context: ContextRule = _questions(
        "auto",
        help="put the context of each question into the prompt; auto: if the questions are about it (squad_v2, coqa, "
        "files)",
        choices=("auto", "yes", "no"),
        alone="yes",
    )

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"--limit {self.limit}: at least one question has to be asked")
        if self.few_shot < 0:
            raise UsageError(f"--few-shot {self.few_shot}: 0 examples or more")
        if self.few_shot_file is not None and self.few_shot == 0:
            raise UsageError("--few-shot-file without --few-shot: say how many examples are drawn from it")


_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
_ANY_CONFIG_SPLIT = "test"


def load_questions(options: QuestionOptions, *, seed: int = 0) -> QuestionSet:
    """The questions of a data set, checked.

    These are the usable rows, without the examples drawn from them, shuffled with ``shuffle``, and of these the first
    ``limit``. Each draw depends on the seed and on the ids alone. Raises MissingQuestions, BadQuestions, UsageError,
    MissingExtra.
    """
    found = _read(options.dataset, options.split, options.revision, options.context)
    pool = found.collected.examples
    examples, examples_source = _examples(found, options, seed)
    shown = {example.question.id for example in examples} if examples_source is found.source else set()
    asked = [each for each in pool if each.question.id not in shown]
    if options.context == "yes" and all(example.question.context is None for example in pool):
        raise UsageError(f"--context yes: {found.source.name} has no contexts")
    if not asked:
        raise BadQuestions(f"{found.source.name}: the {len(pool)} questions are all shown as examples; none is left")
    if options.shuffle:
        asked = in_seeded_order(asked, seed, "order")
    with_context = found.collected.with_context
    return QuestionSet(
        tuple(_in_context(each.question, with_context) for each in asked[: options.limit]),
        tuple(found.collected.refused),
        found.source,
        tuple(replace(each, question=_in_context(each.question, with_context)) for each in examples),
        examples_source,
    )


@dataclass(frozen=True, slots=True)
class _ReadData:
    """Everything in a split or file; ``reader`` is None for a file."""

    collected: QuestionCollector
    source: DataSource
    reader: DatasetReader | None


def _examples(found: _ReadData, options: QuestionOptions, seed: int) -> tuple[list[FewShotExample], DataSource | None]:
    """The examples, and where they are from."""
    if options.few_shot == 0:
        return [], None
    pool: Sequence[FewShotExample] = found.collected.examples
    source = found.source
    if options.few_shot_file is not None:
        other = _read(options.few_shot_file, None, None, "yes")
        pool, source = other.collected.examples, other.source
    elif found.reader is not None and found.reader.few_shot_split not in (None, source.split):
        try:
            other = _of_hub(found.reader, found.reader.few_shot_split, options.revision, "yes")
            pool, source = other.collected.examples, other.source
        except MissingQuestions:
            if found.reader.drafts is not plain_drafts:
                raise
            # A folder with no other split than the requested one.
    if source is not found.source:  # no question that is asked is an example, wherever examples are drawn from
        asked = {each.question.question for each in found.collected.examples}
        pool = [each for each in pool if each.question.question not in asked]
    if len(pool) < options.few_shot:
        raise UsageError(f"--few-shot {options.few_shot}: {source.name} has {len(pool)} questions that can be shown")
    return in_seeded_order(pool, seed, "few-shot")[: options.few_shot], source


def _in_context(question: Question, with_context: bool) -> Question:
    return question if with_context or question.context is None else replace(question, context=None)


def _read(name: str, split: str | None, revision: str | None, context: ContextRule) -> _ReadData:
    known = dataset_readers()
    path = user_path(name)
    if name in known:
        here = Path(known[name].hub_id)
        if here.is_dir():  # the library would read that folder, without a warning
            raise UsageError(f"{name}: there is a folder {here} where you are; say ./{here}, or start elsewhere")
        return _of_hub(known[name], split, revision, context)
    if is_there(name):
        if path.is_dir():
            return _of_hub(_reader_of_folder(path), split, revision, context)
        return _of_file(path, split, revision, context)
    folder, _, config = str(path).rpartition(":")
    if config and folder and is_there(folder) and Path(folder).is_dir():
        return _of_hub(_reader_of(str(Path(folder)), config), split, revision, context)
    hub_id = _HUB_ID.fullmatch(name)
    if path.suffix.lower() in SUFFIXES or hub_id is None:
        hint = did_you_mean(name, known, f"names: {', '.join(sorted(known))}; or a file", most=2)
        raise MissingQuestions(f"no data set or file {quoted(name)}{hint}")
    return _of_hub(_reader_of(hub_id[1], hub_id[2]), split, revision, context)


def _reader_of(hub_id: str, config: str | None) -> DatasetReader:
    """The reader of an id: that of a known data set, else one that goes by the columns."""
    for each in dataset_readers().values():
        if each.hub_id == hub_id:
            return each if config is None else replace(each, config=config)
    return DatasetReader(hub_id, hub_id, plain_drafts, config, _ANY_CONFIG_SPLIT, None, context_is_part=True)


def _reader_of_folder(folder: Path) -> DatasetReader:
    """The reader of a folder, which goes by the columns; of several configs it takes the one that a known data set has,
    with the split of that data set."""
    from gpuherd.qa.data.hub import configs_of

    found = _reader_of(str(folder), None)
    configs = configs_of(folder)
    known = [each for each in dataset_readers().values() if len(configs) > 1 and each.config in configs]
    return replace(found, config=known[0].config, split=known[0].split) if len(known) == 1 else found


def _of_hub(reader: DatasetReader, split: str | None, revision: str | None, context: ContextRule) -> _ReadData:
    from gpuherd.qa.data.hub import hub_rows

    split = split or reader.split
    found = hub_rows(reader.hub_id, reader.config, split, revision, columns_to_read)
    with_context = context == "yes" or (context == "auto" and reader.context_is_part)
    first = next(found.rows, None)
    rows = found.rows if first is None else chain([first], found.rows)
    if reader.drafts is plain_drafts and first is not None and first.values is not None:
        # A folder, or a copy on the Hub, of a data set that is known has the split for examples that it has.
        known = data_set_of(first.values)
        reader = reader if known is None else replace(reader, few_shot_split=known.few_shot_split)
    collected = _collected(rows, reader, reader.hub_id, with_context)
    source = DataSource(
        reader.hub_id, reader.config, split, found.revision, _digest(collected.examples), collected.rows
    )
    return _ReadData(collected, source, reader)


def _of_file(path: Path, split: str | None, revision: str | None, context: ContextRule) -> _ReadData:
    if split is not None or revision is not None:
        raise UsageError(f"{path} is a file: it has no split or revision")
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: a file of questions ends in {', '.join(SUFFIXES)}")
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        collected = _collected(rows_of_file(path, columns_to_read), None, str(path), context != "no")
    except OSError as problem:
        raise MissingQuestions(f"{path} can't be read: {problem.strerror or problem}") from None
    return _ReadData(collected, DataSource(str(path), None, None, None, sha256, collected.rows), None)


def _collected(
    rows: Iterable[DataRow], reader: DatasetReader | None, name: str, with_context: bool
) -> QuestionCollector:
    """Every row as questions or as refused. Raises BadQuestions if there is no question at all."""
    collected = QuestionCollector(with_context)
    for row in rows:
        collected.rows += 1
        for found in _drafts(row, reader):
            collected.add(row.place, found)
    if not collected.examples:
        if not collected.rows:
            raise BadQuestions(f"{name} is empty: there is no row in it")
        first = collected.refused[0] if collected.refused else None
        why = "" if first is None else f"; {first.row}: {first.reason}"
        raise BadQuestions(f"{name}: none of its {collected.rows} rows can be asked{why}")
    return collected


def _drafts(row: DataRow, reader: DatasetReader | None) -> Iterable[UncheckedQuestion | Unusable]:
    """The questions of a row; a row of another shape gives a reason, and affects no other."""
    if row.values is None:
        return [Unusable(row.problem or "no row")]
    try:
        return list((plain_drafts if reader is None else reader.drafts)(row.values))
    except KeyError as problem:
        return [Unusable(f"no column {problem}; this is not the data set that it is taken for")]
    except (TypeError, ValueError, AttributeError) as problem:
        return [Unusable(f"not of the shape of this data set: {problem}")]


def _digest(examples: Iterable[FewShotExample]) -> str:
    """SHA-256 of the questions as JSON lines."""
    digest = hashlib.sha256()
    for each in examples:
        question = each.question
        line = json.dumps([question.id, question.question, question.answers, question.context])
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()
