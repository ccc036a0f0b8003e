"""Rows as algorithms collect them, with what a test does not care about filled in."""

from __future__ import annotations

from gpuherd.posttrain.types import Comparison, Rollout


def rollout(
    problem: str = "p",
    prompt: tuple[int, ...] = (9, 8),
    ids: tuple[int, ...] = (1, 2, 3),
    *,
    reward: float | None = None,
    correct: bool | None = True,
    rolled_in: int = 0,
    by_policy: tuple[bool, ...] | None = None,
    sample: int = 0,
) -> Rollout:
    """A rollout of one turn; without ``reward`` 1 where it is right, else 0."""
    return Rollout(
        problem=problem,
        sample=sample,
        prompt_ids=prompt,
        ids=ids,
        by_policy=(True,) * len(ids) if by_policy is None else by_policy,
        log_probs=(None,) * len(ids),
        text="",
        reward=float(bool(correct)) if reward is None else reward,
        correct=correct,
        finished=True,
        rolled_in=rolled_in,
    )


def comparison(
    problem: str = "p",
    context: tuple[int, ...] = (1,),
    chosen: tuple[int, ...] = (2, 3),
    rejected: tuple[int, ...] = (4,),
    *,
    chosen_reward: float | None = 1.0,
    rejected_reward: float | None = 0.0,
) -> Comparison:
    """A comparison behind the prompt (9, 8)."""
    return Comparison(problem, (9, 8), context, chosen, rejected, "", "", chosen_reward, rejected_reward)
