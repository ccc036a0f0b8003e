"""AIME: problems of the American Invitational Mathematics Examination, whose results are whole numbers from 0 to 999.

``aime22to24`` (90 problems of 2022 to 2024) is for training and has no test of its own; ``aime2024`` and ``aime2025``
(30 each) are tests only. 2024's are among the first: who trains on ``aime22to24`` tests on ``aime2025``, and ``aime``
is both of these together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.data.dataset import DataTask, PromptStyle, Reading, Source
from gpuherd.posttrain.data.math500 import problem_in
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.reading import Draft, Part
from gpuherd.posttrain.rewards.answers import MathRewards

_COLUMNS = frozenset({"problem", "solution", "answer"})
_SOURCES = {
    "aime": Source(Part("AI-MO/aimo-validation-aime", "train"), Part("math-ai/aime25", "test"), _COLUMNS),
    "aime22to24": Source(Part("AI-MO/aimo-validation-aime", "train"), None, _COLUMNS),
    "aime2024": Source(None, Part("HuggingFaceH4/aime_2024", "train"), _COLUMNS),
    "aime2025": Source(None, Part("math-ai/aime25", "test"), _COLUMNS),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """``prompt``: boxed, hashes or plain; ``data``, ``test_data``, ``revision`` as of ``dataset.Reading``."""

    prompt: PromptStyle = "boxed"
    data: str | None = None
    test_data: str | None = None
    revision: str | None = None


def make(options: TaskOptions) -> DataTask:
    """Training on 2022 to 2024, the test of 2025. Raises UsageError."""
    return _make("aime", options)


def make_22_to_24(options: TaskOptions) -> DataTask:
    """The problems of 2022 to 2024, for training. Raises UsageError."""
    return _make("aime22to24", options)


def make_2024(options: TaskOptions) -> DataTask:
    """The problems of 2024, a test. Raises UsageError."""
    return _make("aime2024", options)


def make_2025(options: TaskOptions) -> DataTask:
    """The problems of 2025, a test. Raises UsageError."""
    return _make("aime2025", options)


def draft(row: Mapping[str, Any]) -> Draft:
    """The problem with its number; the id is made of the text, since these sets number their rows differently."""
    return Draft(row["problem"], row["answer"], worked=row.get("solution"))


def _make(name: str, options: TaskOptions) -> DataTask:
    settings = read(Settings, options.settings, name)
    source = Reading(settings.data, settings.test_data).of(_SOURCES[name])
    scoring = MathRewards(options.processes)
    return DataTask(name, source, draft, problem_in(settings.prompt), scoring, settings.revision)
