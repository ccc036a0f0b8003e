"""From rows of files and of the Hub to problems. Nothing is lost in silence: a row is a problem, or is refused with its
reason, and how many were is logged."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError, printable
from gpuherd.posttrain.types import Problem
from gpuherd.qa.data.files import rows_of_file
from gpuherd.qa.data.questions import BadQuestions, BadRow, DataRow, MissingQuestions, text_of

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class Part:
    """One split of a data set: a file, a folder laid out like a data set of the Hub, or its id there."""

    name: str
    split: str
    config: str | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """What a row says, unchecked.

    Attributes:
        question: a text.
        answers: a text, a number, or a list of these; none where rewards need none.
        id: None: made of the question.
        worked: an answer with its derivation.
        hidden: as of ``Problem``.
    """

    question: Any
    answers: Any = ()
    id: Any = None
    worked: Any = None
    hidden: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checked:
    """A draft whose texts are texts, as they stand in the row. The question is not blank, the id is unique."""

    id: str
    question: str
    answers: tuple[str, ...]
    worked: str | None
    hidden: Mapping[str, str]


def read_rows(part: Part, revision: str | None, columns: frozenset[str]) -> Iterator[DataRow]:
    """The rows of a part. Raises MissingQuestions, BadQuestions, UsageError, MissingExtra."""
    path = Path(part.name).expanduser()
    suffix = path.suffix.lower()
    if not path.is_file():
        from gpuherd.qa.data.hub import hub_rows

        if suffix in SUFFIXES:
            raise MissingQuestions(f"there is no file {path}")
        found = hub_rows(str(path), part.config, part.split, revision, lambda there: _wanted(there, columns))
        return found.rows
    if suffix in SUFFIXES:
        return rows_of_file(path, lambda there: _wanted(there, columns))
    raise UsageError(f"{path}: a file of problems ends in {', '.join(SUFFIXES)}")


def gather(
    rows: Iterable[DataRow], draft: Callable[[Mapping[str, Any]], Draft], made: Callable[[Checked], Problem], name: str
) -> list[Problem]:
    """Every row as a problem, or refused. Raises BadQuestions where there is none at all.

    Args:
        draft: what a row says. Raises BadRow, KeyError, TypeError and the like where it says nothing.
        made: the problem of a checked draft.
        name: of the rows, for messages.
    """
    problems: list[Problem] = []
    refused: list[str] = []
    ids: dict[str, str] = {}
    prompts: dict[str, str] = {}
    count = 0
    for row in rows:
        count += 1
        try:
            problem = made(_checked(row, draft))
            if (same := prompts.get(problem.prompt)) is not None:
                raise BadRow(f"the same prompt as {same}")
            if (same := ids.get(problem.id)) is not None:
                raise BadRow(f"the same id as {same}")
        except BadRow as reason:
            refused.append(f"{row.place}: {reason}")
            continue
        prompts[problem.prompt] = ids[problem.id] = row.place
        problems.append(problem)
    first = f"; {refused[0]}" if refused else ""
    if not problems:
        raise BadQuestions(f"{name}: none of its {count} rows is a problem{first}")
    if refused:
        logger.warning("%s", printable(f"{name}: {len(refused)} of {count} rows are left out{first}"))
    return problems


def content_id(text: str) -> str:
    """An id of 16 hex digits for what has none: of its text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _checked(row: DataRow, draft: Callable[[Mapping[str, Any]], Draft]) -> Checked:
    """Raises BadRow."""
    if row.values is None:
        raise BadRow(row.problem or "no row")
    try:
        found = draft(row.values)
    except KeyError as problem:
        raise BadRow(f"no column {problem}") from None
    except (TypeError, AttributeError) as problem:
        raise BadRow(f"not of the shape of this data set: {problem}") from None
    question = _text(found.question, "question")
    answers = found.answers if isinstance(found.answers, list | tuple) else [found.answers]
    texts = tuple(dict.fromkeys(_text(each, "answer") for each in answers))
    worked = None if found.worked is None else _text(found.worked, "worked answer")
    own = "" if found.id is None else _text(found.id, "id").strip()
    hidden = {name: _text(value, name) for name, value in found.hidden.items()}
    if not question.strip():
        raise BadRow("the question is empty")
    return Checked(own or content_id(question), question, texts, worked, hidden)


def _text(value: Any, what: str) -> str:
    """As ``text_of``, but of numbers only finite ones. Raises BadRow."""
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"the {what} is {value}, which is no number")
    return text_of(value, what)


def _wanted(there: Iterable[str], columns: frozenset[str]) -> list[str] | None:
    """Those of the columns that are read; None, for all, where none of them is there: the rows' errors tell."""
    return [name for name in there if name in columns] or None


def shared_left_out(problems: Sequence[Problem], test: Sequence[Problem], name: str) -> list[Problem]:
    """The problems whose prompts are not in the test; how many were left out is logged."""
    asked = {each.prompt for each in test}
    left = [each for each in problems if each.prompt not in asked]
    if len(left) < len(problems):
        logger.warning("%s: %d training problems are in the test, and left out", name, len(problems) - len(left))
    return left
