"""Looks that all requests share, and events of what has changed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from gpuherd.errors import UsageError
from gpuherd.web import live
from gpuherd.web.live import EventStream, Feed, Feeds, Fragment, Look, Readers, ReadTimeout, Streams, changes


@pytest.fixture
def readers() -> Readers:
    return Readers(2)


def counting(values: Callable[[int], str]) -> tuple[Callable[[], str], list[int]]:
    """A read that returns ``values(n)`` for the nth, and the numbers of the reads so far."""
    reads: list[int] = []

    def read() -> str:
        reads.append(len(reads))
        return values(reads[-1])

    return read, reads


def test_a_thousand_requests_are_one_read(readers: Readers) -> None:
    read, reads = counting(str)

    async def ask() -> list[Look[str]]:
        feed = Feed(read, 60.0, readers)
        return await asyncio.gather(*(feed.latest() for _ in range(1000)))

    looks = asyncio.run(ask())
    assert {look.value for look in looks} == {"0"}
    assert len(reads) == 1


def test_a_look_is_read_again_after_its_interval(readers: Readers) -> None:
    read, reads = counting(str)

    async def ask() -> list[str]:
        feed = Feed(read, 0.05, readers)
        seen = [(await feed.latest()).value]
        seen.append((await feed.latest()).value)
        await feed.wait_for_next()
        return [*seen, (await feed.latest()).value]

    assert asyncio.run(ask()) == ["0", "0", "1"]
    assert len(reads) == 2


def test_a_failure_is_kept_as_long_as_a_value_and_then_tried_again(readers: Readers) -> None:
    def value(number: int) -> str:
        if number == 0:
            raise UsageError("the queue is damaged")
        return "well"

    read, reads = counting(value)

    async def ask() -> str:
        feed = Feed(read, 0.05, readers)
        for _ in range(100):
            with pytest.raises(UsageError, match="damaged"):
                await feed.latest()
        assert len(reads) == 1
        await feed.wait_for_next()
        return (await feed.latest()).value

    assert asyncio.run(ask()) == "well"


def test_a_read_that_hangs_gives_the_last_value_marked_as_late(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "PATIENCE_S", 0.05)
    go_on = threading.Event()

    def value(number: int) -> str:
        if number == 1:
            go_on.wait(20)
        return str(number)

    read, _ = counting(value)

    async def ask() -> list[tuple[str, bool]]:
        feed = Feed(read, 0.0, readers)
        found = [await feed.latest(), await feed.latest(), await feed.latest()]
        go_on.set()
        while (look := await feed.latest()).late:
            await asyncio.sleep(0.01)
        return [(each.value, each.late) for each in (*found, look)]

    *early, last = asyncio.run(ask())
    assert early == [("0", False), ("0", True), ("0", True)]
    assert int(last[0]) >= 1


def test_a_first_read_that_hangs_is_an_error(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PATIENCE_S", 0.05)
    go_on = threading.Event()

    async def ask() -> None:
        with pytest.raises(ReadTimeout):
            await Feed(lambda: go_on.wait(20), 1.0, readers).latest()
        go_on.set()

    asyncio.run(ask())


def test_a_read_that_hangs_keeps_no_process_from_ending() -> None:
    program = (
        "import asyncio, threading\n"
        "from gpuherd.web import live\n"
        "live.PATIENCE_S = 0.1\n"
        "async def main():\n"
        "    feeds = live.Feeds()\n"
        "    try:\n"
        "        await feeds.of('a', threading.Event().wait).latest()\n"
        "    except live.ReadTimeout:\n"
        "        print('late')\n"
        "    feeds.close()\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "late\n", "")


def test_feeds_that_nobody_asks_for_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_MOST_FEEDS", 2)
    feeds = Feeds()
    first = feeds.of("a", lambda: 1)
    feeds.of("b", lambda: 2)
    assert feeds.of("a", lambda: 3) is first
    feeds.of("c", lambda: 4)  # b goes
    assert feeds.of("a", lambda: 5) is first
    feeds.close()


def test_only_what_has_changed_is_sent(readers: Readers) -> None:
    def value(number: int) -> str:
        if number == 1:
            raise UsageError("a moment without the <driver>")
        return "early" if number < 3 else "late"

    read, _ = counting(value)

    def render(look: Look[str]) -> Sequence[Fragment]:
        return [Fragment("head", "always the same"), Fragment("body", look.value)]

    async def take() -> list[Sequence[Fragment]]:
        parts = changes(Feed(read, 0.0, readers), render)
        return [await anext(parts) for _ in range(4)]

    first, failed, well, last = asyncio.run(take())
    assert [part.id for part in first] == ["head", "body"]
    assert failed == [Fragment("connection", "Not up to date: a moment without the &lt;driver&gt;")]
    assert well == [Fragment("connection", "")]
    assert last == [Fragment("body", "late")]


class Client:
    """A client of an ASGI application: what it was sent, and when it goes."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.got = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.got.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def some(*parts: Fragment) -> AsyncIterator[Sequence[Fragment]]:
    """These fragments, and then none for as long as the client stays."""
    yield parts
    await asyncio.sleep(60)


def test_events_are_json_in_one_line_and_end_when_the_client_goes() -> None:
    async def drive() -> bytes:
        streams, client = Streams(), Client()
        stream = EventStream(streams, some(Fragment("log", "a\nb</script>\u2028", "append")))
        task = asyncio.create_task(stream({}, client.receive, client.send))
        while b"data" not in client.body:
            await asyncio.sleep(0.01)
        assert streams.open == 1
        client.gone.set()
        await asyncio.wait_for(task, 5)
        assert streams.open == 0
        return client.body

    event = asyncio.run(drive())
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event[6:]) == [{"id": "log", "html": "a\nb</script>\u2028", "how": "append"}]


def test_streams_end_with_the_server_and_are_bounded() -> None:
    async def drive() -> tuple[Client, Client]:
        streams, first, second = Streams(most=1), Client(), Client()
        task = asyncio.create_task(EventStream(streams, some())({}, first.receive, first.send))
        await first.got.wait()
        await EventStream(streams, some())({}, second.receive, second.send)
        streams.end()
        await asyncio.wait_for(task, 5)
        return first, second

    first, second = asyncio.run(drive())
    assert first.sent[0]["status"] == 200
    assert not first.sent[-1].get("more_body", False)
    assert second.sent[0]["status"] == 503


def test_a_slow_client_gets_the_newest_state_and_no_queue(readers: Readers) -> None:
    read, _ = counting(lambda number: f"state {number}")

    async def drive() -> list[bytes]:
        client = Client()
        let_go = asyncio.Event()
        bodies: list[bytes] = []

        async def slow(message: Any) -> None:
            if message.get("body", b"").startswith(b"data"):
                bodies.append(message["body"])
                if len(bodies) == 1:
                    await let_go.wait()
                else:
                    client.gone.set()

        parts = changes(Feed(read, 0.0, readers), lambda look: [Fragment("a", look.value)])
        task = asyncio.create_task(EventStream(Streams(), parts)({}, client.receive, slow))
        began = time.monotonic()
        while time.monotonic() - began < 0.3:
            await asyncio.sleep(0.05)
        let_go.set()
        await asyncio.wait_for(task, 5)
        return bodies

    assert len(asyncio.run(drive())) == 2
