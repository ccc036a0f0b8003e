"""A task by its name, or a file of problems, as an environment of one turn."""

from __future__ import annotations

from dataclasses import replace

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.envs.options import EnvironmentOptions
from gpuherd.posttrain.envs.single_turn import SingleTurn, single_turn


def make(options: EnvironmentOptions) -> SingleTurn:
    """The environments of ``options.dataset``; ``options.settings`` are the task's. Raises UsageError."""
    if options.dataset is None:
        raise UsageError("env_type task: dataset=TASK or FILE says which")
    if options.max_attempts not in (None, 1):
        raise UsageError(
            f"max_attempts={options.max_attempts}: a task is answered in one turn; math and code take more"
        )
    return single_turn(make_task(options.dataset, replace(options.task, settings=options.settings)))
