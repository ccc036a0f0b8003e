"""The loss of a value classifier: examples as padded tensors, the losses, and the objective of an optimiser step.

All but ``bradley_terry`` give one number a token; the minimised figure is their mean over the labelled tokens of a
batch (``token_sum`` over a number of tokens), so that each pair of prefix and reward counts alike, as in the maximum
likelihood of Q#'s Algorithm 1 (Zhou et al. 2025, arXiv 2502.20548). z is float32 whatever the body computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gpuherd.posttrain.engine.fit import made_ahead
from gpuherd.posttrain.guidance.data import Example, LabelledSequence
from gpuherd.posttrain.guidance.options import Loss

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Values = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of ids and mask: a classifier's module


class SequenceArrays(NamedTuple):
    """A sequence: ids (tokens,) int64, labelled (tokens,) bool, and its target. Not tensors: each that comes from
    another process holds a file open, and a batch of some hundred would wait for ever."""

    ids: NDArray[np.int64]
    labelled: NDArray[np.bool_]
    target: float


ExampleArrays = tuple[SequenceArrays, ...]  # an example as arrays


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of some examples, a row each, padded at the right.

    Attributes:
        ids: (rows, tokens) int64, 0 where nothing is.
        mask: (rows, tokens) int64, 0 where nothing is.
        labelled: (rows, tokens) bool.
        target: (rows,) float32.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    labelled: torch.Tensor
    target: torch.Tensor


def sequence_arrays(sequence: LabelledSequence) -> SequenceArrays:
    """The arrays of one sequence."""
    import numpy as np

    return SequenceArrays(np.array(sequence.ids, np.int64), np.array(sequence.labelled, np.bool_), sequence.target)


def labelled_tokens(examples: Sequence[ExampleArrays]) -> float:
    """How many tokens of them are labelled."""
    return float(sum(int(each.labelled.sum()) for example in examples for each in example))


def collate(examples: Sequence[ExampleArrays], device: str) -> Batch:
    """All sequences of some examples in one block: of the first example, then of the second."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    sequences = [each for example in examples for each in example]
    ids = [torch.from_numpy(each.ids) for each in sequences]
    return Batch(
        ids=pad_sequence(ids, batch_first=True).to(device),
        mask=pad_sequence([torch.ones_like(each) for each in ids], batch_first=True).to(device),
        labelled=pad_sequence([torch.from_numpy(each.labelled) for each in sequences], batch_first=True).to(device),
        target=torch.tensor([each.target for each in sequences], dtype=torch.float32, device=device),
    )


def batches_of(
    examples: Sequence[Example], batches: Sequence[Sequence[int]], workers: int
) -> Iterator[list[ExampleArrays]]:
    """The batches as arrays, in their order; with ``workers`` that many processes make them ahead of time."""
    return made_ahead(partial(_batch, examples, batches), range(len(batches)), workers)


def _batch(examples: Sequence[Example], batches: Sequence[Sequence[int]], number: int) -> list[ExampleArrays]:
    return [tuple(map(sequence_arrays, examples[place])) for place in batches[number]]


