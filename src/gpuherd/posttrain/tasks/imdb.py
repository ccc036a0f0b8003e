"""IMDB: the beginnings of film reviews (Maas et al. 2011) to be gone on with, scored by how positive a classifier finds
the whole: the logit of its label POSITIVE."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.problem import Problem
from gpuherd.posttrain.rewards.by_model import ModelRewards
from gpuherd.posttrain.tasks.dataset import DataTask, Part, Reading, Source
from gpuherd.posttrain.tasks.options import TaskOptions
from gpuherd.qa.data.rows import Draft, Unusable

REWARD_MODEL = "lvwerra/distilbert-imdb"


@dataclass(frozen=True, slots=True)
class Settings:
    """Which beginnings.

    Attributes:
        words: of a review, divided at white space, that are given.
        label: of the classifier, whose logit is the reward; null where it has one output.
        data, test_data, revision: as of ``dataset.Reading``; files have ``text``.
    """

    words: int = 60
    label: str | None = "POSITIVE"
    data: str | None = None
    test_data: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.words < 1:
            raise UsageError(f"words={self.words}; the least is 1")


def make(options: TaskOptions) -> DataTask:
    """The task. Raises UsageError."""
    settings = read(Settings, options.settings, "imdb")
    scoring = ModelRewards(
        options.reward_model or REWARD_MODEL,
        options.device,
        options.dtype,
        label=settings.label,
        batch_size=options.reward_batch_size,
    )
    source = Source(
        Part("stanfordnlp/imdb", "train"),
        Part("stanfordnlp/imdb", "test"),
        beginnings(settings.words),
        frozenset({"text"}),
    )
    reading = Reading(settings.data, settings.test_data, settings.revision)
    return DataTask("imdb", source, _problem, scoring, reading)


def beginnings(words: int) -> Callable[[Mapping[str, Any]], Iterator[Draft | Unusable]]:
    """What makes a draft of a review: its first words, and the others as the answer; line breaks become spaces."""

    def drafts(row: Mapping[str, Any]) -> Iterator[Draft | Unusable]:
        said = row["text"].replace("<br />", " ").split()
        if len(said) <= words:
            yield Unusable(f"not longer than {words} words")
        else:
            yield Draft(" ".join(said[:words]), " ".join(said[words:]))

    return drafts


def _problem(draft: Draft, name: str) -> Problem:
    return Problem(name, draft.question, tuple(f" {answer}" for answer in draft.answers))
