"""Losses and their gradients equal what plain loops in float64 say."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpuherd.posttrain.policy_gradient.advantages import KLControl
from gpuherd.posttrain.policy_gradient.algorithm import LossType
from gpuherd.posttrain.policy_gradient.objective import (
    approximate_kl,
    clipped_loss,
    clipped_share,
    kl_estimate,
    summed,
    total_weight,
    value_loss,
)

NUMBERS = st.floats(-2, 2).map(lambda value: round(value, 3))
STEP = 1e-6


def grid(values: list[float], wide: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(-1, wide)


def slopes(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The gradient by autograd of the sum of a loss."""
    leaf = at.clone().requires_grad_()
    loss(leaf).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


def check(loss: Callable[[Tensor], Tensor], by_hand: Callable[[int, float], float], at: Tensor) -> None:
    """Value and gradient of each element are those of a plain function of one number (its slope by differences)."""
    found, gradient = loss(at).flatten().tolist(), slopes(loss, at).flatten().tolist()
    for place, value in enumerate(at.flatten().tolist()):
        assert found[place] == pytest.approx(by_hand(place, value), abs=1e-12)
        slope = (by_hand(place, value + STEP) - by_hand(place, value - STEP)) / (2 * STEP)
        ahead = (by_hand(place, value + STEP) - by_hand(place, value)) / STEP
        behind = (by_hand(place, value) - by_hand(place, value - STEP)) / STEP
        assert any(gradient[place] == pytest.approx(each, abs=1e-5) for each in (slope, ahead, behind))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(NUMBERS, NUMBERS), min_size=4, max_size=4),
    st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.0, 1.0)]),
)
def test_the_clipped_loss(pairs: list[tuple[float, float]], clip: tuple[float, float]) -> None:
    log_ratio, advantages = grid([one for one, _ in pairs], 2), grid([two for _, two in pairs], 2)
    low, high = clip

    def by_hand(place: int, value: float) -> float:
        ratio, advantage = math.exp(value), pairs[place][1]
        return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)

    check(lambda at: clipped_loss(at, advantages, low, high), by_hand, log_ratio)
    gone = clipped_share(log_ratio, advantages, low, high).flatten().tolist()
    gradient = slopes(lambda at: clipped_loss(at, advantages, low, high), log_ratio).flatten().tolist()
    for share, slope, (_, advantage) in zip(gone, gradient, pairs, strict=True):
        assert not (share and slope)
        if advantage and not share:
            assert slope


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=4, max_size=4))
def test_the_kl_estimates(pairs: list[tuple[float, float]]) -> None:
    log_probs, reference = grid([one for one, _ in pairs], 2), grid([two for _, two in pairs], 2)

    def by_hand(place: int, value: float) -> float:
        gap = pairs[place][1] - value
        return math.exp(gap) - gap - 1

    check(lambda at: kl_estimate(at, reference), by_hand, log_probs)
    assert (kl_estimate(log_probs, reference) >= 0).all()
    wanted = [math.exp(value) - 1 - value for value in log_probs.flatten().tolist()]
    assert approximate_kl(log_probs).flatten().tolist() == pytest.approx(wanted)


def test_the_kl_estimate_is_unbiased() -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    exact = float((policy * (policy / reference).log()).sum())
    assert float((policy * kl_estimate(policy.log(), reference.log())).sum()) == pytest.approx(exact)


@settings(max_examples=40)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=4, max_size=4), st.sampled_from([None, 0.2, 1.0]))
def test_the_value_loss(triples: list[tuple[float, float, float]], clip: float | None) -> None:
    values, old, returns = (grid([each[part] for each in triples], 2) for part in range(3))

    def by_hand(place: int, value: float) -> float:
        _, before, wanted = triples[place]
        plain = (value - wanted) ** 2
        if clip is None:
            return plain / 2
        held = before + min(max(value - before, -clip), clip)
        return max(plain, (held - wanted) ** 2) / 2

    check(lambda at: value_loss(at, old, returns, clip), by_hand, values)


@pytest.mark.parametrize("kind", list(LossType))
def test_sums_over_micro_batches_make_the_mean_of_the_whole(kind: LossType) -> None:
    losses = torch.arange(1.0, 13.0).double().view(4, 3)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)
    tokens = [3, 1, 0, 2]
    whole = float(summed(losses, mask, kind)) / total_weight(tokens, kind, 5)
    parts = [summed(losses[rows], mask[rows], kind) for rows in (slice(0, 1), slice(1, 4))]
    weights = total_weight(tokens[:1], kind, 5) + total_weight(tokens[1:], kind, 5)

    assert float(sum(parts)) / weights == pytest.approx(whole)
    by_hand = {
        LossType.GRPO: (2.0 + 4.0 + 0.0 + 11.0) / 4,
        LossType.GSPO: (2.0 + 4.0 + 0.0 + 11.0) / 4,
        LossType.DAPO: (6.0 + 4.0 + 22.0) / 6,
        LossType.DR_GRPO: (6.0 + 4.0 + 22.0) / 20,
    }
    assert whole == pytest.approx(by_hand[kind])


def test_what_is_masked_has_no_gradient_and_no_nan() -> None:
    losses = torch.tensor([[1.0, float("inf")], [float("nan"), 2.0]], requires_grad=True)
    summed(losses, torch.tensor([[True, False], [False, True]]), LossType.GRPO).backward()  # type: ignore[no-untyped-call]
    assert losses.grad is not None and losses.grad.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_the_weight_of_the_divergence_goes_towards_its_target() -> None:
    control = KLControl(0.1, target=2.0, horizon=100)
    assert control.after(2.0, 50).weight == 0.1
    assert control.after(2.2, 50).weight == pytest.approx(0.1 * 1.05)
    assert control.after(100.0, 50).weight == pytest.approx(0.1 * 1.1)
    assert control.after(0.0, 50).weight == pytest.approx(0.1 * 0.9)
    assert KLControl(0.1).after(100.0, 50).weight == 0.1
