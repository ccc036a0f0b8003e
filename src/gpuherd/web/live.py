"""Looks at the machine that all requests share, and server-sent events of what has changed.

A ``Feed`` reads one thing (the GPUs, a queue, a log) in a thread, at most once per interval however many tabs and
requests want it, and not at all while there are none. An ``EventStream`` sends an open page the parts that differ from
those it sent before. A client that reads slowly gets the newest state when it is ready again; nothing queues up for
it, and ``access`` drops one that does not read at all.

Knows nothing of GPUs, queues or HTML.
"""

from __future__ import annotations

import asyncio
import html
import json
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from gpuherd.errors import GpuherdError, clean

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")

# Threads that read. One that hangs (a file server that is gone) costs its thread and holds up no other feed's.
_READERS = 16
# How long a request waits for a read before it gets the last known value, or an error if there is none.
PATIENCE_S = 10.0
_MOST_FEEDS = 64
# Open streams; each is a connection. Browsers try again by themselves.
MOST_STREAMS = 100
# A comment is sent so often when nothing has changed, so that proxies don't close the connection.
_BEAT_S = 15.0
# The id of the line of a page that says whether it is up to date (``templates/base.html``).
CONNECTION = "connection"


class ReadTimeout(GpuherdError):
    """A read has not ended in time, and there is no earlier value."""


@dataclass(frozen=True, slots=True)
class Look(Generic[T]):
    """A value as it was read: ``at`` in wall-clock seconds, ``number`` counts the reads; ``late``: a newer read has not
    ended in time."""

    value: T
    at: float
    number: int
    late: bool = False


@dataclass(frozen=True, slots=True)
class Fragment:
    """New content of the element with this id: in place of the old one (``morph``: what is the same stays, with its
    focus), or behind it (``append``)."""

    id: str
    html: str
    how: Literal["morph", "append"] = "morph"


Render = Callable[[Look[T]], Sequence[Fragment]]


class Readers:
    """Threads that read, a few at a time. Unlike those of an executor they don't keep the process from ending."""

    def __init__(self, most: int = _READERS) -> None:
        self._free = asyncio.Semaphore(most)
        self._closed = False

    def close(self) -> None:
        """Refuses further reads."""
        self._closed = True

    async def run(self, read: Callable[[], T]) -> T:
        """What ``read`` returns or raises, called in a thread."""
        async with self._free:
            if self._closed:
                raise ReadTimeout("the server ends")
            loop = asyncio.get_running_loop()
            result: asyncio.Future[T] = loop.create_future()

            def settle(value: T | None, problem: Exception | None) -> None:
                if result.done():
                    return
                if problem is not None:
                    result.set_exception(problem)
                else:
                    result.set_result(cast("T", value))

            def work() -> None:
                value, problem = None, None
                try:
                    value = read()
                except Exception as raised:  # raised where it is waited for
                    problem = raised
                with suppress(RuntimeError):  # the server has ended meanwhile
                    loop.call_soon_threadsafe(settle, value, problem)

            threading.Thread(target=work, name="gpuherd-web-read", daemon=True).start()
            return await result


class Feed(Generic[T]):
    """One thing that is read again and again, at most once per ``every_s`` seconds, and only when somebody asks.

    An exception that ``read`` raises is kept and raised for as long as a value would be.
    """

    def __init__(self, read: Callable[[], T], every_s: float, readers: Readers) -> None:
        self.every_s = every_s
        self._read = read
        self._readers = readers
        self._look: Look[T] | None = None
        self._problem: Exception | None = None
        self._due = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._number = 0
        self._shown: tuple[Render[T], int, bool, Sequence[Fragment]] | None = None

    async def latest(self) -> Look[T]:
        """The value, at most ``every_s`` seconds old, or older and marked ``late`` if reading takes longer than
        ``PATIENCE_S``. Raises what ``read`` raised, or ReadTimeout."""
        if self._reading is None and time.monotonic() >= self._due:
            self._reading = asyncio.create_task(self._read_once())
        late = False
        if self._reading is not None:
            _, waiting = await asyncio.wait({self._reading}, timeout=PATIENCE_S)
            late = bool(waiting)
        if self._problem is not None:
            raise self._problem
        if self._look is None:
            raise ReadTimeout(f"nothing could be read in {PATIENCE_S:g} s; is a file server not answering?")
        return Look(self._look.value, self._look.at, self._look.number, late=True) if late else self._look

    async def _read_once(self) -> None:
        self._number += 1
        try:
            value = await self._readers.run(self._read)
            self._look, self._problem = Look(value, time.time(), self._number), None
        except Exception as problem:  # raised in ``latest``
            self._problem = problem
        finally:
            self._due = time.monotonic() + self.every_s
            self._reading = None

    def expire(self) -> None:
        """Has the value read anew when it is next asked for: something was changed that it shows."""
        self._due = 0.0

    def rendered(self, look: Look[T], render: Render[T]) -> Sequence[Fragment]:
        """The fragments of this look: those that were made of it before, for other requests and streams."""
        if self._shown is None or self._shown[:3] != (render, look.number, look.late):
            self._shown = render, look.number, look.late, tuple(render(look))
        return self._shown[3]

    async def wait_for_next(self) -> None:
        """Sleeps until the value can have changed."""
        await asyncio.sleep(max(0.05, self._due - time.monotonic()))


