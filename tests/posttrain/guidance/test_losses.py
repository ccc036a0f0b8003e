"""The losses against closed forms, and examples as padded batches."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Sequence

import pytest
import torch

from gpuherd.posttrain.guidance import losses
from gpuherd.posttrain.guidance.data import LabelledSequence

Z = [[0.3, -1.2, 40.0], [2.0, 0.0, -0.7]]
MASK = [[False, True, True], [True, True, False]]
TARGET = [1.0, 0.25]
ATOM_Z = [[[0.1, 2.0, -1.0], [0.0, 0.0, 0.0]], [[3.0, -2.0, 0.5], [1.0, 1.0, 2.0]]]
ATOMS = [0.0, 0.5, 1.0]


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def softplus(z: float) -> float:
    return math.log1p(math.exp(-abs(z))) + max(z, 0.0)


def softmax(z: Sequence[float]) -> list[float]:
    mass = [math.exp(each) for each in z]
    return [each / sum(mass) for each in mass]


def test_bce_and_its_gradient() -> None:
    z = torch.tensor(Z, requires_grad=True)
    mask = torch.tensor(MASK)
    total = losses.token_sum(losses.bce(z, torch.tensor(TARGET)), mask)
    total.backward()  # type: ignore[no-untyped-call]
    by_hand, gradient = 0.0, [[0.0] * 3, [0.0] * 3]
    for row, target in enumerate(TARGET):
        for place in range(3):
            if MASK[row][place]:
                by_hand += target * softplus(-Z[row][place]) + (1 - target) * softplus(Z[row][place])
                gradient[row][place] = sigmoid(Z[row][place]) - target
    assert total.item() == pytest.approx(by_hand, rel=1e-6)
    assert z.grad is not None
    torch.testing.assert_close(z.grad, torch.tensor(gradient))


def test_mse_and_its_gradient() -> None:
    z = torch.tensor(Z, requires_grad=True)
    total = losses.token_sum(losses.mse(z, torch.tensor(TARGET)), torch.tensor(MASK))
    total.backward()  # type: ignore[no-untyped-call]
    by_hand, gradient = 0.0, [[0.0] * 3, [0.0] * 3]
    for row, target in enumerate(TARGET):
        for place in range(3):
            if MASK[row][place]:
                p = sigmoid(Z[row][place])
                by_hand += (p - target) ** 2
                gradient[row][place] = 2 * (p - target) * p * (1 - p)
    assert total.item() == pytest.approx(by_hand, rel=1e-6)
    assert z.grad is not None
    torch.testing.assert_close(z.grad, torch.tensor(gradient))


def test_mle_and_its_gradient() -> None:
    mass = [[0.0, 0.0, 1.0], [0.5, 0.5, 0.0]]  # of 1.0 and 0.25 on the atoms 0, 0.5, 1
    z = torch.tensor(ATOM_Z, requires_grad=True)
    total = losses.mle(z, torch.tensor(TARGET), torch.tensor(ATOMS)).sum()
    total.backward()  # type: ignore[no-untyped-call]
    by_hand = 0.0
    gradient = torch.zeros(2, 2, 3)
    for row in range(2):
        for place in range(2):
            p = softmax(ATOM_Z[row][place])
            by_hand -= sum(m * math.log(each) for m, each in zip(mass[row], p, strict=True))
            gradient[row, place] = torch.tensor([each - m for m, each in zip(mass[row], p, strict=True)])
    assert total.item() == pytest.approx(by_hand, rel=1e-6)
    assert z.grad is not None
    torch.testing.assert_close(z.grad, gradient)


def test_a_rewards_mass_has_the_reward_as_its_mean_and_ends_at_the_outermost_atoms() -> None:
    atoms = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    mass = losses.projected(torch.tensor([-1.0, 0.0, 0.3, 1.9, 2.0, 7.0, -3.0]), atoms)
    torch.testing.assert_close(mass.sum(dim=1), torch.ones(7))
    torch.testing.assert_close(mass @ atoms, torch.tensor([-1.0, 0.0, 0.3, 1.9, 2.0, 2.0, -1.0]))
    assert mass[1].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert (mass[2] > 0).tolist() == [False, True, True, False]


def test_bradley_terry_and_its_gradient() -> None:
    z = torch.tensor(Z, requires_grad=True)
    chosen, rejected = torch.tensor(MASK[:1]), torch.tensor(MASK[1:])
    total = losses.bradley_terry(z[:1], chosen, z[1:], rejected).sum()
    total.backward()  # type: ignore[no-untyped-call]
    gap = (-1.2 + 40.0) / 2 - (2.0 + 0.0) / 2
    assert total.item() == pytest.approx(softplus(-gap), rel=1e-6)
    slope = -(1 - sigmoid(gap)) / 2
    assert z.grad is not None
    torch.testing.assert_close(z.grad, torch.tensor([[0.0, slope, slope], [-slope, -slope, 0.0]]))


@pytest.mark.parametrize("loss", [losses.bce, losses.mse])
def test_what_is_not_labelled_never_counts(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    broken = torch.tensor([[math.nan, 0.5]])
    mask = torch.tensor([[False, True]])
    whole = losses.token_sum(loss(broken, torch.tensor([1.0])), mask)
    assert whole.item() == pytest.approx(loss(torch.tensor([[0.5]]), torch.tensor([1.0])).item())


def test_the_expected_reward_is_a_probability_or_a_histograms_mean() -> None:
    assert losses.expected(torch.tensor([[0.0, 2.0]]), None)[0].tolist() == pytest.approx([0.5, sigmoid(2.0)])
    told = losses.expected(torch.tensor(ATOM_Z), torch.tensor(ATOMS))
    by_hand = sum(p * a for p, a in zip(softmax(ATOM_Z[1][0]), ATOMS, strict=True))
    assert told[1, 0].item() == pytest.approx(by_hand, rel=1e-6)
    assert told[0, 1].item() == pytest.approx(0.5)


def test_half_precision_is_computed_in_float32() -> None:
    z = torch.tensor(Z, dtype=torch.bfloat16)
    assert losses.bce(z, torch.tensor(TARGET)).dtype == torch.float32
    assert losses.mse(z, torch.tensor(TARGET)).dtype == torch.float32
    assert losses.mle(z[:, None].bfloat16(), torch.tensor(TARGET), torch.tensor(ATOMS)).dtype == torch.float32


def sequence(length: int) -> LabelledSequence:
    return LabelledSequence("p", tuple(range(length)), (False,) + (True,) * (length - 1), 0.5)


def test_examples_are_padded_at_the_right() -> None:
    ((first, second),) = losses.batches_of([(sequence(2),), (sequence(4),)], [(0, 1)], 0)
    batch = losses.collate([first, second], "cpu")
    assert batch.ids.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert batch.mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.labelled.tolist() == [[False, True, False, False], [False, True, True, True]]
    assert (batch.ids.dtype, batch.target.dtype, batch.target.tolist()) == (torch.int64, torch.float32, [0.5, 0.5])
    assert losses.labelled_tokens([first, second]) == 4


@pytest.mark.timeout(60)
def test_other_processes_make_large_batches_too() -> None:
    """A tensor of another process holds a file open: more of them than may be open would be waited for for ever."""
    examples = [(sequence(2 + number % 3),) for number in range(1200)]
    batches = [range(start, start + 400) for start in range(0, 1200, 400)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        made = list(losses.batches_of(examples, batches, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for one, other in zip(losses.batches_of(examples, batches, 0), made, strict=True):
        assert torch.equal(losses.collate(one, "cpu").ids, losses.collate(other, "cpu").ids)
        assert len(one) == 400
