"""Tasks of data sets: rows of files and of the Hub become problems, in disjoint splits. Read when problems are first
asked for.

Nothing is lost in silence: a row is a problem, or is refused with its reason, and how many were is logged. Training
problems whose prompt is in the test too are left out, and the last tenth of the others is held out.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError, printable
from gpuherd.models.names import user_path
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.preference_rows import CONVERSATION, Messages
from gpuherd.posttrain.rewards.reward_model import ModelRewards
from gpuherd.posttrain.types import Problem, Reward, Scoring, Split
from gpuherd.qa.data.files import ColumnChoice, rows_of_file, rows_of_table
from gpuherd.qa.data.questions import BadQuestions, BadRow, DataRow, MissingQuestions, text_of

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
# Columns by one of which the delimiter of a table is known.
_HEADINGS = ("messages", "prompt", "question", "problem", "chosen", "completion", "text", "topic")


# ---- the order of problems, and their splits -------------------------------------------------------------------------


def first_problems(problems: Sequence[Problem], count: int | None, seed: int, where: str) -> list[Problem]:
    """The first ``count`` problems in the order of a hash of the seed and their ids; None: all of them.

    The first n are among the first n + 1, and an order does not depend on how the problems lie in their file. Raises
    UsageError, which begins with ``where``, where there are not so many.
    """
    if count is not None and count < 1:
        raise UsageError(f"{where}: {count} problems were asked for; the least is 1")
    if count is not None and count > len(problems):
        raise UsageError(f"{where}: {count} problems were asked for and there are {len(problems)}; ask for fewer")

    def drawn(problem: Problem) -> bytes:
        return hashlib.sha256(f"problems\0{seed}\0{problem.id}".encode()).digest()

    return sorted(problems, key=drawn)[:count]


def without_last_tenth(problems: Sequence[Problem]) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """All problems but the last tenth, rounded up where there are two or more; and the last tenth."""
    first = len(problems) - (-(-len(problems) // 10) if len(problems) > 1 else 0)
    return problems[:first], problems[first:]


def _apart_from(test: Sequence[Problem], problems: Sequence[Problem], name: str) -> list[Problem]:
    """The training problems whose prompts are not in the test; how many were left out is logged. One with the id of
    another problem in the test (both files count from 1) gets a new one."""
    prompts, ids = ({getattr(each, key) for each in test} for key in ("prompt", "id"))
    left = [each for each in problems if each.prompt not in prompts]
    if len(left) < len(problems):
        logger.warning("%s: %d training problems are in the test, and left out", name, len(problems) - len(left))
    return [replace(each, id=f"train-{each.id}") if each.id in ids else each for each in left]


# ---- from rows to problems -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """One split of a data set: a file, a folder laid out like a data set of the Hub, or its id there."""

    name: str
    split: str
    config: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """The parts of a row, unchecked.

    Attributes:
        question: a text.
        answers: a text, a number, or a list of these; none where rewards need none.
        id: None: made of the question.
        worked: an answer with its derivation.
        hidden, messages, chat: as of ``Problem``.
    """

    question: Any
    answers: Any = ()
    id: Any = None
    worked: Any = None
    hidden: Mapping[str, str] = field(default_factory=dict)
    messages: Messages = ()
    chat: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """A parsed row whose texts are texts, as they stand in the row. The question is not blank, the id is unique."""

    id: str
    question: str
    answers: tuple[str, ...]
    worked: str | None
    hidden: Mapping[str, str]
    messages: Messages = ()
    chat: str = ""


def file_rows(path: Path, columns: ColumnChoice) -> Iterator[DataRow]:
    """The rows of a file that ends in one of ``SUFFIXES``. A cell of a CSV file that is a JSON list is that list.

    Raises UsageError, BadQuestions, MissingExtra, OSError.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"{path}: a file of rows ends in {', '.join(SUFFIXES)}")
    if suffix not in (".csv", ".tsv"):
        return rows_of_file(path, columns)
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        heading = next((line for line in file if line.strip()), "")
    return rows_of_table(path, next((name for name in _HEADINGS if name in heading), "prompt"))


def read_rows(part: Part, revision: str | None, columns: frozenset[str]) -> Iterator[DataRow]:
    """The rows of a part. Raises MissingQuestions, BadQuestions, UsageError, MissingExtra."""
    path = user_path(part.name)
    if path.is_file():
        return file_rows(path, partial(_chosen_columns, columns=columns))
    if path.suffix.lower() in SUFFIXES:
        raise MissingQuestions(f"there is no file {path}")
    from gpuherd.qa.data.hub import hub_rows

    return hub_rows(str(path), part.config, part.split, revision, partial(_chosen_columns, columns=columns)).rows


