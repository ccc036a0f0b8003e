"""Tasks of data sets: from the Hub, a folder laid out like one, or files; read when problems are first asked for.

A split's rows are read whole, each a problem or refused with its reason (logged, with how many). Training problems whose
question is in the test too are left out, and the last tenth of the others is held out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gpuherd.errors import UsageError, printable
from gpuherd.posttrain.problem import Problem, Reward, Split
from gpuherd.posttrain.tasks.order import first_problems, without_heldout
from gpuherd.posttrain.tasks.scoring import Scoring
from gpuherd.qa.data.json_files import rows_of_document, rows_of_lines
from gpuherd.qa.data.question_set import BadQuestions, MissingQuestions
from gpuherd.qa.data.rows import Collected, Draft, Row, Unusable

logger = logging.getLogger(__name__)

PromptStyle = Literal["boxed", "hashes", "plain"]
# PITA's prompt (its public code's), and one whose answers end as gsm8k's own do.
PROMPTS: Mapping[PromptStyle, str] = {
    "boxed": "Problem:\n\n{question} Write your answer inside \\boxed{{}}.\n\nSolution:",
    "hashes": "Question: {question}\nWrite the final answer behind ####.\nAnswer:",
    "plain": "{question}",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One split of a data set of the Hub."""

    hub_id: str
    split: str
    config: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where a task's problems are from.

    Attributes:
        train, test: parts of the Hub; None where there is no such split.
        drafts: what a row holds: a question with its answers, or the reason why none. Raises KeyError, TypeError where
            the row is not of this data set.
        columns: those that are read.
    """

    train: Part | None
    test: Part | None
    drafts: Callable[[Mapping[str, Any]], Iterable[Draft | Unusable]]
    columns: frozenset[str]


@dataclass(frozen=True, slots=True)
class Reading:
    """Other places for a source's splits.

    Attributes:
        data, test_data: a file (JSONL, JSON or Parquet) or a folder with the same columns, or another data set of the
            Hub; None: where the source says.
        revision: branch, tag or commit of the Hub.
    """

    data: str | None = None
    test_data: str | None = None
    revision: str | None = None


class DataTask:
    """A task of a source."""

    def __init__(
        self, name: str, source: Source, problem: Callable[[Draft, str], Problem], scoring: Scoring, reading: Reading
    ):
        """``problem`` makes a problem of a draft whose texts are checked, and its id."""
        self.name = name
        self.verifiable = scoring.verifiable
        self.reward_range = scoring.reward_range
        self._source, self._problem, self._scoring, self._reading = source, problem, scoring, reading
        self._read: dict[Split, Sequence[Problem]] = {}

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """The first problems of a split. Raises UsageError, MissingQuestions, BadQuestions, MissingExtra."""
        return first_problems(self._of(split), count, seed, f"{self.name}, {split}")

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """By the task's rule, tests or model."""
        return self._scoring.rewards(problems, completions)

    def close(self) -> None:
        """Ends what scoring has started."""
        self._scoring.close()

    def _of(self, split: Split) -> Sequence[Problem]:
        if split not in self._read:
            if split is Split.TEST:
                self._read[split] = self._part(self._source.test, self._reading.test_data, "test")
            else:
                train = self._part(self._source.train, self._reading.data, "train")
                if self._source.test is not None or self._reading.test_data is not None:
                    train = without(train, self._of(Split.TEST), self.name)
                for each in (Split.TRAIN, Split.HELDOUT):
                    self._read[each] = without_heldout(train, each)
        return self._read[split]

    def _part(self, part: Part | None, elsewhere: str | None, which: str) -> Sequence[Problem]:
        if elsewhere is not None:
            part = Part(elsewhere, "test" if which == "test" else "train")
        if part is None:
            setting = "test_data" if which == "test" else "data"
            raise UsageError(f"{self.name} has no {which} problems; {setting}=FILE gives it some, or use another task")
        rows = read_rows(part, self._reading.revision, self._source.columns)
        return _problems(rows, self._source.drafts, self._problem, f"{self.name} ({part.hub_id})")


def read_rows(part: Part, revision: str | None, columns: frozenset[str]) -> Iterator[Row]:
    """The rows of a file, of a folder, or of a data set of the Hub. Raises MissingQuestions, BadQuestions, UsageError."""
    path = Path(part.hub_id).expanduser()
    suffix = path.suffix.lower()
    if not path.is_file():
        from gpuherd.qa.data.hub import hub_rows

        if suffix in (".jsonl", ".ndjson", ".json", ".parquet"):
            raise MissingQuestions(f"there is no file {path}")
        return hub_rows(part.hub_id, part.config, part.split, revision, lambda there: _wanted(there, columns)).rows
    if suffix == ".parquet":
        from gpuherd.qa.data.parquet_files import rows_of_parquet

        return rows_of_parquet(path, lambda there: _wanted(there, columns))
    if suffix == ".json":
        return rows_of_document(path)
    if suffix in (".jsonl", ".ndjson"):
        return rows_of_lines(path)
    raise UsageError(f"{path}: a file of problems ends in .jsonl, .ndjson, .json or .parquet")


def without(problems: Sequence[Problem], test: Sequence[Problem], name: str) -> Sequence[Problem]:
    """The problems whose prompts are not in the test; how many were left out is logged."""
    asked = {each.prompt for each in test}
    ids = {each.id for each in test}
    left = [each for each in problems if each.prompt not in asked]
    if len(left) < len(problems):
        logger.warning("%s: %d training problems are in the test, and left out", name, len(problems) - len(left))
    # An id is of one problem only, also where two files count from 1 each.
    return [replace(each, id=f"train-{each.id}") if each.id in ids else each for each in left]


def _problems(
    rows: Iterable[Row],
    drafts: Callable[[Mapping[str, Any]], Iterable[Draft | Unusable]],
    made: Callable[[Draft, str], Problem],
    name: str,
) -> Sequence[Problem]:
    """Every row as a problem, or refused. Raises BadQuestions where there is none at all."""
    collected, hidden = Collected(), dict[str, Draft]()
    for row in rows:
        collected.rows += 1
        for found in _drafted(row, drafts):
            before = len(collected.examples)
            collected.add(row.place, found)
            if len(collected.examples) > before and isinstance(found, Draft):
                hidden[collected.examples[-1].question.id] = found
    first = collected.refused[0] if collected.refused else None
    why = "" if first is None else f"; {first.row}: {first.reason}"
    if not collected.examples:
        raise BadQuestions(f"{name}: none of its {collected.rows} rows is a problem{why}")
    if collected.refused:
        told = f"{name}: {len(collected.refused)} of {collected.rows} rows are left out{why}"
        logger.warning("%s", printable(told))
    problems = []
    for each in collected.examples:
        question = each.question
        draft = replace(hidden[question.id], question=question.question, answers=question.answers, worked=each.worked)
        problems.append(made(draft, question.id))
    return problems


def _drafted(
    row: Row, drafts: Callable[[Mapping[str, Any]], Iterable[Draft | Unusable]]
) -> Iterable[Draft | Unusable]:
    if row.values is None:
        return [Unusable(row.problem or "no row")]
    try:
        return list(drafts(row.values))
    except KeyError as problem:
        return [Unusable(f"no column {problem}")]
    except (TypeError, ValueError, AttributeError) as problem:
        return [Unusable(f"not of the shape of this data set: {problem}")]


def _wanted(there: Iterable[str], columns: frozenset[str]) -> list[str] | None:
    """Those of the columns that are read; None, for all, where none of them is there: the rows' errors tell."""
    return [name for name in there if name in columns] or None
