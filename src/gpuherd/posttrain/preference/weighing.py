"""Which tokens of a rollout are imitated, and by what weight. Pure.

Of an episode of several turns two things can be learnt: what the policy said (behavioural cloning), and what the
environment answered (a model of the world). With both, the loss of a step is

    bc_weight * mean over the policy's tokens of -ln p + world_model_weight * mean over the others of -ln p

with means over all tokens of their kind in the step; a kind that a step has none of adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpuherd.posttrain.types import Rollout

NOT_TRAINED = -100  # transformers' word for a token that has no part in the loss


class Imitated(StrEnum):
    """What is learnt from."""

    BEHAVIORAL_CLONING = "behavioral_cloning"
    WORLD_MODEL = "world_model"
    COMBINED = "combined"


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the two kinds of tokens; one that is 0 is not trained on."""

    policy: float
    world: float

    def of(self, *, by_policy: bool) -> float:
        """Of a token."""
        return self.policy if by_policy else self.world


def row_of(rollout: Rollout, weights: Weights) -> dict[str, list[int]]:
    """``input_ids``, and ``labels`` of the tokens that have a weight."""
    trained = [
        token if weights.of(by_policy=own) else NOT_TRAINED
        for token, own in zip(rollout.ids, rollout.by_policy, strict=True)
    ]
    before = list(rollout.prompt_ids)
    return {"input_ids": [*before, *rollout.ids], "labels": [NOT_TRAINED] * len(before) + trained}


def is_trained_on(rollout: Rollout, weights: Weights) -> bool:
    """Whether any of its tokens has a weight."""
    return any(weights.of(by_policy=own) for own in rollout.by_policy)


def weighted(rollouts: Sequence[Rollout], order: Sequence[int], batch_size: int, weights: Weights) -> list[Any]:
    """A row for each place of ``order``, with ``weights`` of its tokens such that the sum of weight times -ln p over
    the rows of a step is the step's loss.

    Args:
        order: which rollout stands at each place; ``batch_size`` places are a step.
    """
    rows: list[Any] = []
    for start in range(0, len(order), batch_size):
        step = [rollouts[place] for place in order[start : start + batch_size]]
        kinds = [own for each in step for own in each.by_policy]
        counts = {True: kinds.count(True), False: kinds.count(False)}
        for each in step:
            of_tokens = [weights.of(by_policy=own) / counts[own] for own in each.by_policy]
            rows.append({**row_of(each, weights), "weights": [0.0] * len(each.prompt_ids) + of_tokens})
    return rows
