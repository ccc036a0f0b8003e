"""Programs to be written: ``code`` of a file of one's own, ``mbpp`` and ``humaneval`` of the Hub; scored by tests.

A row of a file has ``prompt`` (or ``question``, ``text``), ``tests`` (``rewards.code.read_tests`` says their forms) and
perhaps ``setup`` (source that is run before), ``solution`` and ``id``. MBPP's and HumanEval's rows are understood as
they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.data.dataset import Checked, DataTask, ParsedRow, Part, Reading, Source
from gpuherd.posttrain.data.options import TaskOptions, task
from gpuherd.posttrain.rewards.code import ENTRY, PREFIX, SETUP, TESTS, CodeRewards, CodeScoring, read_tests
from gpuherd.posttrain.rewards.sandbox import Limits
from gpuherd.posttrain.types import Problem
from gpuherd.qa.data.questions import BadRow


@dataclass(frozen=True, slots=True)
class Settings(Reading):
    """Which problems, and what they earn.

    Attributes:
        partial, all_bonus, error_penalty: as of ``rewards.code.CodeScoring``.
        timeout: seconds for the program with all its tests; for each input by itself.
        memory_mb: of the program.
    """

    partial: bool = True
    all_bonus: float = 0.0
    error_penalty: float = 0.0
    timeout: float = 5.0
    memory_mb: int = 512


_COLUMNS = frozenset(
    {"id", "prompt", "question", "text", "tests", "setup", "solution", "code", "task_id", "test_list"}
    | {"test_setup_code", "test", "entry_point", "canonical_solution"}
)


@task("code", Settings)
def make(settings: Settings, options: TaskOptions) -> DataTask:
    """The task of a file: its last tenth is the test where there is no ``test_data``. Raises UsageError."""
    if settings.data is None and settings.test_data is None:
        raise UsageError("code: data=FILE says where its problems are; mbpp and humaneval are tasks of the Hub")
    return _code_task("code", Source(None, None, _COLUMNS, divided=True), settings, options)


@task("mbpp", Settings)
def make_mbpp(settings: Settings, options: TaskOptions) -> DataTask:
    """MBPP (Austin et al. 2021, arXiv 2108.07732)."""
    name = "google-research-datasets/mbpp"
    return _code_task(
        "mbpp", Source(Part(name, "train", "full"), Part(name, "test", "full"), _COLUMNS), settings, options
    )


@task("humaneval", Settings)
def make_humaneval(settings: Settings, options: TaskOptions) -> DataTask:
    """HumanEval (Chen et al. 2021, arXiv 2107.03374), which is a test only."""
    return _code_task("humaneval", Source(None, Part("openai/openai_humaneval", "test"), _COLUMNS), settings, options)


def make_of(name: str, path: str, options: TaskOptions) -> DataTask:
    """The task of a file that is known to hold programs. Raises UsageError."""
    settings = replace(read(Settings, options.settings, name), data=path)
    return _code_task(name, Source(None, None, _COLUMNS, divided=True), settings, options)


def parse_program(row: Mapping[str, Any]) -> ParsedRow:
    """The problem of a row, its tests hidden. Raises BadRow, KeyError."""
    name, hidden = row.get("id", row.get("task_id")), {}
    solution = next((row[each] for each in ("solution", "code", "canonical_solution") if row.get(each)), None)
    question = next((row[each] for each in ("prompt", "question", "text") if row.get(each) is not None), None)
    if question is None:
        raise BadRow("no column prompt, question or text")
    if isinstance(row.get("entry_point"), str) and isinstance(row.get("test"), str):
        tests: Any = [f"{row['test']}\n\ncheck({row['entry_point']})\n"]
        hidden = {ENTRY: row["entry_point"], PREFIX: question}
    elif row.get("test_list") is not None:
        tests = row["test_list"]
        shown = "\n".join(map(str, tests))
        question = f"{question}\nYour code should pass these tests:\n{shown}\n"
        hidden = {SETUP: row.get("test_setup_code") or ""}
    else:
        tests = row["tests"]
        hidden = {SETUP: row.get("setup") or ""}
    try:
        read_tests(tests)
    except ValueError as problem:
        raise BadRow(str(problem)) from None
    parts = {key: value for key, value in hidden.items() if value}
    return ParsedRow(question, () if solution is None else solution, name, hidden={TESTS: json.dumps(tests), **parts})


def problem_of(found: Checked) -> Problem:
    """The problem of a checked row, its texts as they are: white space matters in programs."""
    return Problem(found.id, found.question, found.answers, found.hidden)


def _code_task(name: str, source: Source, settings: Settings, options: TaskOptions) -> DataTask:
    scoring = CodeRewards(
        CodeScoring(settings.partial, settings.all_bonus, settings.error_penalty),
        Limits(seconds=settings.timeout, memory=settings.memory_mb << 20),
        processes=options.processes,
        allow_unconfined=options.allow_unconfined,
    )
    return DataTask(name, settings.of(source), parse_program, problem_of, scoring, settings.revision)
