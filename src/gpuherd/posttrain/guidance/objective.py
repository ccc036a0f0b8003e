"""What a step of training minimises, of lessons as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuherd.posttrain.guidance import losses, tensors
from gpuherd.posttrain.guidance.options import Loss
from gpuherd.posttrain.guidance.tensors import Material, Padded

if TYPE_CHECKING:
    import torch

    Values = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of ids and mask: a classifier's module


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss, as a sum over lessons and what it is divided by.

    Attributes:
        loss: which.
        atoms: of a histogram, (atoms,) float32; None for a head of one logit.
        device: where the classifier is.
    """

    loss: Loss
    atoms: torch.Tensor | None
    device: str

    def total(self, values: Values, materials: Sequence[Material]) -> torch.Tensor:
        """The sum of the losses of some lessons, a scalar."""
        batch = tensors.padded(materials, self.device)
        return self.of(values(batch.ids, batch.mask), batch)

    def of(self, z: torch.Tensor, batch: Padded) -> torch.Tensor:
        """The same, of values that have been read: (rows, tokens), or with atoms (rows, tokens, atoms)."""
        if self.loss is Loss.BRADLEY_TERRY:
            chosen, rejected = slice(0, None, 2), slice(1, None, 2)
            return losses.bradley_terry(z[chosen], batch.labelled[chosen], z[rejected], batch.labelled[rejected]).sum()
        if self.atoms is not None:
            return losses.token_sum(losses.mle(z, batch.target, self.atoms), batch.labelled)
        each = losses.mse if self.loss is Loss.MSE else losses.bce
        return losses.token_sum(each(z, batch.target), batch.labelled)

    def weight(self, materials: Sequence[Material]) -> float:
        """What the sum is divided by: the labelled tokens; of ``bradley_terry`` the comparisons."""
        return float(len(materials)) if self.loss is Loss.BRADLEY_TERRY else tensors.labelled_tokens(materials)
