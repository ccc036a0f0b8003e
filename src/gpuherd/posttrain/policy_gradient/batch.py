"""Rollouts as tensors: prompts padded at the left, what follows at the right, so that all answers begin together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuherd.posttrain.types import Rollout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Some rollouts.

    Attributes:
        ids, mask: (rows, prompt + tokens) int64: all tokens, and 1 for those that are none of padding.
        answers: (rows, tokens) int64: what follows the prompts.
        by_policy: (rows, tokens) bool: what the policy chose, padding false.
    """

    ids: Tensor
    mask: Tensor
    answers: Tensor
    by_policy: Tensor


def batch_of(rollouts: Sequence[Rollout], device: str) -> Batch:
    """These rollouts on a device. Padding is token 0, which the mask hides."""
    import torch

    left = max(len(each.prompt_ids) for each in rollouts)
    right = max(len(each.ids) for each in rollouts)
    ids, mask, chosen = [], [], []
    for each in rollouts:
        before, behind = left - len(each.prompt_ids), right - len(each.ids)
        ids.append([*[0] * before, *each.prompt_ids, *each.ids, *[0] * behind])
        mask.append([*[0] * before, *[1] * (len(each.prompt_ids) + len(each.ids)), *[0] * behind])
        chosen.append([*each.by_policy, *[False] * behind])
    tokens = torch.tensor(ids, device=device)
    return Batch(
        ids=tokens,
        mask=torch.tensor(mask, device=device),
        answers=tokens[:, left:],
        by_policy=torch.tensor(chosen, dtype=torch.bool, device=device),
    )


def rectangle(rows: Sequence[Sequence[float]], width: int, device: str) -> Tensor:
    """Numbers of each row, (rows, width) float32, 0 behind them."""
    import torch

    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float32, device=device)
