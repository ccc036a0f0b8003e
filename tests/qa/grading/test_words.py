"""Verdict words as tokens, and from log-probs to verdicts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.qa.grading.verdicts import WAYS, Verdict, Way, verdict_from_log_probs, verdict_tokens

YES, NO, NOT = Verdict.CORRECT, Verdict.INCORRECT, Verdict.NOT_ATTEMPTED


def encoder(tokenizer: Any) -> Any:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def test_every_spelling_of_one_token_is_weighed(good_judge: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(good_judge)
    tokens = verdict_tokens("two-way", "Verdict:", encoder(tokenizer))
    assert {tokenizer.decode(list(each)) for each in tokens[YES]} == {" yes", "yes"}
    assert {tokenizer.decode(list(each)) for each in tokens[NO]} == {" no", "no"}
    assert all(len(each) == 1 for ways in tokens.values() for each in ways), "Yes and YES are several tokens here"


def test_words_are_found_behind_the_signs_for_spaces_of_sentencepiece() -> None:
    """Llama 2's way: a space is a sign of its own at the beginning of words, and every text begins with one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    texts = ["Verdict: yes", "Verdict: no", "Verdict: A B C", "yes no"] * 9
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=80, show_progress=False))
    tokens = verdict_tokens("two-way", "Verdict:", lambda text: tokenizer.encode(text).ids)
    spelt = {
        verdict: [[tokenizer.id_to_token(each) for each in ids] for ids in ways] for verdict, ways in tokens.items()
    }
    assert ["\u2581yes"] in spelt[YES] and ["\u2581no"] in spelt[NO]
    assert all(len(ids) == 1 for ways in tokens.values() for ids in ways)


@pytest.mark.parametrize("way", WAYS)
def test_words_of_several_tokens_are_weighed_as_sequences(way: Way) -> None:
    """A tokenizer of bytes alone: " yes" is four tokens. None is the beginning of another of its verdict."""
    tokens = verdict_tokens(way, "Verdict:", lambda text: list(text.encode()))
    spelt = {verdict: {bytes(each).decode() for each in ways} for verdict, ways in tokens.items()}
    if way == "two-way":
        assert spelt[YES] == {" yes", " Yes", " YES", "yes", "Yes", "YES"}
    else:
        assert spelt == {YES: {"A"}, NO: {"B"}, NOT: {"C"}}, "one token each without the space"
    every = [each for ways in tokens.values() for each in ways]
    assert not any(one != other and one[: len(other)] == other for one in every for other in every)


def test_a_cue_and_a_word_that_melt_into_one_token_are_left_out() -> None:
    vocabulary = {"Verdict:": [1], "Verdict: yes": [1, 2], "Verdict: no": [1, 3], "Verdict:yes": [9], "Verdict:no": [8]}
    tokens = verdict_tokens("two-way", "Verdict:", lambda text: vocabulary.get(text, [0]))
    assert tokens == {YES: ((2,),), NO: ((3,),)}


def test_a_tokenizer_that_can_not_tell_verdicts_apart_is_refused() -> None:
    with pytest.raises(UsageError, match="--mode text"):
        verdict_tokens("two-way", "Verdict:", lambda text: [5] * (1 + (len(text) > len("Verdict:"))))


PARTS = st.lists(st.floats(-30, -0.7), min_size=1, max_size=3)


@given(PARTS, PARTS, st.floats(0, 1))
def test_probabilities_add_up_over_spellings(yes: list[float], no: list[float], threshold: float) -> None:
    for values in (yes, no):
        scale = math.log(max(1.0, 2.1 * sum(map(math.exp, values))))
        values[:] = [each - scale for each in values]
    p_yes, p_no = sum(map(math.exp, yes)), sum(map(math.exp, no))
    found = verdict_from_log_probs({YES: yes, NO: no}, threshold=threshold, min_mass=0.0)
    assert found.mass == pytest.approx(p_yes + p_no)
    assert found.p_correct == pytest.approx(p_yes / (p_yes + p_no))
    assert found.p_correct is not None and found.verdict is (YES if found.p_correct >= threshold else NO)


def logs(**shares: float) -> dict[Verdict, list[float | None]]:
    return {Verdict(name): [math.log(value)] for name, value in shares.items()}


def test_of_three_grades_the_most_probable_counts() -> None:
    three = logs(correct=0.4, incorrect=0.3, not_attempted=0.2)
    assert verdict_from_log_probs(three, threshold=None, min_mass=0.5).verdict is YES
    assert verdict_from_log_probs(three, threshold=0.5, min_mass=0.5).verdict is NO
    assert (
        verdict_from_log_probs(
            logs(correct=0.1, incorrect=0.2, not_attempted=0.3), threshold=None, min_mass=0.5
        ).verdict
        is NOT
    )


def test_what_can_not_be_decided_is_unparsed_and_says_why() -> None:
    few = verdict_from_log_probs(logs(correct=0.2, incorrect=0.1), threshold=0.5, min_mass=0.5)
    assert few.verdict is Verdict.UNPARSED and few.note == "the verdict words have 0.3 together, less than 0.5"
    assert few.p_correct == pytest.approx(2 / 3) and few.mass == pytest.approx(0.3)
    tie = verdict_from_log_probs(logs(correct=0.3, incorrect=0.3, not_attempted=0.1), threshold=None, min_mass=0.5)
    assert tie.verdict is Verdict.UNPARSED and tie.note == "two verdicts are equally probable"
    nan = verdict_from_log_probs({YES: [None, -1.0], NO: [-1.0]}, threshold=0.5, min_mass=0.0)
    assert (nan.verdict, nan.p_correct, nan.mass) == (Verdict.UNPARSED, None, None)
    assert nan.note is not None and "not finite" in nan.note
    nothing = verdict_from_log_probs({YES: [], NO: []}, threshold=0.5, min_mass=0.0)
    assert nothing.verdict is Verdict.UNPARSED and nothing.p_correct is None


def test_probabilities_that_add_up_to_more_than_one_are_none() -> None:
    """A server may send anything; "all are certain" would else be a tie that counts as correct."""
    found = verdict_from_log_probs({YES: [0.0], NO: [0.0]}, threshold=0.5, min_mass=0.5)
    assert found.verdict is Verdict.UNPARSED and found.mass is None and "more than 1" in (found.note or "")
    assert verdict_from_log_probs({YES: [1e-6], NO: [-30.0]}, threshold=0.5, min_mass=0.5).verdict is YES
