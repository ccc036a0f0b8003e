"""Brings one notice out: to a command, or to a web address. Waits for the end of it, but never longer than its limit.

A command and a server are strangers: what they say is cut after a few kilobytes, and how slowly they say it can't hold
the caller up. What a notice says, and when it is sent, is ``notify``'s business.
"""

from __future__ import annotations

import http.client
import os
import selectors
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from gpuherd import __version__
from gpuherd.jobs import clock

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
