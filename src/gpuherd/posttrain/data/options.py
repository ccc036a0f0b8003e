"""What a task is made with. Plain frozen data; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuherd.errors import UsageError

REWARD_TIMEOUT_S = 60.0  # for a batch


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """How a task is made.

    Attributes:
        settings: those of the task itself, by name (the frozen dataclass ``Settings`` in the task's file says which).
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
        if self.reward_batch_size < 1:
            raise UsageError(f"reward_batch_size={self.reward_batch_size}; the least is 1")
        if self.reward is not None and self.reward_model is not None:
            raise UsageError("reward and reward_model both say what scores; keep one")
        if self.processes is not None and self.processes < 1:
            raise UsageError(f"processes={self.processes}; the least is 1")
