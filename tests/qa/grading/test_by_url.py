"""A judge behind an address: judged by a real server on this machine, interrupted, resumed, paid for once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.qa.grading.serving import Answer, answer_in, chat, serving

from gpuherd.errors import UsageError
from gpuherd.qa.grading.by_url import JudgingByUrl
from gpuherd.qa.grading.config import JudgeConfig, judge_named
from gpuherd.qa.grading.files import judgings_of, judgments
from gpuherd.qa.grading.openai import JudgeRefused, JudgeUnavailable, RetryPolicy
from gpuherd.qa.grading.stage import JudgingOutcome
from gpuherd.qa.grading.verdicts import Verdict
from gpuherd.qa.runs import Run

KEY = "sk-very-secret"
QUICK = RetryPolicy(timeout_s=30.0, retries=2, first_wait_s=0.0, longest_wait_s=0.0)


def judge(run: Run, url: str, **options: Any) -> JudgingOutcome:
    config = JudgeConfig(judge_model="served", **options)
    return JudgingByUrl(judge_named(url, "served"), run, config, Console(quiet=True), patience=QUICK).run()


def by_sight(number: int, asked: dict[str, Any]) -> Answer:
    """Numbers are wrong, words are right; both surely."""
    return chat("no", 0.1) if answer_in(asked).isdigit() else chat("yes", 0.9)


def test_every_different_answer_is_asked_about_once(capitals: Run) -> None:
    with serving(by_sight) as server:
        made = judge(capitals, server.url, answers="all", concurrency=3)
        assert made.meta is not None and made.judged_cases == len(server.requests) - 1 == 48, "and one for the dialect"
        again = judge(capitals, server.url, answers="all")
        assert again.already and again.meta == made.meta and len(server.requests) == 49
    found = {(each.id, each.which): each for each in judgments(capitals.folder, made.meta)}
    for row in capitals.answers():
        for which, generation in row.which.items():
            each, text = found[row.question.id, which], generation.text.strip()
            if text in ("", "I don't know."):
                assert each.verdict is Verdict.NOT_ATTEMPTED
            else:
                assert each.verdict is (Verdict.INCORRECT if text.isdigit() else Verdict.CORRECT)
                assert each.p_correct == pytest.approx(0.1 if text.isdigit() else 0.9)
    assert made.meta.model == "served" and made.meta.settings["asked_as"]["top"] == 20
    assert made.meta.name.startswith("served-at-127.0.0.1-")


def test_what_was_replied_before_a_failure_is_kept_and_paid_for_once(capitals: Run) -> None:
    down = [True]

    def failing(number: int, asked: dict[str, Any]) -> Answer:
        return Answer({}, 503) if down[0] and number >= 20 else by_sight(number, asked)

    with serving(failing) as server:
        with pytest.raises(JudgeUnavailable, match="the same command goes on"):
            judge(capitals, server.url, concurrency=2)
        assert judgings_of(capitals.folder) == []
        before, down[0] = len(server.requests), False
        made = judge(capitals, server.url, concurrency=2)
        assert made.meta is not None and made.meta.total == 24
        asked = [request["messages"][0]["content"] for _, request in server.requests]
        assert set(asked[1:17]).isdisjoint(asked[before:]), "whole batches of 8 are not asked for again"


def test_replies_in_writing_are_read_strictly(capitals: Run) -> None:
    replies = ["<think>yes</think>Verdict: no", "Verdict: yes", "It says yes, so I answer yes.", "yes\nno"]
    with serving(lambda number, asked: chat(replies[(number - 1) % 4])) as server:
        made = judge(capitals, server.url, mode="text", concurrency=1, reply_tokens=99)
        assert made.meta is not None
        assert all("logprobs" not in asked and asked["max_tokens"] == 99 for _, asked in server.requests)
    counts = made.meta.counts
    assert [counts[verdict] for verdict in Verdict] == [6, 6, 2, 10, 0]
    kept = [each.reply for each in judgments(capitals.folder, made.meta) if each.reply is not None]
    assert sorted(set(kept)) == sorted(replies), "what a judge wrote is kept"


def test_the_key_is_sent_and_nowhere_written(capitals: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", KEY)
    with serving(by_sight) as server:
        judge(capitals, server.url, api_key_env="A_KEY")
        assert {headers["Authorization"] for headers, _ in server.requests} == {f"Bearer {KEY}"}
    for path in capitals.folder.root.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes()


def test_a_key_has_to_be_there_and_goes_to_no_stranger_in_the_open(
    capitals: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="is not set"):
        judge(capitals, "http://127.0.0.1:1/v1", api_key_env="A_KEY")
    monkeypatch.setenv("A_KEY", KEY)
    with pytest.raises(UsageError, match="unencrypted"):
        judge(capitals, "http://example.invalid/v1", api_key_env="A_KEY")
    with pytest.raises(UsageError) as refused:
        JudgeConfig(api_key_env=KEY)
    assert KEY not in str(refused.value)


def refusing(number: int, asked: dict[str, Any]) -> Answer:
    return Answer({"error": {"message": "no such model"}}, 404)


def test_a_refusal_ends_it_without_asking_for_the_rest(capitals: Run) -> None:
    with serving(refusing) as server:
        with pytest.raises(JudgeRefused, match="no such model"):
            judge(capitals, server.url, concurrency=1)
        assert len(server.requests) < 4


def test_a_refusal_ends_the_waiting_of_all_others(capitals: Run) -> None:
    """Seven requests wait an hour for a server that is busy; the eighth is refused, and nobody waits any more."""

    def act(number: int, asked: dict[str, Any]) -> Answer:
        if number == 0:
            return by_sight(number, asked)
        if number < 8:
            return Answer({}, 503, {"Retry-After": "3600"})
        time.sleep(0.3)  # so that the others wait by now
        return refusing(number, asked)

    config = JudgeConfig(judge_model="served", concurrency=8)
    with serving(act) as server, pytest.raises(JudgeRefused):
        patient = RetryPolicy(timeout_s=30.0, longest_wait_s=3600.0)
        JudgingByUrl(judge_named(server.url, "served"), capitals, config, Console(quiet=True), patience=patient).run()


def test_a_server_without_log_probs_is_noted_in_each_verdict(capitals: Run) -> None:
    def plain(number: int, asked: dict[str, Any]) -> Answer:
        if "logprobs" in asked:
            return Answer({"error": {"message": "logprobs: not supported"}}, 400)
        return chat("Verdict: yes")

    with serving(plain) as server:
        made = judge(capitals, server.url)
    assert made.meta is not None and made.meta.settings["asked_as"]["top"] is None
    judged = [each for each in judgments(capitals.folder, made.meta) if each.verdict is Verdict.CORRECT]
    assert len(judged) == 22
    assert {each.note for each in judged} == {"the server gave no log-probs; read from the text"}


def test_hostile_replies_are_kept_as_text(capitals: Run, tmp_path: Path) -> None:
    with serving(lambda number, asked: chat('\x1b[31m\u2028{"id": 1}\n\ud800' + "x" * 300_000)) as server:
        made = judge(capitals, server.url)
    assert made.meta is not None and made.meta.counts[Verdict.UNPARSED] == 22
    lines = capitals.folder.judging(made.meta.name).read_bytes().splitlines()
    assert b"\\ud800" not in b"".join(lines), "half a character can't be written as UTF-8"
    assert len(lines) == 24 and all(len(json.loads(line)) == 8 for line in lines)
    assert max(map(len, lines)) < 400_000


def test_a_case_that_the_server_can_not_deal_with_is_unparsed_and_the_others_are_judged(capitals: Run) -> None:
    def act(number: int, asked: dict[str, Any]) -> Answer:
        if answer_in(asked) in ("5", "8"):
            return Answer({"error": {"message": "maximum context length is 512 tokens"}}, 400)
        return by_sight(number, asked)

    with serving(act) as server:
        made = judge(capitals, server.url, concurrency=2)
    assert made.meta is not None
    unparsed = [each for each in judgments(capitals.folder, made.meta) if each.verdict is Verdict.UNPARSED]
    assert len(unparsed) == 2
    assert {each.note for each in unparsed} == {"no reply from the server: maximum context length is 512 tokens"}
    assert made.meta.counts[Verdict.CORRECT] == 14 and made.meta.counts[Verdict.INCORRECT] == 6


def test_a_server_that_takes_nothing_any_more_is_no_verdict_on_the_cases(capitals: Run) -> None:
    def act(number: int, asked: dict[str, Any]) -> Answer:
        return Answer({"error": "the model was unloaded"}, 400) if number >= 9 else by_sight(number, asked)

    with serving(act) as server, pytest.raises(JudgeRefused, match="the model was unloaded"):
        judge(capitals, server.url, concurrency=1)
    assert judgings_of(capitals.folder) == []


def test_how_the_server_was_asked_is_told_by_a_judging_that_asks_nothing(capitals: Run) -> None:
    def old(number: int, asked: dict[str, Any]) -> Answer:
        if "max_tokens" in asked:
            return Answer({"error": {"message": "use max_completion_tokens"}}, 400)
        return by_sight(number, asked)

    with serving(old) as server:
        judge(capitals, server.url)
        before = len(server.requests)
        made = judge(capitals, server.url, threshold=0.95)
        assert len(server.requests) == before
    assert made.meta is not None and made.meta.counts[Verdict.CORRECT] == 0
    assert made.meta.settings["asked_as"]["tokens_word"] == "max_completion_tokens"
