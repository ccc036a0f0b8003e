"""ROUGE-L and its stems against the rouge-score package and NLTK, which are installed for the tests alone."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.qa.measures import rouge
from gpuherd.qa.measures import rouge as porter

VOCABULARY = """
    the a cat cats sat on mat mats running runner ran relational conditionally rationalization hopeful hopefulness
    skies dying flies died tied happy happily enjoyed played feed agreed plastered motoring sized hopping tanned
    falling hissing failing filing electrically generously geological analogousli possibly probability ability
    1,234 3.5 42nd Paris PARIS don't naïve Tokyo 東京 e-mail controlling rolled adoption adjustment effective
    """.split()  # noqa: SIM905 - eighty words in quotes would say less
SUFFIXES = (
    *("s", "ss", "sses", "ies", "ied", "ed", "eed", "ing", "y", "ational", "tional", "enci", "izer", "bli", "alli"),
    *("entli", "eli", "ousli", "ization", "ation", "ator", "alism", "iveness", "fulness", "aliti", "iviti", "biliti"),
    *("fulli", "logi", "icate", "ative", "alize", "iciti", "ical", "ful", "ness", "al", "ance", "er", "ic", "able"),
    *("ement", "ment", "ent", "ion", "sion", "tion", "ou", "ism", "ate", "iti", "ous", "ive", "ize", "e", "ll", "lle"),
)
BEGINNINGS = (
    "",
    "a",
    "t",
    "y",
    "by",
    "hop",
    "fil",
    "tr",
    "ab",
    "rel",
    "contr",
    "oat",
    "toy",
    "mot",
    "wax",
    "bow",
    "ally",
)


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_stems_are_nltks(every: int) -> None:
    nltk = pytest.importorskip("nltk.stem.porter")
    reference = nltk.PorterStemmer()
    made = ["".join(parts) for parts in product(BEGINNINGS, SUFFIXES, ("", "s", "ly", "ed", "ing"))][::every]
    words = {*made, *rouge._WORD.findall(" ".join(VOCABULARY).lower()), *porter._IRREGULAR}
    assert {word: porter.stem(word) for word in words} == {word: reference.stem(word) for word in words}


def test_rouge_l_is_that_of_rouge_score() -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=True)
    draw = random.Random(0)
    for _ in range(200):
        first, second = (" ".join(draw.choices(VOCABULARY, k=draw.randrange(30))) for _ in range(2))
        assert rouge.rouge_l(first, second) == pytest.approx(scorer.score(first, second)["rougeL"].fmeasure, abs=1e-6)


@given(st.lists(st.sampled_from("abcd"), max_size=12), st.lists(st.sampled_from("abcd"), max_size=12))
def test_the_longest_common_subsequence_is_that_of_the_table(first: list[str], second: list[str]) -> None:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    assert rouge.common_subsequence(first, second) == table[-1][-1]


@given(st.text(max_size=40), st.text(max_size=40))
def test_rouge_l_is_symmetric_and_between_0_and_1(first: str, second: str) -> None:
    assert 0 <= rouge.rouge_l(first, second) <= 1
    assert rouge.rouge_l(first, second) == rouge.rouge_l(second, first)
    assert rouge.rouge_l(first, first) == (1.0 if rouge.words(first) else 0.0)


def test_answers_of_thousands_of_words_are_compared_at_once() -> None:
    first = " ".join(f"w{n % 700}" for n in range(5000))
    second = " ".join(f"w{n % 500}" for n in range(5000))
    assert 0 < rouge.rouge_l(first, second) < 1


@pytest.mark.parametrize(("first", "second"), [("", "Paris"), ("東京", "東京"), ("?!", "?!")])
def test_texts_without_words_have_nothing_in_common(first: str, second: str) -> None:
    assert rouge.rouge_l(first, second) == 0
