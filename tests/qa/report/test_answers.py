"""Answers in chunks: nothing is lost but what is said to be, and each token is there as it is."""

from __future__ import annotations

import base64
import json
import random
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.qa.report.made_runs import answered, generation, made_run

from gpuherd.lm.backend import Finish
from gpuherd.qa.grading.verdicts import Verdict
from gpuherd.qa.record import Answered, Prompted, Question
from gpuherd.qa.report.answers import CHUNK, LEVELS, VERDICTS, TextLimits, answer_values, chunks_of
from gpuherd.qa.report.reading import ReportedRun

WIDE = LEVELS[0]


def shown(*answers: Answered, **known: Any) -> ReportedRun:
    """A run of these answers of which nothing else is known."""
    return ReportedRun("run", (), (), answers, **known)


def one_answer(pieces: list[str], log_probs: list[float | None] | None = None, question: str = "q?") -> Answered:
    """An answer of these pieces, each as probable as the next."""
    made = generation(pieces, log_probs or [-0.5] * len(pieces))
    return Answered(0, Question("a", question, ("r",)), Prompted("0", 3), made)


def values_of(one: Answered, limits: TextLimits = WIDE, **known: Any) -> dict[str, Any]:
    return answer_values(shown(one, **known), one, limits)


def unpacked(texts: tuple[str, ...]) -> list[dict[str, Any]]:
    return [each for text in texts for each in json.loads(zlib.decompress(base64.b64decode(text)))]


def test_every_answer_is_there_once_in_order() -> None:
    run = made_run(2 * CHUNK + 3, samples=2, weightings=0)
    chunks = chunks_of(run, 10**7)
    found = unpacked(chunks.texts)
    assert [each["id"] for each in found] == [each.question.id for each in run.answers]
    assert (chunks.answers, chunks.limits, len(chunks.texts)) == (2 * CHUNK + 3, WIDE, 3)
    for value, each in zip(found, run.answers, strict=True):
        assert "".join(value["main"]["pieces"]) == each.main.text
        clusters = run.clusters[each.question.id]
        order = sorted(range(len(each.samples)), key=lambda at: clusters[at])
        assert [sample["text"] for sample in value["samples"]] == [each.samples[at].text for at in order]
        meanings = [sample["meaning"] for sample in value["samples"]]  # each once, above those that have it too
        assert [number for number in meanings if number] == sorted({number + 1 for number in clusters})
        assert [bool(sample["opens"]) for sample in value["samples"]] == list(map(bool, meanings))
        assert value["main"]["nll"] == pytest.approx([-(p or 0.0) for p in each.main.log_probs], rel=1e-3)


@given(st.lists(st.text(st.characters(exclude_categories=[]), max_size=4), max_size=8))
def test_tokens_are_packed_as_they_are_also_halves_of_characters(pieces: list[str]) -> None:
    (chunk,) = chunks_of(shown(one_answer(pieces)), 10**6).texts
    (found,) = unpacked((chunk,))
    units = [each.encode("utf-16-le", "surrogatepass") for each in found["main"]["pieces"]]
    assert units == [each.encode("utf-16-le", "surrogatepass") for each in pieces]


def test_a_long_answer_is_cut_behind_a_token_and_says_by_how_much() -> None:
    main = values_of(one_answer(["abc"] * 10), TextLimits(11, 5, 5, 5, 5))["main"]
    assert (main["pieces"], main["cut"], main["tokens"]) == (["abc"] * 3, 21, 10)
    assert len(main["nll"]) == 3
    assert values_of(one_answer(["abc"]), TextLimits(2, 5, 5, 5, 5))["main"]["cut"] == 3


def test_other_long_texts_say_by_how_much_too() -> None:
    value = values_of(one_answer(["a"], question="x" * 25), TextLimits(20, 5, 5, 5, 5))
    assert value["question"] == ["x" * 20, 5]
    assert value["references"] == [{"text": "r"}]


