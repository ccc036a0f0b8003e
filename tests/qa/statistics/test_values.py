"""What measures look at, made of an answered question and its statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.lm.backend import Finish, Generation
from gpuherd.qa.measures.evidence import Evidence, EvidenceNeed, answer_of, answers_of
from gpuherd.qa.measures.given import check
from gpuherd.qa.record import Answered, Prompted, Question
from gpuherd.qa.scoring.options import ScoreOptions
from gpuherd.qa.statistics.equivalence import ClusterRule, MeaningRule, affinity_in, clusters_in, jaccard
from gpuherd.qa.statistics.files import StatisticSpec
from gpuherd.qa.statistics.registry import NeedSource, ValueInputs, statistics

QUESTION = Question("q", "Capital of France?", ("Paris",))
PROMPT = Prompted("0" * 64, 3)


def said(text: str, *log_probs: float | None, end: float | None = -0.5, finish: Finish = Finish.EOS) -> Generation:
    pieces = len(log_probs) or 1
    cuts = [round(len(text) * (place + 1) / pieces) for place in range(pieces)] if log_probs else []
    ended = finish is Finish.EOS
    return Generation(
        tuple(range(len(log_probs))), log_probs, text, tuple(cuts), finish, 9 if ended else None, end if ended else None
    )


def asked(*samples: Generation, greedy: Generation | None = None) -> Answered:
    return Answered(0, QUESTION, PROMPT, greedy, samples)


EXACT = ClusterRule("exact")


def texts_of(*samples: Generation) -> list[str]:
    return [each.text for each in answers_of(asked(*samples), True, "answer").samples]


def value(need: str, row: dict[str, Any], texts: Sequence[str] = (), kind: str = "") -> Any:
    """What measures get of one question, of a statistic of this kind where that makes a difference."""
    owner = next(each for each in statistics() if need in each.needs)
    source = NeedSource("said", StatisticSpec(kind or owner.kind, "m", "0"))
    (found,) = owner.values(ValueInputs(need, source, [row], [texts], [None], ScoreOptions())).column
    return found


def test_the_end_token_counts_where_there_is_one_and_it_is_asked_for() -> None:
    answer = said(" Paris ", -1.0, -2.0)
    with_end, without = answer_of(answer, True, [0.3, 0.4]), answer_of(answer, False, [0.3, 0.4])
    assert with_end is not None and without is not None
    assert with_end.log_probs == (-1.0, -2.0, -0.5) and with_end.relevance == (0.3, 0.4, 0.0)
    assert without.log_probs == (-1.0, -2.0) and without.relevance == (0.3, 0.4)
    assert with_end.text == "Paris"
    for finish in (Finish.STOP, Finish.LENGTH):
        cut = answer_of(said("Paris", -1.0, finish=finish), True)
        assert cut is not None and cut.log_probs == (-1.0,) and cut.relevance is None


def test_log_probs_that_are_not_finite_make_no_answer() -> None:
    assert answer_of(said("Paris", None), True) is None
    assert answer_of(said("Paris", -1.0, end=None), True) is None
    assert answer_of(said("Paris", -1.0, end=None), False) is None, "a model whose numbers broke down did not end it"
    both = answers_of(asked(said("a", -1.0), said("b", None), greedy=said("c", None)), True, "answer")
    assert both.greedy is None and both.samples == ()
    assert clusters_in([], None, EXACT) is None and affinity_in([], None) is None
    assert value(EvidenceNeed.SIMILARITY, {"matrix": [[1.0]]}) is None


def test_exact_equivalence_is_without_case_punctuation_and_articles() -> None:
    samples = [said(text, -1.0) for text in ["Paris", "paris.", " the Paris", "Lyon", "", "  "]]
    found = clusters_in(texts_of(*samples), None, EXACT)
    assert found == (0, 0, 0, 1, 2, 2)
    check(answers_of(asked(*samples), True, "answer").with_values({EvidenceNeed.EQUIVALENCE: found}))


def relations(texts: list[int], table: list[list[tuple[float, float, float] | None]]) -> dict[str, object]:
    return {"number": 0, "id": "q", "texts": texts, "relations": table}


def test_relations_make_clusters_and_edges_by_either_rule() -> None:
    entails, neutral = (0.8, 0.15, 0.05), (0.1, 0.8, 0.1)
    row = relations([0, 1, 0], [[None, entails], [neutral, None]])
    texts = texts_of(said("Paris", -1.0), said("It is Paris", -1.0), said("Paris", -1.0))
    assert clusters_in(texts, row, ClusterRule("relations")) == (0, 1, 0)
    assert value(EvidenceNeed.EQUIVALENCE, row, texts) == (0, 1, 0)
    affinity = value(EvidenceNeed.AFFINITY, row, texts)
    assert affinity.tolist() == [[1, 0.8, 1], [0.1, 1, 0.1], [1, 0.8, 1]]
    assert clusters_in(texts, row, ClusterRule("relations", MeaningRule.NOT_CONTRADICTING)) == (0, 0, 0)


def test_similarity_makes_clusters_from_its_threshold_on() -> None:
    row = {"number": 0, "id": "q", "matrix": [[0.99, 0.9, 0.2], [0.9, 0.98, 0.3], [0.2, 0.3, 0.97]]}
    samples = [said(text, -1.0) for text in ("a", "b", "c")]
    texts = texts_of(*samples)
    needs = (EvidenceNeed.SIMILARITY, EvidenceNeed.EQUIVALENCE, EvidenceNeed.AFFINITY)
    evidence = answers_of(asked(*samples), True, "answer").with_values(
        {need: value(need, row, texts, "similarity") for need in needs}
    )
    assert evidence.clusters == (0, 0, 1)
    assert evidence.similarity is not None and np.diag(evidence.similarity).tolist() == [1, 1, 1]
    assert evidence.similarity[0, 1] == 0.9
    assert evidence.affinity is not None and evidence.affinity.tolist() == evidence.similarity.tolist()
    check(evidence)


@pytest.mark.parametrize("kind", ["entailment", "similarity"])
def test_what_a_model_had_no_room_for_is_not_measured(kind: str) -> None:
    none = {"number": 0, "id": "q", "why": "long"} | (
        {"matrix": None} if kind == "similarity" else {"relations": None, "texts": [0, 1]}
    )
    for need in (EvidenceNeed.EQUIVALENCE, EvidenceNeed.AFFINITY):
        assert value(need, none, ["a", "b"], kind) is None
    if kind == "similarity":
        assert value(EvidenceNeed.SIMILARITY, none, ["a", "b"]) is None
    assert value(EvidenceNeed.RELEVANCE, {"relevance": None}) is None
    evidence = answers_of(asked(greedy=said("a", -1.0)), True, "answer", relevance=None)
    assert evidence.greedy is not None and evidence.greedy.relevance is None


def test_relevance_goes_to_its_answer() -> None:
    greedy = value(EvidenceNeed.RELEVANCE, {"number": 0, "id": "q", "relevance": [[0.1, 0.2]]})
    drawn = value(EvidenceNeed.SAMPLE_RELEVANCE, {"number": 0, "id": "q", "relevance": [[0.3], [0.4, 0.5]]})
    answered = asked(said("a", -1.0), said("b c", -1.0, -2.0), greedy=said("d e", -1.0, -2.0))
    evidence = answers_of(answered, True, "answer", greedy, drawn)
    assert evidence.greedy is not None and evidence.greedy.relevance == (0.1, 0.2, 0.0)
    assert [each.relevance for each in evidence.samples] == [(0.3, 0.0), (0.4, 0.5, 0.0)]
    whole = evidence.with_values(
        {EvidenceNeed.P_TRUE: value(EvidenceNeed.P_TRUE, {"log_p": -0.1}), EvidenceNeed.P_IK: 0.7}
    )
    assert (whole.p_true, whole.p_ik) == (-0.1, 0.7)
    check(whole)


def test_what_no_field_is_for_goes_to_the_others() -> None:
    evidence = Evidence("q").with_values({EvidenceNeed.P_TRUE: -0.1, "depth": 3}).with_values({"width": 4})
    assert evidence.p_true == -0.1 and evidence.others == {"depth": 3, "width": 4}


@settings(max_examples=30)
@given(st.text("abA \n.é", max_size=30), st.text("abA \n.é", max_size=30))
def test_jaccard_is_symmetric_from_0_to_1_and_1_of_equal_texts(one: str, other: str) -> None:
    assert 0 <= jaccard(one, other) == jaccard(other, one) <= 1
    assert jaccard(one, one) == 1


def test_jaccard_is_of_words() -> None:
    assert jaccard("In Paris", "in paris") == 1
    assert jaccard("", "x") == 0
    assert math.isclose(jaccard("a b c", "b c d"), 0.5)


@pytest.mark.parametrize("texts", [["a"], ["a", "b", "a"]])
def test_affinity_is_a_matrix_of_all_samples(texts: list[str]) -> None:
    samples = [said(text, -1.0) for text in texts]
    found = affinity_in(texts_of(*samples), None)
    assert found is not None and found.shape == (len(texts), len(texts))
    check(answers_of(asked(*samples), True, "answer").with_values({EvidenceNeed.AFFINITY: found}))
