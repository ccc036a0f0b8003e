"""Scoring that never raises because of a completion: after an unexpected exception it counts as a wrong answer.

Draws are deterministic, so a training that one completion ended would meet it again whenever it is resumed. Faults of
the installation, of the data and of the machine are GpuherdErrors, and pass: no completion is to blame for them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from gpuherd.errors import GpuherdError, printable
from gpuherd.posttrain.types import Problem, Reward
from gpuherd.runs.console import warn_once

logger = logging.getLogger(__name__)

Scored = TypeVar("Scored")


class BadReward(GpuherdError):
    """A task gave a reward that is no finite number, or another number of rewards than of completions."""


class Scorer(Protocol):
    """A task, or the scoring of one."""

    @property
    def reward_range(self) -> tuple[float, float]: ...

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]: ...


def rewards_of(scorer: Scorer, name: str, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
    """The rewards of completions; the least reward, and wrong, for those that the scorer raises for.

    A reward model has no least reward and no wrong answers: what it raises is raised.
    """
    least = scorer.reward_range[0]
    if not math.isfinite(least):
        return scorer.rewards(problems, completions)
    return guarded(
        scorer.rewards, name, problems, completions, lambda reason: Reward(least, correct=False, note=reason)
    )


def guarded(
    score: Callable[[Sequence[Problem], Sequence[str]], list[Scored]],
    name: str,
    problems: Sequence[Problem],
    completions: Sequence[str],
    wrong: Callable[[str], Scored],
) -> list[Scored]:
    """The results of ``score``. Where it raises, it is called for each completion by itself; one for which it raises
    again gets ``wrong`` of the reason."""
    try:
        return score(problems, completions)
    except GpuherdError:
        raise
    except Exception as problem:
        if len(completions) == 1:
            return [wrong(_reason(name, problem, problems[0].id))]
    alone = zip(problems, completions, strict=True)
    return [found for one, text in alone for found in guarded(score, name, [one], [text], wrong)]


def _reason(name: str, problem: Exception, which: str) -> str:
    """The reason of a reward where scoring raised. Logs the exception, the first of its kind with the traceback."""
    reason = f"scoring failed: {type(problem).__name__}: {problem}"
    message = "%s, problem %s: %s; this counts as a wrong answer, and so do others, of which the log says nothing more"
    warn_once(logger, f"scorer {name}", problem, message, name, printable(which), printable(reason))
    return reason
