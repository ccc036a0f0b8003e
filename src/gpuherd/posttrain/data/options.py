"""Options of tasks, and their registration by name. No torch.

A task is made by a function that takes its own settings and the options that all tasks share. It registers itself:

    @task("imdb", Settings)
    def make_imdb(settings: Settings, options: TaskOptions) -> Task: ...

``registry.make_task`` finds it by that name; its settings are read from the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.typed import at_least
from gpuherd.posttrain.types import Task

REWARD_TIMEOUT_S = 60.0  # for a batch

Settings = TypeVar("Settings")


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """How a task is made.

    Attributes:
        settings: those of the task itself, by name (a frozen dataclass in the task's module).
        reward_model: id or folder of a sequence classifier, for tasks that score by one; None: the task's own.
        reward: a function of the user's that scores in place of the task (``rewards.function.FunctionName``); None: the
            task itself.
        reward_timeout: seconds of that function for a batch.
        device, dtype: of that model; ``dtype`` None: the checkpoint's.
        reward_batch_size: completions that a reward model reads at once.
        processes: how many processes compare formulas or run code side by side; None: one a core, at most
            four of the first and eight of the second.
        allow_unconfined: run code of strangers even where the kernel gives no protection against it.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    reward_model: str | None = None
    reward: str | None = None
    reward_timeout: float = REWARD_TIMEOUT_S
    device: str = "cpu"
    dtype: str | None = None
    reward_batch_size: int = 32
    processes: int | None = None
    allow_unconfined: bool = False

    def __post_init__(self) -> None:
        at_least(self, reward_batch_size=1, processes=1)
        if self.reward is not None and self.reward_model is not None:
            raise UsageError("reward and reward_model both say what scores; keep one")
        if self.reward is None and self.reward_timeout != REWARD_TIMEOUT_S:
            raise UsageError(
                f"reward_timeout={self.reward_timeout:g} is of a reward function; reward=FILE.py:NAME says which"
            )


Maker = Callable[[Settings, TaskOptions], Task]


@dataclass(frozen=True, slots=True)
class NamedTask:
    """A task that is known by a name: the dataclass of its settings, and what makes it of these."""

    name: str
    settings: type
    make: Callable[[Any, TaskOptions], Task]


NAMED: dict[str, NamedTask] = {}  # filled by ``task``; ``registry.tasks()`` has imported all that register
ALIASES: dict[str, str] = {}


def task(
    name: str, settings: type[Settings], *, aliases: Sequence[str] = ()
) -> Callable[[Maker[Settings]], Maker[Settings]]:
    """Registers the function that follows as what makes the task of this name. Raises ValueError if it is taken."""

    def register(make: Maker[Settings]) -> Maker[Settings]:
        for each in (name, *aliases):
            if each in NAMED or each in ALIASES:
                raise ValueError(f"there is a task {each!r} already")
        NAMED[name] = NamedTask(name, settings, make)
        ALIASES.update(dict.fromkeys(aliases, name))
        return make

    return register
