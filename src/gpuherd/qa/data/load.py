"""Reads the questions of a run: by the name of a data set, from the Hub, or from a file. Nothing is lost in silence:
each row is a question, or stands among the refused ones with its reason."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from gpuherd.errors import UsageError
from gpuherd.options import did_you_mean
from gpuherd.qa.data.adapters import plain
from gpuherd.qa.data.adapters.registry import Adapter, adapters
from gpuherd.qa.data.csv_files import rows_of_table
from gpuherd.qa.data.json_files import rows_of_document, rows_of_lines
from gpuherd.qa.data.options import ContextRule
from gpuherd.qa.data.parquet_files import rows_of_parquet
from gpuherd.qa.data.question_set import BadQuestions, Example, MissingQuestions, QuestionSet, Source
from gpuherd.qa.data.rows import Collected, Draft, Row, Unusable, in_seeded_order
from gpuherd.qa.record import Question

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
_ANY_CONFIG_SPLIT = "test"


def load_questions(
    name_or_path: str | Path,
    *,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    revision: str | None = None,
    shuffle: bool = False,
    few_shot: int = 0,
    few_shot_file: str | Path | None = None,
    context: ContextRule = "auto",
) -> QuestionSet:
    """The questions of a data set, checked; ``options.QuestionOptions`` says what each argument means.

    Asked are, in this order: the rows that can be asked, less the examples drawn from them, shuffled if so asked, and
    of these the first ``limit``. Each draw depends on the seed and on the ids alone. Raises MissingQuestions,
    BadQuestions, UsageError, MissingExtra.
    """
    found = _read(str(name_or_path), split, revision, context)
    pool = found.collected.examples
    examples, examples_source = _examples(found, pool, few_shot, few_shot_file, seed, revision)
    shown = {example.question.id for example in examples} if examples_source is found.source else set()
    asked = [each for each in pool if each.question.id not in shown]
    if context == "yes" and all(example.question.context is None for example in pool):
        raise UsageError(f"--context yes: {found.source.name} has no contexts")
    if not asked:
        raise BadQuestions(f"{found.source.name}: the {len(pool)} questions are all shown as examples; none is left")
    if shuffle:
        asked = in_seeded_order(asked, seed, "order")
    with_context = found.collected.with_context
    return QuestionSet(
        tuple(_in_context(each.question, with_context) for each in asked[:limit]),
        tuple(found.collected.refused),
        found.source,
        tuple(replace(each, question=_in_context(each.question, with_context)) for each in examples),
        examples_source,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """All that a split or file holds; ``adapter`` None for a file."""

    collected: Collected
    source: Source
    adapter: Adapter | None


def _examples(
    found: _Found,
    pool: Sequence[Example],
    few_shot: int,
    few_shot_file: str | Path | None,
    seed: int,
    revision: str | None,
) -> tuple[list[Example], Source | None]:
    """The questions that are shown, and where they are from."""
    if few_shot == 0:
        return [], None
    source = found.source
    if few_shot_file is not None:
        other = _read(str(few_shot_file), None, None, "yes")
        pool, source = other.collected.examples, other.source
    elif found.adapter is not None and found.adapter.few_shot_split not in (None, source.split):
        try:
            other = _of_hub(found.adapter, found.adapter.few_shot_split, revision, "yes")
            pool, source = other.collected.examples, other.source
        except MissingQuestions:
            if found.adapter.drafts is not plain.drafts:
                raise
            # A folder with no other split than the requested one.
    if source is not found.source:  # what is asked is never shown, wherever it is drawn from
        asked = {each.question.question for each in found.collected.examples}
        pool = [each for each in pool if each.question.question not in asked]
    if len(pool) < few_shot:
        raise UsageError(f"--few-shot {few_shot}: {source.name} has {len(pool)} questions that can be shown")
    return in_seeded_order(pool, seed, "few-shot")[:few_shot], source


def _in_context(question: Question, with_context: bool) -> Question:
    return question if with_context or question.context is None else replace(question, context=None)


def _read(name: str, split: str | None, revision: str | None, context: ContextRule) -> _Found:
    known = adapters()
    path = Path(name).expanduser()
    if name in known:
        here = Path(known[name].hub_id)
        if here.is_dir():  # the library would read that, and say nothing
            raise UsageError(f"{name}: there is a folder {here} where you are; say ./{here}, or start elsewhere")
        return _of_hub(known[name], split, revision, context)
    if path.is_dir():
        return _of_hub(_adapter_of_folder(path), split, revision, context)
    if path.exists():
        return _of_file(path, split, revision, context)
    folder, _, config = str(path).rpartition(":")
    if config and folder and Path(folder).is_dir():
        return _of_hub(_adapter_of(str(Path(folder)), config), split, revision, context)
    hub_id = _HUB_ID.fullmatch(name)
    if path.suffix.lower() in _SUFFIXES or hub_id is None:
        hint = did_you_mean(name, known, f"names: {', '.join(sorted(known))}; or a file", most=2)
        raise MissingQuestions(f"no data set or file {name!r}{hint}")
    return _of_hub(_adapter_of(hub_id[1], hub_id[2]), split, revision, context)


def _adapter_of(hub_id: str, config: str | None) -> Adapter:
    """The adapter of an id: that of the data set if it is one that we know, else by its columns."""
    for each in adapters().values():
        if each.hub_id == hub_id:
            return each if config is None else replace(each, config=config)
    return Adapter(hub_id, hub_id, plain.drafts, config, _ANY_CONFIG_SPLIT, None, context_is_part=True)


def _adapter_of_folder(folder: Path) -> Adapter:
    """The adapter of a folder: by its columns, with the config and split of a known data set where it has several
    configs, one of which is that data set's."""
    from gpuherd.qa.data.hub import configs_of

    found = _adapter_of(str(folder), None)
    configs = configs_of(folder)
    known = [each for each in adapters().values() if len(configs) > 1 and each.config in configs]
    return replace(found, config=known[0].config, split=known[0].split) if len(known) == 1 else found


