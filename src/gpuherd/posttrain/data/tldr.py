"""TL;DR: posts to be summed up (Völske et al. 2017; filtered by Stiennon et al. 2020, arXiv 2009.01325), scored by a
reward model of people's preferences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.data.dataset import DataTask, Reading, Source
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.reading import Checked, Draft, Part
from gpuherd.posttrain.rewards.reward_model import ModelRewards
from gpuherd.posttrain.types import Problem

REWARD_MODEL = "OpenAssistant/reward-model-deberta-v3-large-v2"


@dataclass(frozen=True, slots=True)
class Settings:
    """``data``, ``test_data``, ``revision`` as of ``dataset.Reading``; files have ``prompt`` and ``completion``."""

    data: str | None = None
    test_data: str | None = None
    revision: str | None = None


_SOURCE = Source(Part("trl-lib/tldr", "train"), Part("trl-lib/tldr", "test"), frozenset({"prompt", "completion"}))


def make(options: TaskOptions) -> DataTask:
    """The task. Raises UsageError."""
    settings = read(Settings, options.settings, "tldr")
    scoring = ModelRewards(
        options.reward_model or REWARD_MODEL,
        options.device,
        options.dtype,
        batch_size=options.reward_batch_size,
    )
    source = Reading(settings.data, settings.test_data).of(_SOURCE)
    return DataTask("tldr", source, draft, problem, scoring, settings.revision)


def draft(row: Mapping[str, Any]) -> Draft:
    """The post, up to its ``TL;DR:``, with the summary that somebody wrote."""
    return Draft(row["prompt"], row["completion"])


def problem(found: Checked) -> Problem:
    """The post is the prompt; the summary, behind a space, is what is imitated."""
    return Problem(found.id, found.question.rstrip(), tuple(f" {each.strip()}" for each in found.answers))