class Feeds:
    """The feeds by key, made when first asked for; of too many those are dropped that nobody has asked for longest."""

    def __init__(self) -> None:
        self._readers = Readers()
        self._feeds: OrderedDict[Hashable, Feed[Any]] = OrderedDict()

    def of(self, key: Hashable, read: Callable[[], T], every_s: float = 2.0) -> Feed[T]:
        """The feed of this key, with this ``read`` if it is new."""
        feed = self._feeds.pop(key, None)
        if feed is None:
            feed = Feed(read, every_s, self._readers)
        self._feeds[key] = feed
        while len(self._feeds) > _MOST_FEEDS:
            self._feeds.popitem(last=False)
        return feed

    def expire(self, first: Hashable) -> None:
        """Has the feeds whose key is a tuple that begins so be read anew."""
        for key, feed in self._feeds.items():
            if isinstance(key, tuple) and key[:1] == (first,):
                feed.expire()

    def close(self) -> None:
        """Starts no further read; one that hangs is not waited for."""
        self._readers.close()


async def changes(feed: Feed[T], render: Render[T]) -> AsyncIterator[Sequence[Fragment]]:
    """The fragments of each look that differ from those before; first all of them. While reading fails, the page keeps
    what it shows, and its line ``CONNECTION`` says why it is not up to date."""
    shown: dict[str, str] = {CONNECTION: ""}
    while True:
        try:
            parts = (*feed.rendered(await feed.latest(), render), Fragment(CONNECTION, ""))
        except (GpuherdError, OSError) as problem:
            parts = (Fragment(CONNECTION, f"Not up to date: {html.escape(clean(str(problem)))}"),)
        changed = [part for part in parts if shown.get(part.id) != part.html]
        if changed:
            shown.update((part.id, part.html) for part in changed)
            yield changed
        await feed.wait_for_next()


class Streams:
    """The open event streams of a server: how many there are, and their end when the server ends."""

    def __init__(self, most: int = MOST_STREAMS) -> None:
        self.most = most
        self.open = 0
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Ends all streams, so that the server can."""
        self._ending.set()

    async def ended(self) -> None:
        """Returns when the server ends."""
        await self._ending.wait()


class EventStream:
    """The response (an ASGI application) that sends fragments as server-sent events, until the client goes."""

    def __init__(self, streams: Streams, parts: AsyncIterator[Sequence[Fragment]]) -> None:
        self._streams = streams
        self._parts = parts

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        if self._streams.open >= self._streams.most:
            await _begin(send, 503, b"text/plain; charset=utf-8")
            await send({"type": "http.response.body", "body": b"too many open pages; close some of them\n"})
            return
        self._streams.open += 1
        try:
            await _begin(send, 200, b"text/event-stream; charset=utf-8")
            await self._send_all(receive, send)
        finally:
            self._streams.open -= 1

    async def _send_all(self, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_until_gone(receive))
        over = asyncio.ensure_future(self._streams.ended())
        following = asyncio.ensure_future(self._next())
        try:
            while True:
                done, _ = await asyncio.wait(
                    {gone, over, following}, timeout=_BEAT_S, return_when=asyncio.FIRST_COMPLETED
                )
                if gone in done:
                    return
                if over in done:
                    await send({"type": "http.response.body", "body": b""})
                    return
                body = b":\n\n"
                if following in done:
                    parts = following.result()
                    body = b"event: gone\ndata:\n\n" if parts is None else _event(parts)
                    if parts is not None:
                        following = asyncio.ensure_future(self._next())
                message = {"type": "http.response.body", "body": body, "more_body": following not in done}
                await send(message)
                if following in done:
                    return
        finally:
            for task in (gone, over, following):
                task.cancel()
            await asyncio.gather(gone, over, following, return_exceptions=True)
            if hasattr(self._parts, "aclose"):
                await self._parts.aclose()

    async def _next(self) -> Sequence[Fragment] | None:
        return await anext(self._parts, None)


def _event(parts: Sequence[Fragment]) -> bytes:
    # JSON has no line breaks, which would end the event; text that is no UTF-8 has been replaced before.
    return b"data: " + json.dumps([asdict(part) for part in parts]).encode() + b"\n\n"


async def _begin(send: Send, status: int, content_type: bytes) -> None:
    # nginx would collect what is sent otherwise.
    headers = [(b"content-type", content_type), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
