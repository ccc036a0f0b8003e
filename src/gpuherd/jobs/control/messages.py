"""Requests to a queue and their answers, the FIFO that wakes its dispatcher, and signals."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from gpuherd.errors import ExitCode, UsageError
from gpuherd.units import whole_number


class ControlKind(StrEnum):
    """The verbs of control."""

    CANCEL = "cancel"  # jobs end for good
    RETRY = "retry"  # failed and cancelled jobs wait again
    PAUSE = "pause"  # waiting jobs are held; running ones are stopped, and so are the clocks of their time limits
    RESUME = "resume"  # the reverse
    PRIORITY = "priority"  # settings: {"priority": "5"}
    DRAIN = "drain"  # the dispatcher starts nothing new and ends when the running jobs have ended
    STOP = "stop"  # it stops running jobs, puts them back into the queue, and ends
    SET = "set"  # other options; settings as on the command line
    RELOAD = "reload"  # the settings files are read again


OF_JOBS = frozenset(
    {ControlKind.CANCEL, ControlKind.RETRY, ControlKind.PAUSE, ControlKind.RESUME, ControlKind.PRIORITY}
)


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a queue. It stands in the queue's table until it has a response.

    Attributes:
        kind: a ``ControlKind``; a word that this version does not know where a newer one wrote the request.
        jobs: names of jobs; () means every job that the verb applies to.
        settings: words as on the command line, for SET and PRIORITY.
        by, at, id: who wrote it, the wall-clock second, and its number in the table: set when it is written.
    """

    kind: str
    jobs: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    by: str = ""
    at: float = 0.0
    id: int = 0


@dataclass(frozen=True, slots=True)
class Response:
    """The result of a request.

    Attributes:
        ok: all of it was carried out.
        text: one sentence for people.
        applied_by: "dispatcher", "here" (this process), or None while the request waits in the queue.
        changed: names of the jobs that it changed.
    """

    ok: bool
    text: str
    applied_by: str | None = None
    changed: tuple[str, ...] = ()


def priority_of(settings: Mapping[str, str]) -> int:
    """The new priority. Raises UsageError."""
    if settings.keys() != {"priority"}:
        raise UsageError(f"priority: {dict(settings)!r}; it must be one whole number")
    try:
        return whole_number(settings["priority"])
    except ValueError as problem:
        raise UsageError(f"priority: {problem}") from None


# A FIFO in the run folder wakes the dispatcher. The requests themselves are in the queue: the dispatcher sleeps until
# the FIFO is readable and does not poll. Without a reader the FIFO does not exist, so a writer notices that.

_BYTES = 4096


class WakeupFifo:
    """The dispatcher's end of the FIFO. ``fileno`` becomes readable when a process called ``wake``.

    Raises OSError where the file system has no FIFOs, or another kind of file has this name.
    """

    def __init__(self, path: Path):
        self._path = path
        with suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Also open for writing: otherwise the close of the last writer would make it readable for ever.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise FileExistsError(f"{path} is no FIFO; remove it")

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._fd

    def clear(self) -> None:
        """Empties the FIFO; call it before reading the requests, so that none is missed."""
        with suppress(BlockingIOError):
            while len(os.read(self._fd, _BYTES)) == _BYTES:
                pass

    def close(self) -> None:
        """Stops listening and removes the FIFO: programs that copy the folder would hang on it."""
        with suppress(OSError):
            self._path.unlink()
        os.close(self._fd)


def wake(path: Path) -> bool:
    """Wakes the dispatcher that listens on this FIFO; False when none does."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return False
        with suppress(BlockingIOError):  # full: the dispatcher is about to wake up anyway
            os.write(fd, b"!")
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


# Signals to a run in this process.
#
# First Ctrl-C: drain, that is start nothing new and let running jobs end. Second: stop them and put them back into the
# queue. Third: the same without grace. SIGTERM (a shutdown, a container, a batch system) stops at once, in order.
# SIGHUP (a closed terminal, or ``kill -HUP``) ends nothing: the settings files are read again.


class StopLevel(IntEnum):
    """How far a dispatcher was requested to stop."""

    GO_ON = 0
    DRAIN = 1
    STOP = 2
    STOP_NOW = 3

    @property
    def mode(self) -> str:
        """The word for people: ``working``, ``draining``, ``stopping``."""
        return ("working", "draining", "stopping", "stopping")[self]


class StopSignals:
    """Listens from ``__enter__`` to ``__exit__``, then restores the former handlers.

    ``fileno`` is readable after a signal, so that an event loop wakes. ``level`` is what the signals request,
    ``reload`` is set by SIGHUP, ``terminated`` by SIGTERM. Python delivers signals to the main thread only: in another
    thread no handler is installed.
    """

    def __init__(self) -> None:
        self.level = StopLevel.GO_ON
        self.exit_code: ExitCode | None = None
        self.terminated = False
        self.reload = False
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._former: dict[signal.Signals, Any] = {}
        self._former_fd = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._former_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                former = signal.getsignal(number)
                # Ignored from the start: this is a background process of a script, and Ctrl-C is not meant for it.
                if former is not signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._former_fd)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._reader.fileno()

    def drain_wakeups(self) -> None:
        """Empties the descriptor."""
        try:
            while self._reader.recv(256):
                pass
        except BlockingIOError:
            pass

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self.reload = True
        elif number == signal.SIGTERM:
            self.exit_code = ExitCode.TERMINATED
            self.terminated = True
            self.level = StopLevel(max(self.level, StopLevel.STOP))
        else:
            self.exit_code = self.exit_code or ExitCode.INTERRUPTED
            self.level = StopLevel(min(self.level + 1, StopLevel.STOP_NOW))
