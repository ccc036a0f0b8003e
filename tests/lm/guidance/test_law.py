"""The guided law against one that is computed over the whole vocabulary, token by token."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from gpuherd.lm.guidance.guide import guided_distribution, most_probable  # noqa: E402

NUMBERS = st.lists(st.integers(-32, 32).map(lambda each: each / 4), min_size=12, max_size=12, unique=True)


@settings(deadline=None, max_examples=25)
@given(NUMBERS, NUMBERS, st.integers(1, 15))
def test_it_is_the_references_best_reweighed(logits: list[float], added: list[float], top_k: int) -> None:
    z = math.fsum(map(math.exp, logits))
    reference = [math.exp(each) / z for each in logits]
    best = sorted(range(12), key=lambda token: -reference[token])[:top_k]
    weights = {token: reference[token] * math.exp(added[token]) for token in best}
    total = math.fsum(weights.values())
    guided = {token: weight / total for token, weight in weights.items()}
    kl = math.fsum(p * math.log(p / reference[token]) for token, p in guided.items())

    candidates, log_probs = most_probable(torch.tensor([logits]), top_k, 12)
    law = guided_distribution(candidates, log_probs, torch.tensor([added], dtype=torch.float64)[:, candidates[0]])
    assert candidates[0].tolist() == best
    assert law.log_probs[0].exp().tolist() == pytest.approx([guided[token] for token in best], rel=1e-5)
    assert law.kl.item() == pytest.approx(kl, abs=1e-5)
    scores = law.scores(12)[0]
    assert [token for token in range(12) if scores[token].isfinite()] == sorted(best)
    outside = [token for token in range(12) if token not in best]
    assert law.of(torch.tensor([best[0]])).item() == pytest.approx(math.log(guided[best[0]]), abs=1e-5)
    assert all(law.of(torch.tensor([token])).item() == -math.inf for token in outside[:1])


def test_tokens_that_the_classifier_does_not_know_are_no_candidates() -> None:
    """A model's vocabulary may be padded by rows that stand for no token; their probability is still counted."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0, 8.0]])
    candidates, log_probs = most_probable(logits, 2, 3)
    assert candidates.tolist() == [[2, 1]]
    assert log_probs.tolist() == [pytest.approx(logits.log_softmax(-1)[0, [2, 1]].tolist(), rel=1e-6)]


def test_tokens_that_can_not_come_stay_so() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    candidates, log_probs = most_probable(logits, 3, 3)
    law = guided_distribution(candidates, log_probs, torch.full((1, 3), 3.0, dtype=torch.float64))
    assert law.of(torch.tensor([1])).item() == -math.inf
    assert law.kl.item() == pytest.approx(0, abs=1e-7)


def test_equal_offsets_are_the_reference_restricted_to_its_best() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    candidates, log_probs = most_probable(logits, 2, 4)
    law = guided_distribution(candidates, log_probs, torch.zeros(1, 2, dtype=torch.float64))
    kept = 1 / (1 + math.exp(-1))  # of the two best the first
    assert law.log_probs[0].exp().tolist() == pytest.approx([kept, 1 - kept])
    mass = torch.softmax(logits, -1)[0, 2:].sum().item()
    assert law.kl.item() == pytest.approx(-math.log(mass), abs=1e-6)
