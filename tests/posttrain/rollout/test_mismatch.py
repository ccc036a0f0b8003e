"""The mismatch of sampler and trainer, and the weights that correct for it, by closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.posttrain.rollout.mismatch import Correction, Mismatch, importance_weights, mismatch, pooled

LN2 = math.log(2.0)
# w = 2, 1/2, 8 of the first row (the fourth is not the policy's), 1/8 and one that is not known of the second.
SAMPLER = torch.tensor([[-3.0, -1.0, -4.0, -1.0], [-1.0, -1.0, -1.0, -1.0]])
TRAIN = SAMPLER + torch.tensor([[LN2, -LN2, 3 * LN2, 5.0], [-3 * LN2, math.nan, 0.0, 0.0]])
MASK = torch.tensor([[True, True, True, False], [True, True, False, False]])


def weights(correction: Correction, cap: float = 2.0) -> list[list[float]]:
    found = importance_weights(TRAIN, SAMPLER, MASK, correction, cap)
    assert found.dtype == torch.float32 and not found.requires_grad
    return [[round(each, 5) for each in row] for row in found.tolist()]


def test_figures_are_of_the_tokens_with_both_log_probs() -> None:
    found = mismatch(TRAIN, SAMPLER, MASK)
    assert found is not None and found.tokens == 4
    assert found.mean == pytest.approx((2 + 0.5 + 8 + 0.125) / 4)
    assert found.max == pytest.approx(8)
    assert found.gap == pytest.approx(3 * LN2)
    assert found.kl == pytest.approx(-(1 - 1 + 3 - 3) * LN2 / 4, abs=1e-6)
    assert mismatch(TRAIN, SAMPLER, torch.zeros_like(MASK)) is None


def test_batches_pooled_are_as_one() -> None:
    whole = mismatch(TRAIN, SAMPLER, MASK)
    assert whole is not None
    parts = [mismatch(TRAIN[row : row + 1], SAMPLER[row : row + 1], MASK[row : row + 1]) for row in (0, 1)]
    found = pooled([None, *parts])
    assert found is not None and found.tokens == whole.tokens
    assert (found.mean, found.max, found.gap) == pytest.approx((whole.mean, whole.max, whole.gap))
    assert found.kl == pytest.approx(whole.kl, abs=1e-9)
    assert pooled([None]) is None and pooled([]) is None


def test_rounding_is_no_figure() -> None:
    assert Mismatch(5, 1.0, 1.00005, 5e-5, 0.0).figures() == {}
    assert Mismatch(5, 1.1, 2.0, 0.7, 0.2).figures() == {
        "sampler_weight": 1.1,
        "sampler_weight_max": 2.0,
        "sampler_kl": 0.2,
    }


def test_weights_of_each_correction() -> None:
    assert weights(Correction.NONE) == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert weights(Correction.TOKEN) == [[2, 0.5, 2, 0], [0.125, 1, 0, 0]]
    assert weights(Correction.TOKEN, 8.5) == [[2, 0.5, 8, 0], [0.125, 1, 0, 0]]
    assert weights(Correction.MASKED_TOKEN, 2.001) == [[2, 0.5, 0, 0], [0, 1, 0, 0]]
    # The rows' products are 8 and 1/8.
    assert weights(Correction.SEQUENCE) == [[2, 2, 2, 0], [0.125, 0.125, 0, 0]]
    assert weights(Correction.SEQUENCE, 100.0) == [[8, 8, 8, 0], [0.125, 0.125, 0, 0]]
    assert weights(Correction.MASKED_SEQUENCE) == [[0, 0, 0, 0], [0, 0, 0, 0]]
    assert weights(Correction.MASKED_SEQUENCE, 8.001) == [[8, 8, 8, 0], [0.125, 0.125, 0, 0]]


def test_a_long_answer_overflows_nothing() -> None:
    sampler, mask = torch.full((1, 4000), -2.0), torch.ones(1, 4000, dtype=torch.bool)
    for sign in (1.0, -1.0):
        found = importance_weights(sampler + sign, sampler, mask, Correction.SEQUENCE)
        assert found.isfinite().all() and float(found[0, 0]) == pytest.approx(2.0 if sign > 0 else 0.0)


def test_a_cap_below_one_is_refused() -> None:
    for cap in (0.5, math.inf, math.nan):
        with pytest.raises(UsageError, match="cap of importance weights"):
            importance_weights(TRAIN, SAMPLER, MASK, Correction.TOKEN, cap)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.05, 1.0), min_size=2, max_size=6), st.lists(st.floats(0.05, 1.0), min_size=6, max_size=6))
def test_untruncated_weights_make_the_samplers_mean_the_trainers(sampler: list[float], train: list[float]) -> None:
    """E_sampler[w f] = E_train[f], exactly, summed over all tokens; and the expected figure of KL is the divergence."""
    q = torch.tensor(sampler, dtype=torch.float64) / sum(sampler)
    p = torch.tensor(train[: len(sampler)], dtype=torch.float64)
    p = p / p.sum()
    mask = torch.ones(1, len(sampler), dtype=torch.bool)
    w = importance_weights(p.log()[None], q.log()[None], mask, Correction.TOKEN, 1e6)[0]
    value = torch.arange(len(sampler), dtype=torch.float64)
    assert float((q * w * value).sum()) == pytest.approx(float((p * value).sum()), rel=1e-5)
    one = [mismatch(p.log()[None, k : k + 1], q.log()[None, k : k + 1], mask[:, :1]) for k in range(len(sampler))]
    kl = sum(float(q[k]) * each.kl for k, each in enumerate(one) if each is not None)
    assert kl == pytest.approx(float((q * (q / p).log()).sum()), abs=1e-6)
