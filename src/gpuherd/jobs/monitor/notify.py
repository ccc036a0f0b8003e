"""Notifications when a run ends, a job has failed or does not use its GPUs: to a command, or to a web address.

The dispatcher hands events to a thread of its own, so that nothing here can hold a run up. Failures come in bursts: the
first is sent at once, those of the following minute in one notice. The last notice has the end and every failure that
was not sent yet. A notice that can't be sent is logged, once per channel, and is no failure of the run.

A command or a server that hangs is given up at its limit, and what it prints is cut after a few kilobytes.
"""

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
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any

from gpuherd import __version__
from gpuherd.errors import GpuherdError, UsageError, clean
from gpuherd.jobs import clock
from gpuherd.jobs.monitor.format import counted
from gpuherd.jobs.records import Counts, Event, EventKind, Outcome

logger = logging.getLogger(__name__)

COMMAND_S = 30.0
WEBHOOK_S = 10.0
BUNDLE_S = 60.0
# So long after the last end no job may wait or run for the queue to count as worked off: a next job begins at once.
_SETTLED_S = 1.0
_TEXT = "GPUHERD_NOTICE"
_MOST_STDERR = 4096
_BLOCK = 65_536
_MOST_NAMED = 20
_FAILURES = frozenset({EventKind.FAILED, EventKind.CANCELLED})


class NotDelivered(Exception):
    """A notice was not delivered, or nothing confirms that it was; the reason in words."""


# --- channels -----------------------------------------------------------------------------------------------------


def run_command(argv: Sequence[str], data: bytes, text: str, limit_s: float = COMMAND_S) -> None:
    """Runs the command with the notice as JSON on its standard input and its text in GPUHERD_NOTICE.

    Raises NotDelivered when it can't be started, fails, or takes longer than ``limit_s``. At its end, or at the limit,
    all processes of its process group are killed.
    """
    with os.fdopen(os.memfd_create("notice"), "r+b") as stdin:
        stdin.write(data)
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, _TEXT: text},
                start_new_session=True,
            )
        except (OSError, ValueError) as problem:
            raise NotDelivered(f"{argv[0]} can't be started: {problem}") from problem
    with process:
        try:
            in_time, stderr = _wait(process, limit_s)
        finally:
            # Also after a good end. The process is not yet reaped, so that its number is still its own.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    if not in_time:
        raise NotDelivered(f"{argv[0]} took more than {limit_s:g} s and was killed")
    if process.returncode:
        raise NotDelivered(f"{argv[0]} ended with {process.returncode}: {stderr.decode('utf-8', 'replace')}")


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> tuple[bool, bytes]:
    """Whether the command exits in time, and the beginning of its standard error.

    Its end is its own exit, and not that of its pipe, which a child of it may hold open for ever.
    """
    deadline, stderr, pipe = clock.mono() + limit_s, b"", process.stderr
    exited = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as waiting:
            waiting.register(exited, selectors.EVENT_READ)
            if pipe is not None:
                waiting.register(pipe, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in waiting.select(max(0.0, deadline - clock.mono()))}
                if pipe is not None and pipe in ready:
                    block = os.read(pipe.fileno(), _BLOCK)
                    stderr = (stderr + block)[:_MOST_STDERR]
                    if not block:
                        waiting.unregister(pipe)
                if exited in ready or clock.mono() >= deadline:
                    return exited in ready, stderr
    finally:
        os.close(exited)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a redirected POST would arrive without its body, and look delivered."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:  # noqa: ARG002
        fp.close()
        raise NotDelivered(f"it answered {code} and points to {newurl}; give that address")


_OPENER = urllib.request.build_opener(_NoRedirect)


