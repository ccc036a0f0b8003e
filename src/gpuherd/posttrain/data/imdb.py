"""IMDB: the beginnings of film reviews (Maas et al. 2011) to be gone on with, scored by how positive a classifier finds
the whole: the logit of its label POSITIVE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.data.dataset import DataTask, Reading, Source
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.reading import Checked, Draft, Part
from gpuherd.posttrain.rewards.reward_model import ModelRewards
from gpuherd.posttrain.types import Problem
from gpuherd.qa.data.questions import BadRow

REWARD_MODEL = "lvwerra/distilbert-imdb"
_SOURCE = Source(Part("stanfordnlp/imdb", "train"), Part("stanfordnlp/imdb", "test"), frozenset({"text"}))


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
    source = Reading(settings.data, settings.test_data).of(_SOURCE)
    return DataTask("imdb", source, beginnings(settings.words), _problem, scoring, settings.revision)


def beginnings(words: int) -> Callable[[Mapping[str, Any]], Draft]:
    """What makes a draft of a review: its first words, and the others as the answer; line breaks become spaces."""

    def draft(row: Mapping[str, Any]) -> Draft:
        said = row["text"].replace("<br />", " ").split()
        if len(said) <= words:
            raise BadRow(f"not longer than {words} words")
        return Draft(" ".join(said[:words]), " ".join(said[words:]))

    return draft


def _problem(found: Checked) -> Problem:
    return Problem(found.id, found.question, tuple(f" {each}" for each in found.answers))
