"""The losses that a value classifier is trained by, as functions of tensors.

All but ``bradley_terry`` give one number a token; what is minimised is their mean over the labelled tokens of a batch
(``token_sum`` over a number of tokens), so that each pair of prefix and reward counts alike, as in the maximum
likelihood of Q#'s Algorithm 1 (Zhou et al. 2025, arXiv 2502.20548). z is float32 whatever the body computes in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
