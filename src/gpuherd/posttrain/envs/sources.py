"""Where an environment's problems are from: a task, a file, or the configuration itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.order import first_problems, without_last_tenth
from gpuherd.posttrain.data.reading import SUFFIXES, Checked, Draft, Part, gather, read_rows
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.data.scoring import ProblemSource
from gpuherd.posttrain.envs.options import EnvironmentOptions
from gpuherd.posttrain.types import Problem, Split
from gpuherd.qa.data.questions import DataRow


class ListedProblems:
    """Problems that are known: all of one split, or divided (the last tenth is the test, the last tenth of the others
    held out)."""

    def __init__(self, name: str, problems: Sequence[Problem], only: Split | None):
        self._name = name
        if only is not None:
            self._parts = {split: problems if split is only else [] for split in Split}
            return
        others, test = without_last_tenth(problems)
        train, heldout = without_last_tenth(others)
        self._parts = {Split.TRAIN: train, Split.HELDOUT: heldout, Split.TEST: test}

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """The first problems of a split. Raises UsageError where there are not so many, or none at all."""
        if not self._parts[split]:
            raise UsageError(f"environment {self._name} has no {split} problems")
        return first_problems(self._parts[split], count, seed, f"environment {self._name}, {split}")

    def close(self) -> None:
        """Nothing was started."""


class Asked:
    """A task's problems, asked in an environment's own way."""

    def __init__(self, task: ProblemSource, asked: Callable[[Problem], Problem]):
        self._task, self._asked = task, asked

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """The task's. Raises what it raises."""
        return [self._asked(each) for each in self._task.problems(split, count, seed)]

    def close(self) -> None:
        """Ends what the task has started."""
        self._task.close()


def source_of(
    options: EnvironmentOptions,
    draft: Callable[[Mapping[str, Any]], Draft],
    made: Callable[[Checked], Problem],
    name: str,
    *,
    of_task: Callable[[Problem], Problem] | None = None,
) -> ProblemSource:
    """The problems that the options say: ``draft`` and ``made`` read rows of a file or of the configuration, as
    ``tasks.reading.gather`` does; a task's problems are its own, changed by
    ``of_task`` where the environment says more than they do. Raises UsageError, and what reading raises."""
    if options.problems is not None:
        rows = [DataRow(f"problem {number}", each) for number, each in enumerate(options.problems, start=1)]
        return ListedProblems(name, gather(rows, draft, made, f"environment {name}"), options.only)
    if options.dataset is None:
        raise UsageError(f"environment {name}: dataset=TASK or FILE, or problems, say what is asked")
    if options.dataset.lower().endswith(SUFFIXES):
        path = str(Path(options.dataset).expanduser())
        rows_of_file = read_rows(Part(path, "train"), None, frozenset())
        return ListedProblems(name, gather(rows_of_file, draft, made, f"environment {name} ({path})"), options.only)
    task = make_task(options.dataset, replace(options.task, settings={}))
    return task if of_task is None else Asked(task, of_task)
