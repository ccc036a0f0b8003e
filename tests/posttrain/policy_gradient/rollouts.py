"""Rollouts made by hand for the tests of losses: of all lengths, some with an environment's words in them."""

from __future__ import annotations

from collections.abc import Sequence

from gpuherd.posttrain.types import Rollout


def rollout(
    prompt: Sequence[int],
    ids: Sequence[int],
    *,
    by_policy: Sequence[bool] | None = None,
    log_probs: Sequence[float | None] | None = None,
    reward: float = 1.0,
    problem: str = "p",
    sample: int = 0,
    turn_rewards: tuple[tuple[int, float], ...] = (),
) -> Rollout:
    """One that says only what the test is about."""
    return Rollout(
        problem=problem,
        sample=sample,
        prompt_ids=tuple(prompt),
        ids=tuple(ids),
        by_policy=tuple(by_policy or [True] * len(ids)),
        log_probs=tuple(log_probs or [-1.0] * len(ids)),
        text="",
        reward=reward,
        correct=None,
        finished=True,
        turn_rewards=turn_rewards,
    )


MIXED = (
    rollout((5, 6, 7), (8, 9, 10, 11)),
    rollout((12,), (13,)),
    rollout((5, 6), (7, 20, 21, 22, 0), by_policy=(True, False, False, True, True)),
    rollout((30, 31, 32, 33, 34), (40, 41)),
)
