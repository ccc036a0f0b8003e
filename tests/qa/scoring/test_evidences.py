"""What measures look at, made of an answered question and its statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.qa.encoders.entailment import Rule
from gpuherd.qa.measures.given import check
from gpuherd.qa.record import Answered, Finish, Generation, Prompted, Question
from gpuherd.qa.scoring.evidences import Measured, Rules, answer_of, evidence_of, jaccard

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
    both = evidence_of(asked(said("a", -1.0), said("b", None), greedy=said("c", None)), Measured(), Rules())
    assert both.greedy is None and both.samples == () and both.clusters is None and both.affinity is None


def test_exact_equivalence_is_without_case_punctuation_and_articles() -> None:
    texts = ["Paris", "paris.", " the Paris", "Lyon", "", "  "]
    evidence = evidence_of(asked(*(said(text, -1.0) for text in texts)), Measured(), Rules())
    assert evidence.clusters == (0, 0, 0, 1, 2, 2)
    check(evidence)


def relations(texts: list[int], table: list[list[tuple[float, float, float] | None]]) -> dict[str, object]:
    return {"number": 0, "id": "q", "texts": texts, "relations": table}


def test_relations_make_clusters_and_edges_by_either_rule() -> None:
    entails, neutral = (0.8, 0.15, 0.05), (0.1, 0.8, 0.1)
    row = relations([0, 1, 0], [[None, entails], [neutral, None]])
    samples = [said("Paris", -1.0), said("It is Paris", -1.0), said("Paris", -1.0)]
    strict = evidence_of(
        asked(*samples), Measured(equivalence=row, affinity=row), Rules(equivalence="relations", affinity="relations")
    )
    assert strict.clusters == (0, 1, 0)
    assert strict.affinity is not None
    assert strict.affinity.tolist() == [[1, 0.8, 1], [0.1, 1, 0.1], [1, 0.8, 1]]
    loose = Rules(equivalence="relations", affinity=None, rule=Rule.NOT_CONTRADICTING)
    assert evidence_of(asked(*samples), Measured(equivalence=row), loose).clusters == (0, 0, 0)
    check(strict)


def test_similarity_makes_clusters_from_its_threshold_on() -> None:
    row = {"number": 0, "id": "q", "matrix": [[0.99, 0.9, 0.2], [0.9, 0.98, 0.3], [0.2, 0.3, 0.97]]}
    samples = [said(text, -1.0) for text in ("a", "b", "c")]
    rules = Rules(equivalence="similarity", affinity="similarity", threshold=0.9)
    evidence = evidence_of(asked(*samples), Measured(similarity=row, equivalence=row, affinity=row), rules)
    assert evidence.clusters == (0, 0, 1)
    assert evidence.similarity is not None and np.diag(evidence.similarity).tolist() == [1, 1, 1]
    assert evidence.similarity[0, 1] == 0.9
    check(evidence)


def test_what_a_model_had_no_room_for_is_not_measured() -> None:
    none = {
        "number": 0,
        "id": "q",
        "relevance": None,
        "matrix": None,
        "relations": None,
        "texts": [0, 1],
        "why": "long",
    }
    samples = [said("a", -1.0), said("b", -1.0)]
    for by in ("relations", "similarity"):
        evidence = evidence_of(
            asked(*samples, greedy=said("a", -1.0)),
            Measured(relevance=none, similarity=none, equivalence=none, affinity=none),
            Rules(equivalence=by, affinity=by),
        )
        assert evidence.clusters is None and evidence.affinity is None and evidence.similarity is None
        assert evidence.greedy is not None and evidence.greedy.relevance is None


def test_relevance_goes_to_its_answer() -> None:
    greedy = {"number": 0, "id": "q", "relevance": [[0.1, 0.2]]}
    drawn = {"number": 0, "id": "q", "relevance": [[0.3], [0.4, 0.5]]}
    evidence = evidence_of(
        asked(said("a", -1.0), said("b c", -1.0, -2.0), greedy=said("d e", -1.0, -2.0)),
        Measured(relevance=greedy, sample_relevance=drawn, p_true={"log_p": -0.1}, p_ik=0.7),
        Rules(),
    )
    assert evidence.greedy is not None and evidence.greedy.relevance == (0.1, 0.2, 0.0)
    assert [each.relevance for each in evidence.samples] == [(0.3, 0.0), (0.4, 0.5, 0.0)]
    assert (evidence.p_true, evidence.p_ik) == (-0.1, 0.7)
    check(evidence)


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
    evidence = evidence_of(asked(*(said(text, -1.0) for text in texts)), Measured(), Rules())
    assert evidence.affinity is not None and evidence.affinity.shape == (len(texts), len(texts))
    check(evidence)
