"""Which of a problem's rollouts are compared. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpuherd.posttrain.types import Comparison, Rollout


def best_and_worst(rollouts: Sequence[Rollout]) -> Comparison | None:
    """The rollout of the highest reward, preferred to that of the lowest; of several, the first drawn.

    None where all earned the same, or the two say the same: nothing can be learnt from them.

    Args:
        rollouts: of one problem, to one prompt.
    """
    if not rollouts:
        return None
    best = min(rollouts, key=lambda each: (-each.reward, each.sample))
    worst = min(rollouts, key=lambda each: (each.reward, each.sample))
    return compared(best, worst) if best.reward > worst.reward else None


def compared(chosen: Rollout, rejected: Rollout) -> Comparison | None:
    """``chosen`` preferred to ``rejected``; None where they are token by token the same."""
    if chosen.ids == rejected.ids:
        return None
    return Comparison(
        problem=chosen.problem,
        prompt_ids=chosen.prompt_ids,
        context_ids=(),
        chosen_ids=chosen.ids,
        rejected_ids=rejected.ids,
        chosen=chosen.text,
        rejected=rejected.text,
        chosen_reward=chosen.reward,
        rejected_reward=rejected.reward,
    )


def by_problem(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Rollouts of one problem and one prompt together, in the order in which they first come."""
    groups: dict[tuple[str, tuple[int, ...]], list[Rollout]] = {}
    for each in rollouts:
        groups.setdefault((each.problem, each.prompt_ids), []).append(each)
    return list(groups.values())
