"""Relations between answers, and the clusters that are made of them."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.qa.encoders.small_encoders import NLI_LABELS, random_bert

from gpuherd.errors import BadModel
from gpuherd.qa.encoders.files import encoder_files
from gpuherd.qa.encoders.models import EntailmentQuery, NliModel, NliRelation
from gpuherd.qa.statistics.equivalence import MeaningRule, clusters, mean_the_same

ENTAILS = NliRelation(0.8, 0.1, 0.1)
NEUTRAL = NliRelation(0.1, 0.8, 0.1)
CONTRADICTS = NliRelation(0.1, 0.1, 0.8)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_bert(tmp_path_factory.mktemp("nli"), NLI_LABELS)


@pytest.mark.parametrize(
    ("there", "back", "strict", "loose"),
    [
        (ENTAILS, ENTAILS, True, True),
        (ENTAILS, NEUTRAL, False, True),
        (NEUTRAL, ENTAILS, False, True),
        (NEUTRAL, NEUTRAL, False, False),
        (ENTAILS, CONTRADICTS, False, False),
        (CONTRADICTS, CONTRADICTS, False, False),
    ],
)
def test_both_rules(there: NliRelation, back: NliRelation, strict: bool, loose: bool) -> None:
    assert mean_the_same(there, back, MeaningRule.STRICT) is strict
    assert mean_the_same(there, back, MeaningRule.NOT_CONTRADICTING) is loose


def test_ties_are_read_carefully() -> None:
    assert NliRelation(0.4, 0.4, 0.2).label == "neutral"
    assert NliRelation(0.4, 0.2, 0.4).label == "contradiction"


def test_an_answer_is_in_one_cluster_where_sameness_is_not_transitive() -> None:
    # a ~ c and b ~ c, but not a ~ b: one known implementation moves a's id, another puts c into two clusters.
    assert clusters(3, lambda one, two: {one, two} != {0, 1}) == (0, 1, 0)
    # c means the same as b alone: a cluster is compared by its first member.
    assert clusters(3, lambda one, two: {one, two} in ({0, 1}, {1, 2})) == (0, 0, 1)
    assert clusters(0, lambda one, two: True) == ()


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4), max_size=12))
def test_clusters_of_an_equivalence_are_its_classes(meanings: list[int]) -> None:
    found = clusters(len(meanings), lambda one, two: meanings[one] == meanings[two])
    firsts: dict[int, int] = {}
    assert found == tuple(firsts.setdefault(meaning, len(firsts)) for meaning in meanings)


@settings(max_examples=40)
@given(st.integers(1, 8), st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7))))
def test_clusters_are_numbered_in_order_of_first_appearance(number: int, same: set[tuple[int, int]]) -> None:
    found = clusters(number, lambda one, two: (one, two) in same)
    assert len(found) == number and list(dict.fromkeys(found)) == list(range(max(found) + 1))


def test_relations_equal_plain_transformers_in_both_directions(three: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(three).eval()
    tokenizer = AutoTokenizer.from_pretrained(three)
    texts = ["Paris", "the capital is Paris", "seven plus one"]
    pairs = list(permutations(texts, 2))
    question = "What is the capital of France?"
    for with_question in (False, True):
        relations = NliModel(encoder_files(str(three)), condition_on_question=with_question).relations(
            [EntailmentQuery(question, *pair) for pair in pairs]
        )
        before = f"{question} " if with_question else ""
        for (premise, hypothesis), relation in zip(pairs, relations, strict=True):
            with torch.no_grad():
                logits = model(**tokenizer(before + premise, before + hypothesis, return_tensors="pt")).logits[0]
            contradiction, neutral, entailment = logits.softmax(0).tolist()
            assert relation is not None
            assert (relation.entailment, relation.neutral, relation.contradiction) == pytest.approx(
                (entailment, neutral, contradiction), abs=1e-6
            )


def test_equal_pairs_are_the_same_and_what_is_too_long_has_no_relation(three: Path) -> None:
    model = NliModel(encoder_files(str(three)))
    long = "plus " * 200
    one, again, none = model.relations(
        [EntailmentQuery("q", "a", "b"), EntailmentQuery("other", "a", "b"), EntailmentQuery("q", long, "b")]
    )
    assert one == again and one is not None and none is None
    assert model.relations([EntailmentQuery("q", long, long)]) == [None]
    (cut,) = NliModel(encoder_files(str(three)), cut=True).relations([EntailmentQuery("q", long, "b")])
    assert cut is not None


def test_a_model_without_names_for_its_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="entailment, neutral, contradiction"):
        NliModel(encoder_files(str(random_bert(tmp_path, {0: "a", 1: "b", 2: "c"}))))
