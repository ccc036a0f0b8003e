"""What is added to a candidate: the formulas against plain sums, and their limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Guide, Mode

torch = pytest.importorskip("torch")

from gpuherd.lm.guidance.guide import offsets  # noqa: E402

LOGITS = st.floats(-20, 20, width=32)
ETAS = st.floats(0.02, 100)


@settings(max_examples=25, deadline=None)
@given(LOGITS, ETAS)
def test_bernoulli_is_the_log_of_the_expected_exponential_reward(value: float, eta: float) -> None:
    p = 1 / (1 + math.exp(-value))
    told = offsets(torch.tensor([value]), Mode.BERNOULLI, eta).item()
    assert told == pytest.approx(math.log1p(p * math.expm1(1 / eta)), rel=1e-9, abs=1e-12)
    assert -1e-12 <= told <= 1 / eta + 1e-9  # never more than the best reward is worth


@settings(max_examples=25, deadline=None)
@given(st.lists(LOGITS, min_size=3, max_size=3), ETAS)
def test_atoms_are_the_same_over_several_rewards(values: list[float], eta: float) -> None:
    rewards = (-0.5, 0.1, 1.0)
    weights = [math.exp(value - max(values)) for value in values]
    p = [weight / math.fsum(weights) for weight in weights]
    logits = torch.tensor([values])
    told = offsets(logits, Mode.DISTRIBUTIONAL, eta, rewards).item()
    expected = math.log(math.fsum(each * math.exp(r / eta) for each, r in zip(p, rewards, strict=True)))
    assert told == pytest.approx(expected, rel=1e-7, abs=1e-9)
    expectation = offsets(logits, Mode.EXPECTATION, eta, rewards).item()
    assert expectation == pytest.approx(math.fsum(p[i] * rewards[i] for i in range(3)) / eta, rel=1e-6, abs=1e-9)
    assert told >= expectation - 1e-9  # Jensen: CD's policy values luck less


@settings(max_examples=25, deadline=None)
@given(LOGITS)
def test_two_atoms_of_0_and_1_are_a_bernoulli(value: float) -> None:
    one = offsets(torch.tensor([value]), Mode.BERNOULLI, 0.3)
    other = offsets(torch.tensor([[0.0, value]]), Mode.DISTRIBUTIONAL, 0.3, (0.0, 1.0))
    assert one.item() == pytest.approx(other.item(), rel=1e-9)


def test_small_and_large_eta() -> None:
    values = torch.tensor([-3.0, 0.0, 3.0])
    assert offsets(values, Mode.BERNOULLI, math.inf).tolist() == [0, 0, 0]
    assert offsets(values, Mode.EXPECTATION, math.inf).tolist() == [0, 0, 0]
    # As eta grows, eta times the offset is the expected reward: CD's is Q#'s there.
    assert (1e6 * offsets(values, Mode.BERNOULLI, 1e6)).tolist() == pytest.approx(torch.sigmoid(values).tolist(), 1e-5)
    # As it falls, all that can win may.
    told = offsets(values, Mode.BERNOULLI, 1e-3)
    assert (1e-3 * told).tolist() == pytest.approx([1, 1, 1], abs=0.01)
    assert torch.isfinite(offsets(torch.tensor([-1e4, 1e4, -math.inf, math.inf]), Mode.BERNOULLI, 1e-3)).all()


def test_it_can_raise_a_token_as_well_as_suppress_one() -> None:
    """A public code clamped the expectation so that it only suppressed."""
    told = offsets(torch.tensor([4.0, -4.0]), Mode.EXPECTATION, 0.5)
    assert told[0] > 1.9 > 0.1 > told[1] > 0


def test_a_mode_that_does_not_go_with_the_head_is_refused() -> None:
    with pytest.raises(UsageError, match="use distributional"):
        offsets(torch.zeros(1, 2), Mode.BERNOULLI, 1, (0.0, 1.0))
    with pytest.raises(UsageError, match="use bernoulli"):
        offsets(torch.zeros(1), Mode.DISTRIBUTIONAL, 1)


@pytest.mark.parametrize("wrong", [{"eta": 0.0}, {"eta": -1.0}, {"eta": math.nan}, {"eta": 1e-310}, {"top_k": 0}])
def test_a_guide_of_senseless_numbers_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Guide("folder", **wrong)  # type: ignore[arg-type]
