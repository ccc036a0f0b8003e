"""MATH (Hendrycks et al. 2021, arXiv 2103.03874): competition problems whose results are formulas.

The test is MATH-500 (Lightman et al. 2023), 500 of the 5,000 test problems; trained is on the 7,500 training problems,
so that nothing of the test is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.problem import Problem
from gpuherd.posttrain.rewards.math import VALUE, MathRewards
from gpuherd.posttrain.tasks.dataset import PROMPTS, DataTask, Part, PromptStyle, Reading, Source
from gpuherd.posttrain.tasks.options import TaskOptions
from gpuherd.qa.data.rows import Draft, Unusable
from gpuherd.qa.judging.math_answers import formula_of


@dataclass(frozen=True, slots=True)
class Settings:
    """``prompt``: boxed or plain; ``data``, ``test_data``, ``revision`` as of ``dataset.Reading``."""

    prompt: PromptStyle = "boxed"
    data: str | None = None
    test_data: str | None = None
    revision: str | None = None


def drafts(row: Mapping[str, Any]) -> Iterator[Draft | Unusable]:
    """The problem with its result: the column ``answer``, else what is boxed in the solution."""
    solution = row.get("solution")
    answer = row.get("answer")
    if answer is None and isinstance(solution, str) and "boxed" in solution:
        answer = formula_of(solution)
    if answer is None:
        yield Unusable("no answer, and nothing boxed in the solution")
        return
    yield Draft(row["problem"], answer, id=row.get("unique_id"), worked=solution)


_SOURCE = Source(
    Part("DigitalLearningGmbH/MATH-lighteval", "train"),
    Part("HuggingFaceH4/MATH-500", "test"),
    drafts,
    frozenset({"problem", "solution", "answer", "unique_id"}),
)


def make(options: TaskOptions) -> DataTask:
    """The task. Raises UsageError."""
    settings = read(Settings, options.settings, "math")
    reading = Reading(settings.data, settings.test_data, settings.revision)
    return DataTask("math", _SOURCE, problem_in(settings.prompt), MathRewards(options.processes), reading)


def problem_in(style: PromptStyle) -> Callable[[Draft, str], Problem]:
    """What makes problems of drafts, asked in this style; the solution is what is imitated."""

    def problem(draft: Draft, name: str) -> Problem:
        result = str(draft.answers[0])
        worked = draft.worked or f"The answer is \\boxed{{{result}}}."
        return Problem(name, PROMPTS[style].format(question=draft.question), (f" {worked}",), {VALUE: result})

    return problem
