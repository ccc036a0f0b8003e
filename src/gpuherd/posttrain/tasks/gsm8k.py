"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): sums in words, of several steps, judged by their last number."""

from __future__ import annotations

from dataclasses import dataclass

from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.problem import Problem
from gpuherd.posttrain.rewards.math import VALUE, MathRewards
from gpuherd.posttrain.tasks.dataset import PROMPTS, DataTask, Part, PromptStyle, Reading, Source
from gpuherd.posttrain.tasks.options import TaskOptions
from gpuherd.qa.data.adapters import gsm8k
from gpuherd.qa.data.rows import Draft

_SOURCE = Source(
    Part("openai/gsm8k", "train", "main"),
    Part("openai/gsm8k", "test", "main"),
    gsm8k.drafts,
    frozenset({"question", "answer", "id"}),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """``prompt``: boxed, hashes (answers end as the data set's do) or plain; ``data``, ``test_data``, ``revision`` as of
    ``dataset.Reading``."""

    prompt: PromptStyle = "boxed"
    data: str | None = None
    test_data: str | None = None
    revision: str | None = None


def make(options: TaskOptions) -> DataTask:
    """The task. The solution that is imitated ends as the prompt asks for. Raises UsageError."""
    settings = read(Settings, options.settings, "gsm8k")

    def problem(draft: Draft, name: str) -> Problem:
        number = str(draft.answers[0])
        worked = draft.worked or number
        if settings.prompt == "boxed":
            worked = f"{worked.rpartition('####')[0].rstrip()}\nThe answer is \\boxed{{{number}}}."
        prompt = PROMPTS[settings.prompt].format(question=draft.question)
        return Problem(name, prompt, (f" {worked}",), {VALUE: number})

    reading = Reading(settings.data, settings.test_data, settings.revision)
    return DataTask("gsm8k", _SOURCE, problem, MathRewards(options.processes), reading)
