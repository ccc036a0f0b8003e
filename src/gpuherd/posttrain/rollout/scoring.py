"""What completions earn, asked for in batches, and refused where it is no number."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpuherd.errors import printable
from gpuherd.posttrain.rewards.guarded import BadReward, rewards_of
from gpuherd.posttrain.types import Problem, Reward, Task

_SHOWN = 80  # characters of a completion


def scored(task: Task, problems: Sequence[Problem], completions: Sequence[str], batch_size: int = 32) -> list[Reward]:
    """The reward of each completion, in order, ``batch_size`` scored at once; the least where scoring one fails.

    Raises BadReward for a reward that is not finite, with the task, the problem and the completion.
    """
    rewards: list[Reward] = []
    for start in range(0, len(completions), batch_size):
        some = problems[start : start + batch_size]
        found = rewards_of(task, task.name, some, completions[start : start + batch_size])
        if len(found) != len(some):
            raise BadReward(f"task {task.name}: {len(found)} rewards of {len(some)} completions")
        rewards += found
    for problem, completion, reward in zip(problems, completions, rewards, strict=True):
        if not math.isfinite(reward.value):
            shown = printable(completion if len(completion) <= _SHOWN else f"{completion[:_SHOWN]}…")
            raise BadReward(
                f"task {task.name}, problem {printable(problem.id)}: the reward of {shown!r} is {reward.value}; "
                "rewards are finite numbers"
            )
    return rewards
