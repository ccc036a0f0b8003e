"""Means over the tokens of a step, added up while its losses are computed. Torch inside functions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from gpuherd.posttrain.engine.world import World


class Tally:
    """Sums of figures of tokens, over the micro-batches of this process and then over all processes."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, mask: Tensor, **figures: Tensor) -> None:
        """Figures of each token, (rows, tokens); those that the mask leaves out don't count."""
        chosen = mask.bool()
        for name, each in {**figures, "tokens": chosen}.items():
            added = each.detach().double().masked_fill(~chosen, 0.0).sum()
            self._sums[name] = self._sums[name] + added if name in self._sums else added

    def means(self, world: World, names: tuple[str, ...]) -> dict[str, float]:
        """The mean of each figure over all tokens of all processes that were added; 0 where there were none.

        All processes ask for the same names.
        """
        import torch

        nothing = torch.zeros((), dtype=torch.float64)
        mine = torch.stack([self._sums.get(name, nothing).cpu() for name in (*names, "tokens")])
        *sums, tokens = world.sum(mine.to(world.device)).tolist()
        return {name: total / max(tokens, 1.0) for name, total in zip(names, sums, strict=True)}
