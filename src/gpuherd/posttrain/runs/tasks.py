"""An experiment's data sets as tasks: by their names in the configuration, on a device."""

from __future__ import annotations

from gpuherd.errors import GpuherdError, UsageError
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.runs.blocks import DTYPES
from gpuherd.posttrain.runs.settings import Settings
from gpuherd.posttrain.types import Problem, Split, Task


def make_dataset(settings: Settings, name: str, device: str = "cpu") -> Task:
    """The task of a data set's name. Raises UsageError, naming its key, and what reading data raises."""
    told = settings.dataset(name)
    try:
        options = TaskOptions(
            settings=told.settings,
            reward_model=told.reward_model,
            reward=told.reward,
            reward_timeout=told.reward_timeout,
            device=device,
            dtype=None if told.reward_dtype is None else DTYPES[told.reward_dtype],
            reward_batch_size=settings.data_collection.reward_batch_size,
            processes=told.processes,
            allow_unconfined=told.allow_unconfined,
        )
        return make_task(name if told.task is None else told.task, options)
    except UsageError as problem:
        raise UsageError(f"datasets.{name}: {problem}") from None


def reward_input(dataset: str) -> str:
    """The key of a run's inputs for the digest of the function that scores a data set."""
    return f"datasets.{dataset}, reward"


def training_problems(settings: Settings, name: str, task: Task) -> list[Problem]:
    """The problems that every round asks. Raises UsageError where there are not so many."""
    told = settings.data_collection
    return list(_asked(task, Split.TRAIN, told.max_examples, told.seed, f"data_collection.max_examples, {name}"))


def evaluation_problems(settings: Settings, name: str, task: Task) -> list[Problem]:
    """The problems that every evaluation on this data set asks. Raises UsageError where there are not so many."""
    told = settings.evaluation
    seed = settings.data_collection.seed
    return list(_asked(task, Split(told.split), told.max_examples, seed, f"evaluation.max_examples, {name}"))


def _asked(task: Task, split: Split, count: int, seed: int, where: str) -> list[Problem]:
    try:
        found = list(task.problems(split, count or None, seed))
    except UsageError as problem:
        raise UsageError(f"{where}: {problem}") from None
    if not found:
        raise GpuherdError(f"{where}: there is no problem")
    if len({each.id for each in found}) < len(found):
        raise GpuherdError(f"{where}: two problems have one id")
    return found
