"""Notices to a command or a web address when a run ends or a job has failed."""

from __future__ import annotations

import http.client
import json
import logging
import os
import queue
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import IO, Any

from gpuherd import __version__
from gpuherd.errors import GpuherdError, UsageError
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.failures import clean
from gpuherd.jobs.monitor.format import counted
from gpuherd.jobs.records import Counts, Event, EventKind, Outcome

# Brings one notice out: to a command, or to a web address. Waits for the end of it, but never longer than its limit.
#
# A command and a server are strangers: what they say is cut after a few kilobytes, and how slowly they say it can't
# hold the caller up. What a notice says, and when it is sent, is ``notify``'s business.

COMMAND_S = 30.0
WEBHOOK_S = 10.0
_TEXT = "GPUHERD_NOTICE"
_MOST_SAID = 4096
_BLOCK = 65_536


class NotDelivered(Exception):
    """A notice did not arrive, or nothing says that it did; why, in words."""


def run_command(argv: Sequence[str], data: bytes, text: str, limit_s: float = COMMAND_S) -> None:
    """Runs the command with the notice as JSON on its standard input and its text in GPUHERD_NOTICE.

    Raises NotDelivered when it can't be started, fails, or takes longer than ``limit_s``. When it has ended, or its
    time is over, all processes of its session's first group are killed.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, _TEXT: text},
            start_new_session=True,
        )
    except (OSError, ValueError) as problem:
        raise NotDelivered(f"{argv[0]} can't be started: {problem}") from problem
    with process:
        try:
            in_time, said = _attend(process, data, limit_s)
        finally:
            # Also after a good end: nothing of it stays behind. It is not yet reaped, so the number is still its own.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    if not in_time:
        raise NotDelivered(f"{argv[0]} took more than {limit_s:g} s and was killed")
    if process.returncode:
        raise NotDelivered(f"{argv[0]} ended with {process.returncode}: {said.decode('utf-8', 'replace')}")


def _attend(process: subprocess.Popen[bytes], data: bytes, limit_s: float) -> tuple[bool, bytes]:
    """Feeds the command and hears it until it has ended; whether it did so in time, and the first of what it said.

    Its end is its own exit, not that of its pipes, which a child of it may hold open for ever.
    """
    deadline = clock.mono() + limit_s
    said = b""
    exited = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as waiting:
            waiting.register(exited, selectors.EVENT_READ)
            for pipe, what in ((process.stdin, selectors.EVENT_WRITE), (process.stderr, selectors.EVENT_READ)):
                if pipe is not None:
                    os.set_blocking(pipe.fileno(), False)
                    waiting.register(pipe, what)
            while True:
                ready = {key.fileobj for key, _ in waiting.select(max(0.0, deadline - clock.mono()))}
                if process.stderr in ready:
                    said = (said + _hear(process.stderr, waiting))[:_MOST_SAID]
                if process.stdin in ready:
                    data = _feed(process.stdin, data, waiting)
                if exited in ready or clock.mono() >= deadline:
                    return exited in ready, said
    finally:
        os.close(exited)


def _feed(stdin: IO[bytes], data: bytes, waiting: selectors.BaseSelector) -> bytes:
    """Writes what goes in; returns what is left. A command that does not read its input is passed over."""
    try:
        left = data[os.write(stdin.fileno(), data[:_BLOCK]) :]
    except BlockingIOError:
        return data
    except OSError:
        left = b""
    if not left:
        waiting.unregister(stdin)
        stdin.close()
    return left


def _hear(stderr: IO[bytes], waiting: selectors.BaseSelector) -> bytes:
    """What it says now. After its last word it is heard no more."""
    block = os.read(stderr.fileno(), _BLOCK)
    if not block:
        waiting.unregister(stderr)
    return block


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A POST that is sent elsewhere would arrive there without its body, and look as if all were well."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:  # noqa: ARG002
        fp.close()
        raise NotDelivered(f"it answered {code} and points to {newurl}; give that address")


_OPENER = urllib.request.build_opener(_NoRedirect)


class Webhook:
    """An address that takes notices. ``limit_s``: how long one may take.

    Each is sent in a thread of its own: neither the look-up of a name nor an answer that comes byte by byte ends after
    any time. While such a thread hangs no other is begun.
    """

    def __init__(self, url: str, limit_s: float = WEBHOOK_S):
        self._url = url
        self._limit_s = limit_s
        self._last: threading.Thread | None = None

    def post(self, data: bytes) -> None:
        """Posts the notice as JSON. Raises NotDelivered."""
        if self._last is not None and self._last.is_alive():
            raise NotDelivered("it has not done with the last notice yet")
        problems: list[str] = []
        self._last = threading.Thread(target=self._send, args=(data, problems), name="gpuherd-webhook", daemon=True)
        self._last.start()
        self._last.join(self._limit_s)
        if self._last.is_alive():
            raise NotDelivered(f"no answer within {self._limit_s:g} s")
        if problems:
            raise NotDelivered(problems[0])

    def _send(self, data: bytes, problems: list[str]) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": f"gpuherd/{__version__}"}
        try:
            # That it is http or https was seen to when the options were read.
            request = urllib.request.Request(self._url, data, headers, method="POST")  # noqa: S310
            with _OPENER.open(request, timeout=self._limit_s):
                pass
        except (OSError, ValueError, http.client.HTTPException, NotDelivered) as problem:
            problems.append(str(problem))
            if isinstance(problem, urllib.error.HTTPError):
                problem.close()


# Notices for people who are not looking: to a command or to a web address, when a run ends and when a job has failed.
#
# The dispatcher only hands events over; a thread of its own sends, so that nothing here can hold a run up. Failures
# come in herds: the first is told at once, those of the following minute in one notice. The last notice tells the end
# and whatever failure was not told yet. A notice that can't be sent is logged, once, and is no failure of the run.

logger = logging.getLogger(__name__)

BUNDLE_S = 60.0
_MOST_NAMED = 20
_FAILURES = frozenset({EventKind.FAILED, EventKind.CANCELLED})
# So long after the last end nothing may wait or run any more for all to be done: what is next begins at once.
_SETTLED_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """What is sent. As JSON it also has ``text``, which chat services show as it is.

    ``kind``: ``failed`` or ``finished``. ``failures``: what has failed since the last notice, one line each.
    """

    kind: str
    text: str
    run: str
    host: str
    at: float
    failures: tuple[str, ...] = ()
    more_failures: int = 0
    counts: dict[str, int] | None = None

    def to_json(self) -> bytes:
        """The notice for a program."""
        told: dict[str, Any] = {
            "kind": self.kind,
            "text": self.text,
            "run": self.run,
            "host": self.host,
            "time": datetime.fromtimestamp(self.at, UTC).isoformat(timespec="seconds"),
            "failures": list(self.failures),
            "more_failures": self.more_failures,
        }
        if self.counts is not None:
            told["counts"] = self.counts
        return json.dumps(told).encode()


@dataclass(frozen=True, slots=True)
class Bundle:
    """Failures that are not told yet, and when the next notice of failures may go. Pure; times are ``clock.mono``'s."""

    failures: tuple[str, ...] = ()
    more: int = 0
    not_before: float = 0.0

    def plus(self, failure: str) -> Bundle:
        """With one more failure; those beyond 20 are only counted."""
        if len(self.failures) >= _MOST_NAMED:
            return Bundle(self.failures, self.more + 1, self.not_before)
        return Bundle((*self.failures, failure), self.more, self.not_before)

    def due_at(self) -> float | None:
        """When it is to be sent, None when there is nothing in it."""
        return self.not_before if self.failures else None

    def sent(self, now: float) -> Bundle:
        """What is left after it was sent."""
        return Bundle(not_before=now + BUNDLE_S)

    def text(self, run: str) -> str:
        """The notice's one line."""
        number = len(self.failures) + self.more
        if number == 1:
            return f"gpuherd: 1 job of {run} has failed: {self.failures[0]}"
        return f"gpuherd: {number} jobs of {run} have failed; the first: {self.failures[0]}"


