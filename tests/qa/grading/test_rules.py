"""Judges by words: what is correct, what is not, and what attempts nothing."""

from __future__ import annotations

import random
import re
import string
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.qa.grading.rules import (
    RULES,
    LexicalRule,
    attempts_nothing,
    contains,
    exact,
    f1,
    rouge_judge,
    squad,
)
from gpuherd.qa.grading.verdicts import Ruling, Verdict
from gpuherd.qa.record import Question

PARIS = Question("1", "What is the capital of France?", ("Paris", "City of Light"))


def asked(*answers: str) -> Question:
    return Question("1", "?", answers)


@pytest.mark.parametrize(
    ("answer", "right"),
    [("Paris", True), (" the PARIS.\n", True), ("city of light", True), ("Paris, France", False), ("parisian", False)],
)
def test_exact(answer: str, right: bool) -> None:
    assert exact(answer, PARIS).verdict is (Verdict.CORRECT if right else Verdict.INCORRECT)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("It is Paris, of course.", True),
        ("The comparison", False),
        ("Parisian", False),
        ("the City of the Light", True),
        ("light of city", False),
    ],
)
def test_contains_whole_words_in_order(answer: str, right: bool) -> None:
    assert contains(answer, PARIS).verdict is (Verdict.CORRECT if right else Verdict.INCORRECT)


def test_squad_is_the_best_f1_from_one_half_on() -> None:
    assert squad("Paris, France", asked("Lyon", "Paris")).score == pytest.approx(2 / 3)
    assert squad("Paris it surely", asked("Paris")).verdict is Verdict.CORRECT  # exactly 0.5
    assert squad("Paris it surely is", asked("Paris")).verdict is Verdict.INCORRECT
    assert RULES["squad"]("Paris it surely is", asked("Paris"), 0.4).verdict is Verdict.CORRECT


def test_rouge_is_the_best_rouge_l_from_three_tenths_on() -> None:
    ruling = rouge_judge("the running cats", asked("dogs", "a runner ran with cats"))
    assert ruling.score == pytest.approx(2 * 1 / 8)
    assert ruling.verdict is Verdict.INCORRECT
    assert rouge_judge("cats run", asked("cat runs")).score == 1


def test_rouge_says_that_it_can_not_read_other_scripts() -> None:
    assert rouge_judge("東京", asked("東京")).verdict is Verdict.UNPARSED
    assert exact("東京", asked("東京")).verdict is Verdict.CORRECT


@pytest.mark.parametrize("reference", ["A", "the", "?", "..."])
def test_references_of_which_normalising_leaves_nothing_are_told_apart(reference: str) -> None:
    assert exact(reference, asked(reference)).verdict is Verdict.CORRECT
    assert exact("an", asked(reference)).verdict is Verdict.INCORRECT
    assert squad("an", asked(reference)).verdict is Verdict.INCORRECT


NOTHING = (
    *("", "  \n", "I don't know.", "I do not know", "i don’t know", "Unknown", "No idea!", "Sorry, I don't know."),
    *("I'm not sure.", "IDK", "I have no idea", "N/A", "I don't know the answer to that question.", "I cannot say"),
)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("answer", NOTHING)
def test_what_attempts_nothing(rule: str, answer: str) -> None:
    assert RULES[rule](answer, PARIS).verdict is Verdict.NOT_ATTEMPTED


@pytest.mark.parametrize("answer", ["I don't know, perhaps Paris", "Unknown Pleasures", "no", "Na", "I know"])
def test_what_attempts_something(answer: str) -> None:
    assert not attempts_nothing(answer, PARIS)


def test_a_reference_that_does_not_know_is_a_reference() -> None:
    assert exact("I don't know.", asked("I don't know")).verdict is Verdict.CORRECT


def test_accents_are_the_same_in_either_form() -> None:
    assert exact("Beyonce\u0301", asked("Beyonc\u00e9")).verdict is Verdict.CORRECT
    assert f1("Beyonc\u00e9 Knowles", "Beyonce\u0301") == pytest.approx(2 / 3)


def test_f1_counts_a_word_as_often_as_it_stands_there() -> None:
    assert f1("no no no", "no") == pytest.approx(0.5)


def test_f1_and_exact_match_are_those_of_the_official_script() -> None:
    """The steps of SQuAD's evaluate-v1.1.py, written out: case, punctuation, articles, white space; then counts."""

    def official(text: str) -> list[str]:
        kept = "".join(sign for sign in text.lower() if sign not in set(string.punctuation))
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split()).split()

    draw = random.Random(0)
    words = [
        *("the", "a", "an", "cat", "Cats;", "the-mat", "an's", "Paris,", "PARIS."),
        *("1,000", "...", "naïve", "«x»", "A"),
    ]
    for _ in range(200):
        first, second = (" ".join(draw.choices(words, k=draw.randrange(2, 12))) for _ in range(2))
        one, two = official(first), official(second)
        if not one or not two:
            continue  # where the script's rule breaks down, ours is another: see above
        same = sum((Counter(one) & Counter(two)).values())
        wanted = 0 if same == 0 else 2 * (same / len(one)) * (same / len(two)) / (same / len(one) + same / len(two))
        assert f1(first, second) == pytest.approx(wanted, abs=1e-12)
        assert (exact(first, asked(second)).verdict is Verdict.CORRECT) == (one == two)


@given(st.text(max_size=30), st.text(min_size=1, max_size=30))
def test_rulings_on_any_text(answer: str, reference: str) -> None:
    question = asked(reference)
    for rule in RULES.values():
        ruling = rule(answer, question)
        assert ruling.score is None or 0 <= ruling.score <= 1
        assert (ruling.verdict is Verdict.UNPARSED) == (ruling.note is not None)
    if exact(answer, question).verdict is Verdict.CORRECT:
        assert contains(answer, question).verdict is Verdict.CORRECT
        assert squad(answer, question).score == 1


def test_an_answer_that_a_rule_did_not_foresee_ends_no_judging(caplog: pytest.LogCaptureFixture) -> None:
    def raises(answer: str, question: Question, threshold: float) -> Ruling:
        raise RecursionError(f"{answer}, {question.id}, {threshold}")

    rule = LexicalRule("own", 0.5, raises)
    for _ in range(2):
        ruling = rule("deep", PARIS)
        assert ruling == Ruling(Verdict.UNPARSED, None, "the rule own failed: RecursionError: deep, 1, 0.5")
    assert len(caplog.records) == 1, "once a kind"

    def broken(*_: object) -> Ruling:
        raise UsageError("no such library")

    with pytest.raises(UsageError):
        LexicalRule("own", None, broken)("deep", PARIS)
