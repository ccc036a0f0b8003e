"""What is sent to a server, and what its replies mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.qa.grading.openai import Dialect, Reply, body, next_dialect, read_reply, ruling_of
from gpuherd.qa.grading.verdicts import Mode, Ruling, Verdict, Way


def completion(
    content: Any, top: dict[str, float] | None = None, first: str = "", finish: str = "stop"
) -> dict[str, Any]:
    """A chat completion as servers give it; ``first``: a token of white space before the one with the log-probs."""
    log_probs = None
    if top is not None:
        rows = [{"token": token, "logprob": value} for token, value in top.items()]
        log_probs = {"content": [{"token": first, "logprob": -0.1, "top_logprobs": []}] if first else []}
        log_probs["content"].append({**rows[0], "top_logprobs": rows})
    return {"choices": [{"message": {"content": content}, "logprobs": log_probs, "finish_reason": finish}]}


def verdict_of(reply: Any, way: Way = "two-way", mode: Mode = "tokens", threshold: float | None = 0.5) -> Ruling:
    return ruling_of(read_reply(reply), way=way, mode=mode, threshold=threshold, min_mass=0.5)


def test_a_request_is_greedy_and_asks_for_log_probs() -> None:
    assert body("m", "text", dialect=Dialect(), most_tokens=16) == {
        "model": "m",
        "messages": [{"role": "user", "content": "text"}],
        "max_tokens": 16,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 20,
    }
    assert body("m", "t", dialect=Dialect(None, "max_completion_tokens", False), most_tokens=9) == {
        "model": "m",
        "messages": [{"role": "user", "content": "t"}],
        "max_completion_tokens": 9,
    }


def test_what_a_server_refuses_by_name_is_said_otherwise_until_nothing_is_left() -> None:
    dialect: Dialect | None = Dialect()
    seen = []
    for complaint in (
        "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.",
        "top_logprobs must be at most 5",
        "logprobs are not supported by this model",
        "'temperature' does not support 0",
        "logprobs are not supported by this model",
    ):
        assert dialect is not None
        dialect = next_dialect(dialect, complaint)
        seen.append(dialect)
    assert seen == [
        Dialect(20, "max_completion_tokens"),
        Dialect(5, "max_completion_tokens"),
        Dialect(None, "max_completion_tokens"),
        Dialect(None, "max_completion_tokens", False),
        None,
    ]
    assert next_dialect(Dialect(), "the model is overloaded") is None


def test_a_verdict_is_read_from_the_log_probs_summed_over_spellings() -> None:
    top = {" yes": math.log(0.5), "Yes": math.log(0.2), "no": math.log(0.1), " perhaps": math.log(0.2)}
    found = verdict_of(completion("yes", top, first="\n"))
    assert found.verdict is Verdict.CORRECT and found.reply == "yes" and found.note is None
    assert found.p_correct == pytest.approx(7 / 8) and found.mass == pytest.approx(0.8)
    assert verdict_of(completion("yes", top), threshold=0.9).verdict is Verdict.INCORRECT


def test_three_grades_are_capital_letters() -> None:
    top = {"A": math.log(0.3), " B": math.log(0.4), "a": math.log(0.25)}
    found = verdict_of(completion("B", top), "three-way", threshold=None)
    assert found.verdict is Verdict.INCORRECT and found.mass == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("reply", "verdict", "note"),
    [
        (completion("Verdict: yes"), Verdict.CORRECT, "no log-probs"),
        (
            completion("Verdict: no", {"Ver": -0.01, "yes": -6.0}),
            Verdict.INCORRECT,
            "less than 0.5; read from the text",
        ),
        (completion("I think that yes", {"I": -0.01}), Verdict.UNPARSED, "no line of the reply"),
        (completion("", finish="length"), Verdict.UNPARSED, "cut off (--reply-tokens allows more)"),
        (completion(None), Verdict.UNPARSED, "the reply is empty"),
        (completion("no", {"no": math.nan}), Verdict.INCORRECT, "no log-probs"),
    ],
)
def test_without_log_probs_that_carry_a_verdict_the_text_is_read(reply: Any, verdict: Verdict, note: str) -> None:
    found = verdict_of(reply)
    assert found.verdict is verdict and found.p_correct is None
    assert found.note is not None and note in found.note


def test_in_text_mode_log_probs_are_not_looked_at() -> None:
    found = verdict_of(completion("<think>hm</think>\nVerdict: no", {"yes": -0.01}), mode="text", threshold=None)
    assert found == Ruling(Verdict.INCORRECT, reply="<think>hm</think>\nVerdict: no")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "content", "logprobs", "token", "logprob", "top_logprobs"]), inner
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_whatever_a_server_sends_is_a_reply_or_refused(value: Any) -> None:
    for sent in (value, {"choices": [{"message": {"content": "yes"}, "logprobs": value}]}):
        try:
            reply = read_reply(sent)
        except ValueError:
            continue
        assert isinstance(reply, Reply)
        ruling_of(reply, way="two-way", mode="tokens", threshold=0.5, min_mass=0.5)


def test_a_number_without_end_is_no_log_prob() -> None:
    token = {"token": "yes", "logprob": -(10**400), "top_logprobs": [{"token": "no", "logprob": -0.1}]}
    reply = read_reply({"choices": [{"message": {"content": "no"}, "logprobs": {"content": [token]}}]})
    assert reply.top == {"no": -0.1}


def test_a_judge_that_is_not_in_the_form_is_not_read_from_the_word_it_begins_with() -> None:
    """Else --min-mass would mean nothing behind an address."""
    how: dict[str, Any] = {"way": "two-way", "mode": "tokens", "threshold": 0.5}
    reply = Reply("yes", {"yes": math.log(0.3), "no": math.log(0.1)}, "stop")
    found = ruling_of(reply, min_mass=0.5, **how)
    assert found.verdict is Verdict.UNPARSED and found.mass == pytest.approx(0.4) and "together" in (found.note or "")
    assert ruling_of(reply, min_mass=0.3, **how).verdict is Verdict.CORRECT
    spoken = Reply("Verdict: yes", {"Verdict": math.log(0.6), "no": math.log(0.1)}, "stop")
    assert ruling_of(spoken, min_mass=0.5, **how).verdict is Verdict.CORRECT
    pieces = Reply("INCORRECT", {"INC": math.log(0.9)}, "stop")
    how |= {"way": "three-way", "threshold": None}
    assert ruling_of(pieces, min_mass=0.5, **how).verdict is Verdict.INCORRECT