@dataclass(frozen=True, slots=True)
class Ways:
    """Where notices go. ``argv`` is run for each, ``url`` is posted to; either may be None."""

    argv: tuple[str, ...] | None = None
    url: str | None = None

    @classmethod
    def of(cls, command: str | None, webhook: str | None) -> Ways:
        """From the options' words. Raises UsageError for what could never work."""
        return cls(None if not command else _argv(command), None if not webhook else _url(webhook))


def _argv(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError:
        raise UsageError(f"the notify command {command!r} has a quote that is not closed") from None
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"the notify command {command!r}: there is no such program; no shell reads it")
    return words


def _url(webhook: str) -> str:
    try:
        parts = urllib.parse.urlsplit(webhook)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        usable = False
    # Such characters have to be written as %XX, and only who wrote them knows in which encoding.
    if not usable or not webhook.isascii() or not webhook.isprintable() or " " in webhook:
        raise UsageError(f"the webhook {webhook!r} is no http or https address")
    if "@" in parts.netloc:
        raise UsageError(f"the webhook for {parts.hostname} has a name or password before the host; that is not sent")
    return webhook


@dataclass
class Notifier:
    """Sends a run's notices. ``event`` for everything that happens, ``close`` at the end. Neither ever raises.

    Args:
        ways: where they go.
        run: the run folder, to tell people which run it is.
        counts: for a run that stays when all is done: reads how it stands. Its end is told each time that all is done.
    """

    ways: Ways
    run: str
    counts: Callable[[], Counts] | None = None
    _inbox: queue.SimpleQueue[Event | Outcome | None] = field(default_factory=queue.SimpleQueue)
    _warned: set[str] = field(default_factory=set)
    _thread: threading.Thread | None = None
    _webhook: Webhook | None = None

    def __post_init__(self) -> None:
        if self.ways.url is not None:
            self._webhook = Webhook(self.ways.url)

    def event(self, event: Event) -> None:
        """Takes note of what happened: failures for good and cancelled jobs, and ends where the run goes on after."""
        if event.kind in _FAILURES or (event.kind is EventKind.DONE and self.counts is not None):
            self._start()
            self._inbox.put(event)

    def close(self, outcome: Outcome | None) -> None:
        """The run has ended, with this outcome or with an error: sends the last notice and waits until it is sent."""
        self._start()
        self._inbox.put(outcome)
        if self._thread is not None:
            self._thread.join(timeout=2 * (COMMAND_S + WEBHOOK_S))

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="gpuherd-notices", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        bundle, look_at = Bundle(), None
        while True:
            due = [at for at in (bundle.due_at(), look_at) if at is not None]
            try:
                told = self._inbox.get(timeout=max(0.0, min(due) - clock.mono()) if due else None)
            except queue.Empty:
                now = clock.mono()
                if look_at is not None and now >= look_at:
                    look_at = None
                    counts = self._worked_off()
                    if counts is not None:
                        self._send(self._finished(bundle, f"is worked off: {counted(counts)}", counts))
                        bundle = bundle.sent(now)
                if (at := bundle.due_at()) is not None and now >= at:
                    self._send(self._failed(bundle))
                    bundle = bundle.sent(clock.mono())
                continue
            if not isinstance(told, Event):
                self._send(self._finished(bundle, *_ending(told)))
                return
            if told.kind in _FAILURES:
                bundle = bundle.plus(told.text)
            look_at = None if self.counts is None else clock.mono() + _SETTLED_S

    def _worked_off(self) -> Counts | None:
        """The counts, if nothing waits and nothing runs any more."""
        try:
            counts = None if self.counts is None else self.counts()
        except GpuherdError as problem:
            logger.info("can't see whether all is done: %s", problem)
            return None
        return None if counts is None or counts.waiting or counts.running else counts

    def _failed(self, bundle: Bundle) -> Notice:
        return Notice(
            kind="failed",
            text=clean(bundle.text(self.run)),
            run=self.run,
            host=socket.gethostname(),
            at=clock.wall(),
            failures=bundle.failures,
            more_failures=bundle.more,
        )

    def _finished(self, bundle: Bundle, how: str, counts: Counts | None) -> Notice:
        return Notice(
            kind="finished",
            text=clean(f"gpuherd: {self.run} {how}"),
            run=self.run,
            host=socket.gethostname(),
            at=clock.wall(),
            failures=bundle.failures,
            more_failures=bundle.more,
            counts=None if counts is None else _ended_counts(counts),
        )

    def _send(self, notice: Notice) -> None:
        data = notice.to_json()
        if self.ways.argv is not None:
            self._try("command", lambda: run_command(self.ways.argv or (), data, notice.text))
        if (webhook := self._webhook) is not None:
            self._try("webhook", lambda: webhook.post(data))

    def _try(self, way: str, send: Callable[[], None]) -> None:
        try:
            send()
        except NotDelivered as problem:
            level = logging.INFO if way in self._warned else logging.WARNING
            self._warned.add(way)
            logger.log(level, "a notice could not be sent by the %s: %s", way, clean(str(problem)))


def _ending(outcome: Outcome | None) -> tuple[str, Counts | None]:
    """How the run has ended, as the rest of a sentence, and its counts; None stands for an error."""
    if outcome is None:
        return "has ended: it broke off with an error; what was recorded stays, and the same command goes on", None
    counts = Counts(waiting=outcome.waiting, done=outcome.done, failed=outcome.failed, cancelled=outcome.cancelled)
    return ("was stopped: " if outcome.interrupted else "has ended: ") + counted(counts), counts


def _ended_counts(counts: Counts) -> dict[str, int]:
    return {
        "done": counts.done,
        "failed": counts.failed,
        "waiting": counts.waiting,
        "cancelled": counts.cancelled,
    }
