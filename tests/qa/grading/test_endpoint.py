"""Asking a real server: patience with what may pass, an end with what can't, and no key anywhere."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from tests.qa.grading.serving import Answer, chat, serving

from gpuherd.errors import UsageError
from gpuherd.qa.grading.openai import CaseFailed, Dialect, Endpoint, JudgeRefused, JudgeUnavailable, RetryPolicy

KEY = "sk-very-secret"


def endpoint(url: str, waits: list[float] | None = None, **changes: Any) -> Endpoint:
    values: dict[str, Any] = {"key": None, "most_tokens": 16, "dialect": Dialect(), "patience": RetryPolicy(retries=3)}
    return Endpoint(url, "m", wait=([] if waits is None else waits).append, **(values | changes))


def test_a_reply_comes_back_with_its_log_probs() -> None:
    with serving(lambda number, asked: chat("yes", 0.75)) as server:
        reply = endpoint(server.url, key=KEY).ask("Is it?")
    assert reply.content == "yes" and reply.top is not None and set(reply.top) == {"yes", " no"}
    headers, asked = server.requests[0]
    assert asked["path"] == "/v1/chat/completions" and asked["messages"] == [{"role": "user", "content": "Is it?"}]
    assert headers["Authorization"] == f"Bearer {KEY}"


def test_failures_that_may_pass_are_waited_out() -> None:
    answers = [
        Answer({"error": {"message": "slow down"}}, 429, {"Retry-After": "7"}),
        Answer(b"<html>busy</html>", 503),
        Answer(b"not JSON"),
        chat("no"),
    ]
    waits: list[float] = []
    with serving(lambda number, asked: answers[number]) as server:
        assert endpoint(server.url, waits).ask("?").content == "no"
    assert waits == [7.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (Answer({"error": {"message": "overloaded"}}, 500), r"HTTP 500 \(overloaded\)"),
        (Answer({"choices": []}), "no chat completion"),
        (Answer(b"{}", headers={"Content-Length": "999"}), "the connection broke|no whole reply"),
    ],
)
def test_patience_ends(broken: Answer, told: str) -> None:
    waits: list[float] = []
    with serving(lambda number, asked: broken) as server, pytest.raises(JudgeUnavailable) as given_up:
        endpoint(server.url, waits, patience=RetryPolicy(timeout_s=1.0, retries=2)).settle("?")
    given_up.match(told)
    given_up.match("3 times in a row; the same command goes on from here")
    assert waits == [1.0, 2.0] and len(server.requests) == 3


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with serving(lambda number, asked: chat("yes")) as server:
        pass
    with pytest.raises(JudgeUnavailable, match="no connection"):
        endpoint(server.url, patience=RetryPolicy(retries=0)).ask("?")


def test_a_server_that_is_silent_is_given_up() -> None:
    def slow(number: int, asked: Any) -> Answer:
        time.sleep(1.0)
        return chat("yes")

    with serving(slow) as server, pytest.raises(JudgeUnavailable, match=r"no (whole reply within 0.1 s|connection)"):
        endpoint(server.url, patience=RetryPolicy(timeout_s=0.1, retries=0)).ask("?")


def test_waits_grow_and_have_a_limit() -> None:
    patience = RetryPolicy()
    assert [patience.wait_s(tries, None) for tries in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert patience.wait_s(1, "2.5") == 2.5
    assert patience.wait_s(1, "1e9") == 600.0
    assert patience.wait_s(3, "Wed, 21 Oct 2026 07:28:00 GMT") == 4
    assert patience.wait_s(3, "-1") == 4
    assert patience.wait_s(3, "nan") == 4


@pytest.mark.parametrize(
    ("status", "remedy"),
    [(401, "--api-key-env"), (403, "--api-key-env"), (404, "--judge-model"), (400, "documentation")],
)
def test_a_refusal_ends_it_at_once_and_names_no_key(status: int, remedy: str) -> None:
    refusal = Answer({"error": {"message": f"Incorrect key provided: {KEY}\x1b[31m"}}, status)
    with serving(lambda number, asked: refusal) as server, pytest.raises(JudgeRefused) as refused:
        endpoint(server.url, key=KEY).settle("?")
    assert KEY not in str(refused.value) and "(the key)" in str(refused.value) and remedy in str(refused.value)
    assert "\x1b" not in str(refused.value)
    assert len(server.requests) == 1


def test_a_key_never_follows_a_redirect() -> None:
    with serving(lambda number, asked: chat("yes")) as thief:
        moved = Answer({}, 307, {"Location": f"{thief.url}/chat/completions"})
        with serving(lambda number, asked: moved) as server, pytest.raises(JudgeRefused, match="another address"):
            endpoint(server.url, key=KEY).ask("?")
    assert thief.requests == []


def test_a_server_is_asked_as_it_wants_to_be() -> None:
    """As servers of reasoning models do: no max_tokens, no log-probs."""

    def picky(number: int, asked: dict[str, Any]) -> Answer:
        if "max_tokens" in asked:
            return Answer({"error": {"message": "use 'max_completion_tokens' instead of 'max_tokens'"}}, 400)
        if "top_logprobs" in asked:
            return Answer({"detail": "logprobs is not available"}, 422)
        return chat("no")

    with serving(picky) as server:
        asks = endpoint(server.url)
        asks.settle("?")
        assert asks.ask("?").content == "no"
        assert asks.dialect == Dialect(None, "max_completion_tokens")
        assert asks.ask("?").top is None
    assert len(server.requests) == 6, "what a server has refused once it is not asked for again"


def test_one_text_may_be_refused_and_changes_nothing_for_the_others() -> None:
    """What a server says of one text is no reason to ask it otherwise about others: it may quote the text."""

    def act(number: int, asked: dict[str, Any]) -> Answer:
        if "long" in asked["messages"][0]["content"]:
            return Answer({"error": {"message": "the context is too short; logprobs, max_completion_tokens"}}, 400)
        if "crash" in asked["messages"][0]["content"]:
            return Answer({"error": "oh"}, 500)
        return chat("yes")

    with serving(act) as server:
        asks = endpoint(server.url)
        asks.settle("?")
        for text in ("long", "crash"):
            with pytest.raises(CaseFailed):
                asks.ask(text)
        assert asks.dialect == Dialect() and asks.ask("?").content == "yes"


def test_a_server_that_echoes_the_key_does_not_get_it_into_a_file() -> None:
    with serving(lambda number, asked: chat(f"Authorization: Bearer {KEY}")) as server:
        assert endpoint(server.url, key=KEY).ask("?").content == "Authorization: Bearer (the key)"


def test_a_key_for_this_machine_goes_to_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda number, asked: chat("no")) as proxy, serving(lambda number, asked: chat("yes")) as server:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        assert endpoint(server.url, key=KEY).ask("?").content == "yes"
    assert proxy.requests == []


@contextmanager
def trickling(first: bytes) -> Iterator[str]:
    """A server that sends this and then a byte every 50 ms, for ever."""
    ended = threading.Event()

    def serve() -> None:
        with suppress(OSError):
            while True:
                found, _ = listening.accept()
                with found, suppress(OSError):
                    found.sendall(first)
                    while not ended.wait(0.05):
                        found.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            ended.set()


@pytest.mark.parametrize(
    "first",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Long: ",
    ],
)
def test_a_server_that_trickles_has_no_longer_than_one_that_is_silent(first: bytes) -> None:
    with trickling(first) as url, pytest.raises(JudgeUnavailable, match=r"no whole reply within 0\.3 s"):
        endpoint(url, patience=RetryPolicy(timeout_s=0.3, retries=0)).ask("?")


def test_what_is_under_way_is_broken_off() -> None:
    with trickling(b"HTTP/1.1 200 OK\r\n\r\n") as url:
        asks = endpoint(url, patience=RetryPolicy(timeout_s=3600.0, retries=0))
        clock = threading.Timer(0.2, asks.stop)
        clock.start()
        with pytest.raises(JudgeUnavailable):
            asks.ask("?")
        clock.join()


@pytest.mark.parametrize("key", ["", " sk", "a\nb", "\u00e9"])
def test_a_key_that_can_not_be_sent_is_refused_unseen(key: str) -> None:
    with pytest.raises(UsageError) as refused:
        endpoint("http://localhost/v1", key=key)
    assert not key or repr(key)[1:-1] not in str(refused.value)
