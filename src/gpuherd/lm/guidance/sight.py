"""Which tokens see which, where candidates for one place are read beside each other (tree attention). Pure tensors.

Imports torch: imported only where a classifier is asked.
"""

from __future__ import annotations

import torch


def sight(
    mask: torch.Tensor,
    positions: torch.Tensor,
    new_mask: torch.Tensor,
    new_positions: torch.Tensor,
    own: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """Which keys each new token sees: (rows, 1, new, kept + new) of bool. Every token sees itself.

    Args:
        mask: (rows, kept): which of the tokens that are kept count.
        positions: (rows, kept) of them.
        new_mask, new_positions: (rows, new) of the tokens that are read now.
        own: (new, new) of bool: which of the new ones may see which.
        window: a token sees this many back, itself counted; None: all.
    """
    keys = torch.cat([positions, new_positions], dim=1)[:, None, :]
    counted = torch.cat([mask, new_mask], dim=1).bool()[:, None, :]
    kept, new = mask.shape[1], new_mask.shape[1]
    allowed = torch.cat([own.new_ones((new, kept)), own], dim=1)[None]
    seen = allowed & counted
    if window is not None:
        seen = seen & (keys > new_positions[:, :, None] - window)
    itself = torch.zeros((new, kept + new), dtype=torch.bool, device=own.device)
    itself[:, kept:].fill_diagonal_(fill_value=True)
    return (seen | itself)[:, None]


def candidates_own(pending: int, candidates: int, device: torch.device) -> torch.Tensor:
    """Of so many tokens in a row and the candidates for the place behind them which see which: (new, new) of bool.

    The former see those before them, candidates the former and not each other; each sees itself.
    """
    own = torch.eye(pending + candidates, dtype=torch.bool, device=device)
    own[:pending, :pending] = True
    own[:pending, :pending].tril_()
    own[pending:, :pending] = True
    return own