def _of_hub(adapter: Adapter, split: str | None, revision: str | None, context: ContextRule) -> _Found:
    from gpuherd.qa.data.hub import hub_rows

    split = split or adapter.split
    found = hub_rows(adapter.hub_id, adapter.config, split, revision, plain.worth_reading)
    with_context = context == "yes" or (context == "auto" and adapter.context_is_part)
    first = next(found.rows, None)
    rows = found.rows if first is None else chain([first], found.rows)
    if adapter.drafts is plain.drafts and first is not None and first.values is not None:
        # A folder, or a copy on the Hub, of a data set that is known has the split for examples that it has.
        known = plain.data_set_of(first.values)
        adapter = adapter if known is None else replace(adapter, few_shot_split=known.few_shot_split)
    collected = _collected(rows, adapter, adapter.hub_id, with_context)
    source = Source(adapter.hub_id, adapter.config, split, found.revision, _digest(collected.examples), collected.rows)
    return _Found(collected, source, adapter)


def _of_file(path: Path, split: str | None, revision: str | None, context: ContextRule) -> _Found:
    if split is not None or revision is not None:
        raise UsageError(f"{path} is a file: it has no split or revision")
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        collected = _collected(_rows_of(path), None, str(path), context != "no")
    except OSError as problem:
        raise MissingQuestions(f"{path} can't be read: {problem.strerror or problem}") from None
    return _Found(collected, Source(str(path), None, None, None, sha256, collected.rows), None)


def _rows_of(path: Path) -> Iterator[Row]:
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return rows_of_lines(path)
    if suffix == ".json":
        return rows_of_document(path)
    if suffix in (".csv", ".tsv"):
        return rows_of_table(path, "question")
    if suffix == ".parquet":
        return rows_of_parquet(path, plain.worth_reading)
    raise UsageError(f"{path}: a file of questions ends in {', '.join(_SUFFIXES)}")


def _collected(rows: Iterable[Row], adapter: Adapter | None, name: str, with_context: bool) -> Collected:
    """Every row as questions or as refused. Raises BadQuestions where there is no question at all."""
    collected = Collected(with_context)
    for row in rows:
        collected.rows += 1
        for found in _drafts(row, adapter):
            collected.add(row.place, found)
    if not collected.examples:
        if not collected.rows:
            raise BadQuestions(f"{name} is empty: there is no row in it")
        first = collected.refused[0] if collected.refused else None
        why = "" if first is None else f"; {first.row}: {first.reason}"
        raise BadQuestions(f"{name}: none of its {collected.rows} rows can be asked{why}")
    return collected


def _drafts(row: Row, adapter: Adapter | None) -> Iterable[Draft | Unusable]:
    """What the adapter finds in a row; a row of another shape is one reason, and harms no other."""
    if row.values is None:
        return [Unusable(row.problem or "no row")]
    try:
        return list((plain.drafts if adapter is None else adapter.drafts)(row.values))
    except KeyError as problem:
        return [Unusable(f"no column {problem}; this is not the data set that it is taken for")]
    except (TypeError, ValueError, AttributeError) as problem:
        return [Unusable(f"not of the shape of this data set: {problem}")]


def _digest(examples: Iterable[Example]) -> str:
    """SHA-256 of the questions as JSON lines."""
    digest = hashlib.sha256()
    for each in examples:
        question = each.question
        line = json.dumps([question.id, question.question, question.answers, question.context])
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()
