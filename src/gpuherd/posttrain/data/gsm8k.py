"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): sums in words, of several steps, judged by their last number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.data.dataset import DataTask, PromptStyle, Reading, Source, asked
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.reading import Checked, Draft, Part
from gpuherd.posttrain.rewards.answers import VALUE, MathRewards
from gpuherd.posttrain.types import Problem
from gpuherd.qa.data.questions import BadRow, Unusable
from gpuherd.qa.data.readers import benchmarks

_SOURCE = Source(
    Part("openai/gsm8k", "train", "main"),
    Part("openai/gsm8k", "test", "main"),
    frozenset({"question", "answer", "id"}),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """``prompt``: boxed, hashes (answers end as the data set's do) or plain; ``data``, ``test_data``, ``revision`` as
    of ``dataset.Reading``."""

    prompt: PromptStyle = "boxed"
    data: str | None = None
    test_data: str | None = None
    revision: str | None = None


def make(options: TaskOptions) -> DataTask:
    """The task. The solution that is imitated ends as the prompt asks for. Raises UsageError."""
    settings = read(Settings, options.settings, "gsm8k")

    def problem(found: Checked) -> Problem:
        number = found.answers[0]
        worked = found.worked or number
        if settings.prompt == "boxed":
            worked = f"{worked.rpartition('####')[0].rstrip()}\nThe answer is \\boxed{{{number}}}."
        return Problem(found.id, asked(found.question, settings.prompt), (f" {worked}",), {VALUE: number})

    source = Reading(settings.data, settings.test_data).of(_SOURCE)
    return DataTask("gsm8k", source, draft, problem, MathRewards(options.processes), settings.revision)


def draft(row: Mapping[str, Any]) -> Draft:
    """The question with its number and its solution. Raises BadRow."""
    found = next(benchmarks.gsm8k_drafts(row))
    if isinstance(found, Unusable):
        raise BadRow(found.reason)
    return Draft(found.question, found.answers, found.id, found.worked)