def test_what_is_not_known_is_not_zero() -> None:
    value = values_of(one_answer(["a", "b"], [None, -1.0]))
    assert value["main"]["nll"] == [None, 1.0]
    assert value["main"]["relevance"] is None
    assert value["context"] is None
    made = generation(["a"], [None])
    sampled = Answered(0, Question("a", "q", ("r",)), Prompted("0", 3), None, (made, made))
    assert [each["nll"] for each in values_of(sampled)["samples"]] == [None, None]
    assert [each["meaning"] for each in values_of(sampled)["samples"]] == ["", ""]
    assert values_of(sampled)["clustered"] is False


def test_relevance_belongs_to_tokens_or_is_not_shown() -> None:
    one = one_answer(["a", "b"])
    assert values_of(one, relevance={"a": [0.25, 0.75, 0.0]})["main"]["relevance"] == [0.25, 0.75]
    assert values_of(one, relevance={"a": [0.25]})["main"]["relevance"] is None
    assert values_of(one, relevance={"b": [0.25, 0.5]})["main"]["relevance"] is None


def test_shares_of_token_sar_are_of_whole_answers() -> None:
    one, relevance = one_answer(["ab", "cd"], [-1.0, -2.0]), {"a": [0.5, 0.25]}
    assert values_of(one, relevance=relevance)["main"]["share"] == [0.5, 0.5]  # of 0.5 * 1 + 0.25 * 2
    assert values_of(one)["main"]["share"] is None
    assert values_of(one, TextLimits(2, 5, 5, 5, 5), relevance=relevance)["main"]["share"] is None
    assert values_of(one, relevance={"a": [0.0, 0.0]})["main"]["share"] == [None, None]
    unknown = one_answer(["ab", "cd"], [None, -2.0])
    assert values_of(unknown, relevance=relevance)["main"]["share"] == [None, None]


def test_an_end_token_stands_apart() -> None:
    stopped = Answered(0, Question("a", "q", ("r",)), Prompted("0", 3), generation(["a"], [-0.5], Finish.STOP))
    assert values_of(stopped)["ending"] == "1 token; ended by a stop string. Prompt: 3 tokens."
    assert values_of(one_answer(["a"]))["ending"].startswith(
        "1 token; ended by an end token (p 99.0 %, NLL 0.0100 nats)"
    )


def test_judgments_stand_in_the_order_of_judges() -> None:
    run = made_run(60, samples=0)
    for each in run.answers:
        value = answer_values(run, each, WIDE)
        for judged, found in zip(run.judgings, value["judgments"], strict=True):
            judgment = judged.judgments[(each.question.id, "greedy")]
            assert found["code"] == VERDICTS.index(judgment.verdict) and found["name"] == judged.meta.name
            assert found["reply"] == judgment.reply
            assert (found["note"] is not None) == (judgment.verdict is Verdict.UNPARSED)
    assert VERDICTS == ("correct", "incorrect", "not_attempted", "unparsed", "nan")  # as data.js has them


def test_with_little_room_texts_become_shorter_before_answers_are_left_out() -> None:
    draw = random.Random(1)
    run = shown(*[answered(number, draw, samples=3, words=40) for number in range(130)])
    found = [chunks_of(run, 10**7)]
    room = sum(map(len, found[0].texts))
    while found[-1].answers:
        room = int(0.8 * room)
        found.append(chunks_of(run, room))
        assert sum(map(len, found[-1].texts)) <= room
        assert len(unpacked(found[-1].texts)) == found[-1].answers
    places = [LEVELS.index(each.limits) for each in found]
    assert places == sorted(places)
    assert (places[0], places[1] > 0, places[-1]) == (0, True, len(LEVELS) - 1)
    assert {each.answers for each in found if each.limits is not LEVELS[-1]} == {130}
    assert CHUNK in {each.answers for each in found}  # some, but not all
