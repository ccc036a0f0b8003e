"""The registry of data sets that are known by name; each registers itself where its module is imported.

register(DatasetReader("sciq", "allenai/sciq", by_columns("question", "correct_answer", context="support")))
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpuherd.qa.data.questions import UncheckedQuestion, Unusable

Drafts = Callable[[Mapping[str, Any]], Iterable[UncheckedQuestion | Unusable]]


@dataclass(frozen=True, slots=True)
class DatasetReader:
    """A data set of the Hub.

    Attributes:
        name: the word for ``--dataset``.
        hub_id: its id on the Hub.
        drafts: the questions of a row, mostly one, or the reason why there is none. Raises KeyError, TypeError for a
            row of another shape.
        config: the configuration, if the data set has several.
        split: the split to ask by default.
        few_shot_split: the split from which examples are drawn; None: from the split that is asked, and the examples
            are then not asked.
        context_is_part: whether its questions are about their context, so that it is given by default.
        columns: a row of a local file with these columns is of this data set; none: its rows have the plain form.
    """

    name: str
    hub_id: str
    drafts: Drafts
    config: str | None = None
    split: str = "validation"
    few_shot_split: str | None = "train"
    context_is_part: bool = False
    columns: frozenset[str] = frozenset()


_READERS: dict[str, DatasetReader] = {}


def register(reader: DatasetReader) -> DatasetReader:
    """Adds a data set. Raises ValueError if the name is taken."""
    if reader.name in _READERS:
        raise ValueError(f"there is a data set {reader.name!r} already")
    _READERS[reader.name] = reader
    return reader


def dataset_readers() -> Mapping[str, DatasetReader]:
    """All data sets that are known by name."""
    import gpuherd.qa.data.readers as package

    for module in sorted(each.name for each in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{package.__name__}.{module}")  # it registers its data sets
    return _READERS


def by_columns(question: str, answers: str, *more_answers: str, context: str | None = None) -> Drafts:
    """Rows that are one question each. Columns of answers hold a text or a list; the best answer comes first."""

    def drafts(row: Mapping[str, Any]) -> Iterator[UncheckedQuestion]:
        text, found = row[question], row[answers]
        if more_answers:
            columns = (found, *(row[name] for name in more_answers))
            found = [one for each in columns for one in (each if isinstance(each, list) else [each])]
        yield UncheckedQuestion(text, found, None if context is None else row[context])

    return drafts