def gather(
    rows: Iterable[DataRow],
    parse: Callable[[Mapping[str, Any]], ParsedRow],
    made: Callable[[Checked], Problem],
    name: str,
) -> list[Problem]:
    """Every row as a problem, or refused. Raises BadQuestions where there is none at all.

    Args:
        parse: the parts of a row. Raises ValueError (BadRow), KeyError, TypeError and the like where it has none.
        made: the problem of a checked row.
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
            problem = made(_checked(row, parse))
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
        raise BadQuestions(f"{name}: {f'none of its {count} rows is a problem' if count else 'it has no rows'}{first}")
    if refused:
        logger.warning("%s", printable(f"{name}: {len(refused)} of {count} rows are left out{first}"))
    return problems


def content_id(text: str) -> str:
    """An id of 16 hex digits for what has none: of its text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _checked(row: DataRow, parse: Callable[[Mapping[str, Any]], ParsedRow]) -> Checked:
    """Raises BadRow."""
    if row.values is None:
        raise BadRow(row.problem or "no row")
    try:
        found = parse(row.values)
    except KeyError as problem:
        raise BadRow(f"no column {problem}") from None
    except ValueError as problem:
        raise BadRow(str(problem)) from None
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
    return Checked(own or content_id(question), question, texts, worked, hidden, found.messages, found.chat)


def _text(value: Any, what: str) -> str:
    """As ``text_of``, but of numbers only finite ones. Raises BadRow."""
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"the {what} is {value}, which is no number")
    return text_of(value, what)


def _chosen_columns(there: Iterable[str], columns: frozenset[str]) -> list[str] | None:
    """Those of the columns that are read; None, for all, where none of them is there: the rows' errors tell."""
    return [name for name in there if name in columns] or None


def _with_answers(problems: Sequence[Problem]) -> list[Problem]:
    """Without conversations that say nothing which could be asked for (calls of tools alone): SFT learns from them, and
    nothing is evaluated on them."""
    return [each for each in problems if each.answers or CONVERSATION not in each.hidden]


# ---- tasks of rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """The place of a task's problems.

    Attributes:
        train, test: None where there is no such split.
        columns: those that are read.
        divided: a file of one's own without a test: its last tenth is the test.
    """

    train: Part | None
    test: Part | None
    columns: frozenset[str]
    divided: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """Other places for a source's splits; settings of tasks derive from it.

    Attributes:
        data, test_data: a file (JSONL, JSON or Parquet) or a folder with the same columns, or another data set of the
            Hub; None: where the source says.
        revision: branch, tag or commit of the Hub.
    """

    data: str | None = None
    test_data: str | None = None
    revision: str | None = None

    def of(self, source: Source) -> Source:
        """The source, read from these places."""
        train = source.train if self.data is None else Part(self.data, "train")
        test = source.test if self.test_data is None else Part(self.test_data, "test")
        return replace(source, train=train, test=test)


def by_model(options: TaskOptions, default: str, label: str | None = None) -> ModelRewards:
    """Scoring by the reward model of the options, else by this one."""
    model = options.reward_model or default
    return ModelRewards(model, options.device, options.dtype, label=label, batch_size=options.reward_batch_size)


class DataTask:
    """A task of a source: a row is parsed and checked, and becomes a problem, and scoring says what answers earn."""

    def __init__(
        self,
        name: str,
        source: Source,
        parse: Callable[[Mapping[str, Any]], ParsedRow],
        problem: Callable[[Checked], Problem],
        scoring: Scoring,
        revision: str | None = None,
    ):
        self.name = name
        self.verifiable = scoring.verifiable
        self.reward_range = scoring.reward_range
        self._source, self._parse, self._problem, self._revision = source, parse, problem, revision
        self._scoring = scoring
        self._known: dict[Split, Sequence[Problem]] = {}

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """The first problems of a split. Raises UsageError, MissingQuestions, BadQuestions, MissingExtra."""
        if split not in self._known:
            self._read(split)
        return first_problems(self._known[split], count, seed, f"{self.name}, {split}")

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """By the task's rule, tests or model."""
        return self._scoring.rewards(problems, completions)

    @property
    def reward_model(self) -> str | None:
        """The model that scores; None where a rule or tests do."""
        return self._scoring.model if isinstance(self._scoring, ModelRewards) else None

    @property
    def split_sizes(self) -> Mapping[Split, int]:
        """The number of problems in each split that has been read."""
        return {split: len(problems) for split, problems in self._known.items()}

    def close(self) -> None:
        """Ends what scoring has started."""
        self._scoring.close()

    def _read(self, split: Split) -> None:
        source = self._source
        if split is Split.TEST and source.test is not None:
            self._known[split] = _with_answers(self._part(source.test))
            return
        if source.train is None or (split is Split.TEST and not source.divided):
            setting = "test_data" if split is Split.TEST else "data"
            raise UsageError(f"{self.name} has no {split} problems; {setting}=FILE gives it some, or take another task")
        train: Sequence[Problem] = self._part(source.train)
        if source.test is not None:
            if Split.TEST not in self._known:
                self._read(Split.TEST)
            train = _apart_from(self._known[Split.TEST], train, self.name)
        elif source.divided:
            train, test = without_last_tenth(train)
            self._known[Split.TEST] = _with_answers(test)
        self._known[Split.TRAIN], held_out = without_last_tenth(train)
        self._known[Split.HELDOUT] = _with_answers(held_out)

    def _part(self, part: Part) -> list[Problem]:
        rows = read_rows(part, self._revision, self._source.columns)
        return gather(rows, self._parse, self._problem, f"{self.name} ({part.name})")