class Webhook:
    """A web address that notices are posted to. ``limit_s``: how long one may take.

    Each is sent in a thread of its own: neither a DNS look-up nor an answer that comes byte by byte has a time limit.
    While such a thread hangs no other is started.
    """

    def __init__(self, url: str, limit_s: float = WEBHOOK_S):
        self._url = url
        self._limit_s = limit_s
        self._last: threading.Thread | None = None

    def post(self, data: bytes) -> None:
        """Posts the notice as JSON. Raises NotDelivered."""
        if self._last is not None and self._last.is_alive():
            raise NotDelivered("the last notice is still being sent")
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
            # ``Channels.of`` has checked that it is http or https.
            request = urllib.request.Request(self._url, data, headers, method="POST")  # noqa: S310
            with _OPENER.open(request, timeout=self._limit_s):
                pass
        except (OSError, ValueError, http.client.HTTPException, NotDelivered) as problem:
            problems.append(str(problem))
            if isinstance(problem, urllib.error.HTTPError):
                problem.close()


# --- notices ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A notification.

    Attributes:
        kind: ``failed``, ``idle``, ``finished``, or ``session`` (``gpuherd session`` warns or ends).
        text: one line, which chat services show as it is.
        run: the run's folder, or the session's name.
        failures: failures since the last notice, one line each, and ``more_failures`` beyond the first 20.
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
        """The notice as JSON; the time in words, and counts only where there are some."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        values["time"] = datetime.fromtimestamp(values.pop("at"), UTC).isoformat(timespec="seconds")
        return json.dumps(values).encode()


@dataclass(frozen=True, slots=True)
class PendingFailures:
    """Failures that were not sent yet, and when the next notice of failures may go; times by ``clock.mono``."""

    failures: tuple[str, ...] = ()
    more: int = 0
    not_before: float = 0.0

    def plus(self, failure: str) -> PendingFailures:
        """With one more failure; beyond 20 they are only counted."""
        if len(self.failures) >= _MOST_NAMED:
            return PendingFailures(self.failures, self.more + 1, self.not_before)
        return PendingFailures((*self.failures, failure), self.more, self.not_before)

    def due_at(self) -> float | None:
        """When it is to be sent, None when it is empty."""
        return self.not_before if self.failures else None

    def sent(self, now: float) -> PendingFailures:
        """The empty bundle after it was sent."""
        return PendingFailures(not_before=now + BUNDLE_S)

    def text(self, run: str) -> str:
        """The notice's one line."""
        number = len(self.failures) + self.more
        if number == 1:
            return f"gpuherd: 1 job of {run} has failed: {self.failures[0]}"
        return f"gpuherd: {number} jobs of {run} have failed; the first: {self.failures[0]}"


@dataclass(frozen=True, slots=True)
class Channels:
    """Where notices go: ``argv`` is run for each, ``url`` is posted to; either may be None."""

    argv: tuple[str, ...] | None = None
    url: str | None = None

    @classmethod
    def of(cls, command: str | None, webhook: str | None) -> Channels:
        """From the options. Raises UsageError for a command or an address that could never work."""
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


def deliver(channels: Channels, notice: Notice) -> tuple[str, ...]:
    """Sends one notice that belongs to no run, and returns once it is sent or given up: why it was not delivered, a
    sentence for each channel that failed."""
    problems = []
    data = notice.to_json()
    for channel, send in (
        ("command", None if channels.argv is None else partial(run_command, channels.argv, data, notice.text)),
        ("webhook", None if channels.url is None else partial(Webhook(channels.url).post, data)),
    ):
        try:
            if send is not None:
                send()
        except NotDelivered as problem:
            problems.append(f"a notice could not be sent by the {channel}: {clean(str(problem))}")
    return tuple(problems)