def bce(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """-[r ln sigmoid(z) + (1 - r) ln(1 - sigmoid(z))]: the likelihood of a reward of 0 or 1 (Q# with a Bernoulli head).

    Args:
        z: (rows, tokens).
        target: (rows,), in [0, 1].
    """
    import torch

    z = z.float()
    return torch.nn.functional.binary_cross_entropy_with_logits(
        z, target.float()[:, None].expand_as(z), reduction="none"
    )


def mse(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(sigmoid(z) - r)^2, whose least lies at the expected reward: CD's "FUDGE" loss (Mudgal et al. 2024, arXiv
    2310.17022), read through the sigmoid that guidance reads through.

    Args:
        z: (rows, tokens).
        target: (rows,), in [0, 1].
    """
    return (z.float().sigmoid() - target.float()[:, None]).square()


def mle(z: torch.Tensor, target: torch.Tensor, atoms: torch.Tensor) -> torch.Tensor:
    """-sum_i m_i ln p_i, p the softmax of z and m the reward's mass on the atoms: the maximum likelihood of Q#'s
    histogram; of a reward between two atoms both have a share (``projected``).

    Args:
        z: (rows, tokens, atoms).
        target: (rows,).
        atoms: (atoms,), ascending and equally spaced.
    """
    import torch

    mass = projected(target, atoms)
    return -(mass[:, None, :] * torch.log_softmax(z, dim=-1, dtype=torch.float32)).sum(dim=-1)


def projected(target: torch.Tensor, atoms: torch.Tensor) -> torch.Tensor:
    """Each reward's mass on the atoms, (rows, atoms), float32, with the reward as its mean.

    The two neighbours of a reward share it in proportion to how near they are (the projection of Bellemare et al. 2017,
    arXiv 1707.06887, eq. 7); one outside of the atoms is put at their end.
    """
    atoms = atoms.double()
    width = atoms[1] - atoms[0]
    kept = target.double().clamp(float(atoms[0]), float(atoms[-1]))
    return (1 - (kept[:, None] - atoms[None]).abs() / width).clamp(min=0).float()


def bradley_terry(
    z_chosen: torch.Tensor, chosen: torch.Tensor, z_rejected: torch.Tensor, rejected: torch.Tensor
) -> torch.Tensor:
    """-ln sigmoid(mean of z over the preferred completion - mean of z over the other), (pairs,): Bradley and Terry
    (1952) with the mean logit of a completion's tokens as its worth, as in PITA's code.

    The level of z is left open by it: only differences between completions are learnt.

    Args:
        z_chosen, z_rejected: (pairs, tokens).
        chosen, rejected: which tokens are labelled, the same shapes.
    """
    import torch

    def worth(z: torch.Tensor, labelled: torch.Tensor) -> torch.Tensor:
        return (z.float() * labelled).sum(dim=-1) / labelled.sum(dim=-1)

    return -torch.nn.functional.logsigmoid(worth(z_chosen, chosen) - worth(z_rejected, rejected))


def token_sum(losses: torch.Tensor, labelled: torch.Tensor) -> torch.Tensor:
    """The sum over the labelled tokens, a scalar; what stands at the others does not count, NaN neither.

    Args:
        losses, labelled: (rows, tokens).
    """
    return losses.masked_fill(~labelled, 0).sum()


def expected(z: torch.Tensor, atoms: torch.Tensor | None) -> torch.Tensor:
    """The reward that a classifier expects, (rows, tokens): sigmoid(z), or the mean of its histogram.

    Args:
        z: (rows, tokens), or with atoms (rows, tokens, atoms).
        atoms: (atoms,), None for a head of one logit.
    """
    import torch

    if atoms is None:
        return z.float().sigmoid()
    return torch.softmax(z, dim=-1, dtype=torch.float32) @ atoms.float()


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss, as a sum over examples and what it is divided by.

    Attributes:
        loss: which.
        atoms: of a histogram, (atoms,) float32; None for a head of one logit.
        device: where the classifier is.
    """

    loss: Loss
    atoms: torch.Tensor | None
    device: str

    def total(self, values: Values, examples: Sequence[ExampleArrays]) -> torch.Tensor:
        """The sum of the losses of some examples, a scalar."""
        batch = collate(examples, self.device)
        return self.of(values(batch.ids, batch.mask), batch)

    def of(self, z: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The same, of values that have been read: (rows, tokens), or with atoms (rows, tokens, atoms)."""
        if self.loss is Loss.BRADLEY_TERRY:
            chosen, rejected = slice(0, None, 2), slice(1, None, 2)
            return bradley_terry(z[chosen], batch.labelled[chosen], z[rejected], batch.labelled[rejected]).sum()
        if self.atoms is not None:
            return token_sum(mle(z, batch.target, self.atoms), batch.labelled)
        each = mse if self.loss is Loss.MSE else bce
        return token_sum(each(z, batch.target), batch.labelled)

    def weight(self, examples: Sequence[ExampleArrays]) -> float:
        """What the sum is divided by: the labelled tokens; of ``bradley_terry`` the comparisons."""
        return float(len(examples)) if self.loss is Loss.BRADLEY_TERRY else labelled_tokens(examples)
