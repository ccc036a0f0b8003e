"""Draws have the distribution that was asked for, and depend on their keys alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gpuherd.lm.backend import Decoding
from gpuherd.lm.decoding import Key, draw_key

torch = pytest.importorskip("torch")

from gpuherd.lm import decoding  # noqa: E402
from gpuherd.lm.decoding import choose, exponentials, gumbel_max, warped  # noqa: E402

DRAWS = 20_000


def keys(count: int, seed: int = 0) -> list[Key]:
    return [draw_key(seed, "a question", sample, 0) for sample in range(count)]


def p_value(counts: Any, probabilities: Any) -> float:
    """Of Pearson's chi-square test; those that are too rare for it are taken together."""
    from scipy.stats import chisquare

    expected = probabilities.double() / probabilities.double().sum() * counts.sum()
    rare = expected < 5
    assert counts[expected == 0].sum() == 0
    if expected[rare].sum() > 0:
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    return float(chisquare(counts.numpy(), expected.numpy(), sum_check=False).pvalue)


@pytest.mark.parametrize("vocabulary", [5, 129])
def test_draws_have_the_distribution(vocabulary: int) -> None:
    log_probs = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)).mul(2).log_softmax(-1)
    drawn = gumbel_max(log_probs.expand(DRAWS, -1), keys(DRAWS))
    assert p_value(drawn.bincount(minlength=vocabulary), log_probs.exp()) > 1e-4


def test_the_test_of_the_distribution_would_see_a_wrong_one() -> None:
    log_probs = torch.randn(40, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    drawn = gumbel_max(log_probs.expand(DRAWS, -1) * 1.1, keys(DRAWS))
    assert p_value(drawn.bincount(minlength=40), log_probs.exp()) < 1e-6


@pytest.mark.parametrize(
    "how",
    [
        Decoding(samples=1, temperature=0.6),
        Decoding(samples=1, temperature=1.7, top_k=7),
        Decoding(samples=1, top_p=0.8),
        Decoding(samples=1, temperature=0.8, top_p=0.9, top_k=20),
        Decoding(samples=1, top_k=1),
        Decoding(samples=1, top_p=1e-9),
        Decoding(samples=1, top_k=10_000),
    ],
    ids=lambda how: f"T={how.temperature},p={how.top_p},k={how.top_k}",
)
def test_temperature_top_k_and_top_p_are_those_of_transformers(how: Decoding) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(16, 300, generator=torch.Generator().manual_seed(2)) * 3
    ids = torch.zeros((16, 1), dtype=torch.long)
    theirs = TemperatureLogitsWarper(how.temperature)(ids, logits)
    if how.top_k:
        theirs = TopKLogitsWarper(how.top_k)(ids, theirs)
    if how.top_p < 1:
        theirs = TopPLogitsWarper(how.top_p)(ids, theirs)
    ours = warped(logits.log_softmax(-1), how)
    assert torch.equal(ours.isinf(), theirs.isinf())
    assert torch.allclose(ours.softmax(-1), theirs.softmax(-1), atol=1e-6)


def test_equal_ones_at_the_bound_of_top_k_stay() -> None:
    ours = warped(torch.tensor([[2.0, 1.0, 1.0, 0.0]]).log_softmax(-1), Decoding(samples=1, top_k=2))
    assert ours.isinf().tolist() == [[False, False, False, True]]


def test_what_cannot_be_is_never_drawn() -> None:
    weights = torch.full((DRAWS, 300), -math.inf)
    weights[:, (3, 200)] = 0.0
    drawn = gumbel_max(weights, keys(DRAWS)).bincount(minlength=300)
    assert drawn[3] + drawn[200] == DRAWS
    assert abs(int(drawn[3]) - DRAWS / 2) < 6 * math.sqrt(DRAWS / 4)


def test_waiting_times_are_exponential_and_independent() -> None:
    waiting = exponentials(keys(2000), 256, "cpu").double()
    uniform = 1 - torch.exp(-waiting)
    assert p_value(torch.histc(uniform, 100, 0, 1), torch.ones(100)) > 1e-4
    assert float(waiting.mean()) == pytest.approx(1, abs=6 / math.sqrt(waiting.numel()))
    for side in (waiting, waiting.T):
        correlations = torch.corrcoef(side[:100]).fill_diagonal_(0)
        assert correlations.abs().max() < 6 / math.sqrt(side.shape[1])


def test_the_highest_of_all_numbers_draws_no_token_without_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """31 bits that float32 rounds to 1, of which the waiting time would be infinite."""
    monkeypatch.setattr(decoding, "_mixed", lambda bits: torch.full_like(bits, 0x7FFFFFFF))
    weights = torch.full((2, 300), -math.inf)
    weights[0, 200] = weights[1, 299] = 0.0
    assert gumbel_max(weights, [(0, 0), (0, 1)]).tolist() == [200, 299]
    assert exponentials([(0, 0)], 3, "cpu").isfinite().all()


def test_a_draw_depends_on_its_key_alone() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(3))
    how = Decoding(samples=1, temperature=0.9, top_p=0.95)
    some = dict(enumerate(keys(50)))
    together, log_probs = choose(logits, some, how)
    alone = [choose(logits[row : row + 1], {0: some[row]}, how)[0][0] for row in range(50)]
    mixed, _ = choose(logits, {row: key for row, key in some.items() if row % 2}, how)
    assert alone == together
    assert mixed[1::2] == together[1::2]
    assert mixed[::2] == logits.argmax(-1).tolist()[::2]
    assert log_probs == logits.log_softmax(-1)[torch.arange(50), together].tolist()


def test_keys_differ_in_each_of_the_four() -> None:
    different = {
        draw_key(*four) for four in [(0, "a", 0, 0), (1, "a", 0, 0), (0, "b", 0, 0), (0, "a", 1, 0), (0, "a", 0, 1)]
    }
    assert len(different) == 5
    assert draw_key(0, "\ud800", 0, 0) == draw_key(0, "\ud800", 0, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("drawn", [False, True])
def test_a_row_that_is_no_distribution_has_no_log_prob_and_harms_no_other(bad: float, drawn: bool) -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(4))
    logits[1, 17] = bad
    logits[1, 40] = 50.0
    some = dict(enumerate(keys(3))) if drawn else {}
    ids, log_probs = choose(logits, some, Decoding(samples=1))
    assert log_probs[1] is None
    assert ids[1] == 40
    assert log_probs[0] is not None
    assert log_probs[2] is not None


def test_log_probs_of_half_precision_logits_are_of_float32() -> None:
    logits = (torch.randn(4, 1000, generator=torch.Generator().manual_seed(5)) * 4).bfloat16()
    ids, log_probs = choose(logits, {}, Decoding())
    exact = logits.double().log_softmax(-1)[torch.arange(4), ids]
    assert log_probs == pytest.approx(exact.tolist(), abs=1e-6)