@dataclass
class Notifier:
    """Sends a run's notices. A context around the run: call ``event`` for every event, and set ``outcome`` before the
    end, where ``close`` sends the last notice. None of them ever raises.

    Args:
        channels: where they go.
        run: the run folder, which the text names.
        counts: of a run that stays when all is done: reads the counts now. Such a run sends a notice each time that its
            queue is worked off.
    """

    channels: Channels
    run: str
    counts: Callable[[], Counts] | None = None
    outcome: Outcome | None = None
    _inbox: queue.SimpleQueue[Event | Outcome | None] = field(default_factory=queue.SimpleQueue)
    _warned: set[str] = field(default_factory=set)
    _thread: threading.Thread | None = None
    _webhook: Webhook | None = None

    def __post_init__(self) -> None:
        if self.channels.url is not None:
            self._webhook = Webhook(self.channels.url)

    def event(self, event: Event) -> None:
        """Takes an event; of interest are final failures, cancelled and idle jobs and, for a run that stays, ends."""
        always = event.kind in _FAILURES or event.kind is EventKind.IDLE
        if always or (event.kind is EventKind.DONE and self.counts is not None):
            self._start()
            self._inbox.put(event)

    def __enter__(self) -> Notifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A wrong call needs no notice: the user sees its message.
        if not isinstance(error, UsageError):
            self.close(self.outcome)

    def close(self, outcome: Outcome | None) -> None:
        """Sends the last notice, with the run's outcome (None after an error), and waits until it is sent."""
        self._start()
        self._inbox.put(outcome)
        if self._thread is not None:
            self._thread.join(timeout=2 * (COMMAND_S + WEBHOOK_S))

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="gpuherd-notices", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        bundle, look_at = PendingFailures(), None
        while True:
            due = [at for at in (bundle.due_at(), look_at) if at is not None]
            try:
                event = self._inbox.get(timeout=max(0.0, min(due) - clock.mono()) if due else None)
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
            if not isinstance(event, Event):
                self._send(self._finished(bundle, *_ending(event)))
                return
            if event.kind is EventKind.IDLE:
                text = f"gpuherd: a job of {self.run} is idle: {event.text}"
                self._send(self._notice("idle", text, PendingFailures(), None))
                continue
            if event.kind in _FAILURES:
                bundle = bundle.plus(event.text)
            look_at = None if self.counts is None else clock.mono() + _SETTLED_S

    def _worked_off(self) -> Counts | None:
        """The counts, if no job waits or runs any more."""
        try:
            counts = None if self.counts is None else self.counts()
        except GpuherdError as problem:
            logger.info("can't read whether all jobs are done: %s", problem)
            return None
        return None if counts is None or counts.waiting or counts.running else counts

    def _failed(self, bundle: PendingFailures) -> Notice:
        return self._notice("failed", bundle.text(self.run), bundle, None)

    def _finished(self, bundle: PendingFailures, how: str, counts: Counts | None) -> Notice:
        return self._notice("finished", f"gpuherd: {self.run} {how}", bundle, counts)

    def _notice(self, kind: str, text: str, bundle: PendingFailures, counts: Counts | None) -> Notice:
        ended = ("done", "failed", "waiting", "cancelled")
        return Notice(
            kind=kind,
            text=clean(text),
            run=self.run,
            host=socket.gethostname(),
            at=clock.wall(),
            failures=bundle.failures,
            more_failures=bundle.more,
            counts=None if counts is None else {name: getattr(counts, name) for name in ended},
        )

    def _send(self, notice: Notice) -> None:
        data = notice.to_json()
        if self.channels.argv is not None:
            self._try("command", lambda: run_command(self.channels.argv or (), data, notice.text))
        if (webhook := self._webhook) is not None:
            self._try("webhook", lambda: webhook.post(data))

    def _try(self, channel: str, send: Callable[[], None]) -> None:
        try:
            send()
        except NotDelivered as problem:
            level = logging.INFO if channel in self._warned else logging.WARNING
            self._warned.add(channel)
            logger.log(level, "a notice could not be sent by the %s: %s", channel, clean(str(problem)))


def _ending(outcome: Outcome | None) -> tuple[str, Counts | None]:
    """The end of the run as the rest of a sentence, and its counts; the outcome is None after an error."""
    if outcome is None:
        return "has ended: it broke off with an error; what was recorded stays, and the same command goes on", None
    counts = Counts(waiting=outcome.waiting, done=outcome.done, failed=outcome.failed, cancelled=outcome.cancelled)
    return ("was stopped: " if outcome.interrupted else "has ended: ") + counted(counts), counts
