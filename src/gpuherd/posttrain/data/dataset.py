"""Tasks of data sets: from the Hub, a folder laid out like one, or files; read when problems are first asked for.

Training problems whose prompt is in the test too are left out, and the last tenth of the others is held out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.order import first_problems, without_last_tenth
from gpuherd.posttrain.data.reading import Checked, Draft, Part, gather, read_rows, shared_left_out
from gpuherd.posttrain.data.scoring import Scoring
from gpuherd.posttrain.rewards.reward_model import ModelRewards
from gpuherd.posttrain.types import Problem, Reward, Split

PromptStyle = Literal["boxed", "hashes", "plain"]
# PITA's prompt (of its public code), and one whose answers end as gsm8k's own do.
PROMPTS: Mapping[PromptStyle, str] = {
    "boxed": "Problem:\n\n{question} Write your answer inside \\boxed{}.\n\nSolution:",
    "hashes": "Question: {question}\nWrite the final answer behind ####.\nAnswer:",
    "plain": "{question}",
}


def asked(question: str, style: PromptStyle) -> str:
    """A question in a style of prompt."""
    return PROMPTS[style].replace("{question}", question.strip())


@dataclass(frozen=True, slots=True)
class Source:
    """Where a task's problems are from.

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
    """Other places for a source's splits.

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


class DataTask:
    """A task of a source: a row becomes a draft, a checked draft a problem, and scoring says what answers earn."""

    def __init__(
        self,
        name: str,
        source: Source,
        draft: Callable[[Mapping[str, Any]], Draft],
        problem: Callable[[Checked], Problem],
        scoring: Scoring,
        revision: str | None = None,
    ):
        self.name = name
        self.verifiable = scoring.verifiable
        self.reward_range = scoring.reward_range
        self._source, self._draft, self._problem, self._revision = source, draft, problem, revision
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
            self._known[split] = self._part(source.test)
            return
        if source.train is None or (split is Split.TEST and not source.divided):
            setting = "test_data" if split is Split.TEST else "data"
            raise UsageError(f"{self.name} has no {split} problems; {setting}=FILE gives it some, or take another task")
        train: Sequence[Problem] = self._part(source.train)
        if source.test is not None:
            if Split.TEST not in self._known:
                self._read(Split.TEST)
            train = _told_apart(shared_left_out(train, self._known[Split.TEST], self.name), self._known[Split.TEST])
        elif source.divided:
            train, self._known[Split.TEST] = without_last_tenth(train)
        self._known[Split.TRAIN], self._known[Split.HELDOUT] = without_last_tenth(train)

    def _part(self, part: Part) -> list[Problem]:
        rows = read_rows(part, self._revision, self._source.columns)
        return gather(rows, self._draft, self._problem, f"{self.name} ({part.name})")


def _told_apart(train: Sequence[Problem], test: Sequence[Problem]) -> list[Problem]:
    """The training problems; those with the id of another one in the test (both files count from 1) get a new one."""
    taken = {each.id for each in test}
    return [replace(each, id=f"train-{each.id}") if each.id in taken else each for each in train]
