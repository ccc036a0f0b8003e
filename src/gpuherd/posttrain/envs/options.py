"""Which environment, and how it is made: the keys of a configuration's ``policy_env`` and ``eval_envs``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.types import Split


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
    """How an environment is made.

    Attributes:
        env_type: code, math, tool, debate, custom, or task (a task's problems, one turn each).
        dataset: a task's name or a file of problems.
        problems: the problems themselves, a mapping each, instead of ``dataset``.
        only: the split that all ``problems`` belong to; None: they are divided as those of a file are.
        timeout: seconds for a run of code.
        max_attempts: turns of the policy; None: code 3, math 2, tool 5, debate 3, task 1.
        custom_class: the dotted name of a class whose objects are ``interface.Environments``; made with
            ``custom_kwargs``.
        reward_scale, reward_bias, reward_clip: a turn's reward r becomes r * scale + bias, not beyond ± clip.
        settings: of the environment itself (the dataclass ``Settings`` in its file), or of the task.
        task: reward model or function, device and processes, as for tasks.
    """

    env_type: str = "task"
    dataset: str | None = None
    problems: tuple[Mapping[str, Any], ...] | None = None
    only: Split | None = None
    timeout: float = 5.0
    max_attempts: int | None = None
    custom_class: str | None = None
    custom_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reward_scale: float = 1.0
    reward_clip: float | None = None
    reward_bias: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    task: TaskOptions = field(default_factory=TaskOptions)

    def __post_init__(self) -> None:
        if self.max_attempts is not None and self.max_attempts < 1:
            raise UsageError(f"max_attempts={self.max_attempts}; the least is 1")
        if not 0 < self.timeout <= 3600:
            raise UsageError(f"timeout={self.timeout}; seconds above 0, and 3600 at most")
        if self.reward_clip is not None and not 0 < self.reward_clip < math.inf:
            raise UsageError(f"reward_clip={self.reward_clip}; above 0")
        if not (math.isfinite(self.reward_scale) and math.isfinite(self.reward_bias)) or self.reward_scale == 0:
            raise UsageError(
                f"reward_scale={self.reward_scale}, reward_bias={self.reward_bias}; finite, the scale not 0"
            )
        if self.task.reward is not None and self.env_type != "task":
            raise UsageError(f"reward is of env_type task; {self.env_type} says itself what answers earn")
        if self.dataset is not None and self.problems is not None:
            raise UsageError("dataset and problems both say what is asked; leave one out")
        if (self.env_type == "custom") != (self.custom_class is not None):
            raise UsageError("env_type custom and custom_class=package.module.Class belong together")
