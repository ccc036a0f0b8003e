"""MATH (Hendrycks et al. 2021, arXiv 2103.03874): competition problems whose results are formulas.

The test is MATH-500 (Lightman et al. 2023), 500 of the 5,000 test problems; trained is on the 7,500 training problems,
so that nothing of the test is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.data.dataset import DataTask, PromptStyle, Reading, Source, asked
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.reading import Checked, Draft, Part
from gpuherd.posttrain.rewards.answers import VALUE, MathRewards
from gpuherd.posttrain.types import Problem
from gpuherd.qa.data.questions import BadRow
from gpuherd.qa.grading.formulas import formula_of

_SOURCE = Source(
    Part("DigitalLearningGmbH/MATH-lighteval", "train"),
    Part("HuggingFaceH4/MATH-500", "test"),
    frozenset({"problem", "solution", "answer", "unique_id"}),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """``prompt``: boxed, hashes or plain; ``data``, ``test_data``, ``revision`` as of ``dataset.Reading``."""

    prompt: PromptStyle = "boxed"
    data: str | None = None
    test_data: str | None = None
    revision: str | None = None


def make(options: TaskOptions) -> DataTask:
    """The task. Raises UsageError."""
    settings = read(Settings, options.settings, "math")
    source = Reading(settings.data, settings.test_data).of(_SOURCE)
    scoring = MathRewards(options.processes)
    return DataTask("math", source, draft, problem_in(settings.prompt), scoring, settings.revision)


def draft(row: Mapping[str, Any]) -> Draft:
    """The problem with its result: the column ``answer``, else what is boxed in the solution. Raises BadRow."""
    solution, answer = row.get("solution"), row.get("answer")
    if answer is None:
        if not isinstance(solution, str) or "boxed" not in solution:
            raise BadRow("no answer, and nothing boxed in the solution")
        answer = formula_of(solution)
    return Draft(row["problem"], answer, row.get("unique_id"), solution)


def problem_in(style: PromptStyle) -> Callable[[Checked], Problem]:
    """What makes problems that are asked in this style; the solution is what is imitated."""

    def problem(found: Checked) -> Problem:
        result = found.answers[0].strip()
        worked = found.worked or f"The answer is \\boxed{{{result}}}."
        return Problem(found.id, asked(found.question, style), (f" {worked}",), {VALUE: result})

    return problem
