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

# What can be asked of a queue while it is worked off, and what is answered: plain frozen data.


class ControlKind(StrEnum):
    """What can be asked."""

    CANCEL = "cancel"  # jobs end for good
    RETRY = "retry"  # failed and cancelled jobs wait again
    PAUSE = "pause"  # waiting jobs are held; running ones stand still, and so do their time limits
    RESUME = "resume"  # the reverse
    PRIORITY = "priority"  # settings: {"priority": "5"}
    DRAIN = "drain"  # the dispatcher starts nothing new and ends when what runs has ended
    STOP = "stop"  # it stops what runs, puts it back into the queue, and ends
    SET = "set"  # other options; settings as on the command line
    RELOAD = "reload"  # the settings files are read again


OF_JOBS = frozenset(
    {ControlKind.CANCEL, ControlKind.RETRY, ControlKind.PAUSE, ControlKind.RESUME, ControlKind.PRIORITY}
)


@dataclass(frozen=True, slots=True)
class Control:
    """A wish. ``jobs`` are names; () means all that it can be done to. ``settings`` are words, for SET and PRIORITY."""

    kind: ControlKind
    jobs: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it.

    Attributes:
        ok: all of it was done.
        text: one sentence for people.
        applied_by: "dispatcher", "here" (by this process), or None when nobody has done it yet; it stays asked.
        changed: names of the jobs that it changed.
    """

    ok: bool
    text: str
    applied_by: str | None = None
    changed: tuple[str, ...] = ()


def priority_of(settings: Mapping[str, str]) -> int:
    """The new priority. Raises UsageError."""
    word = settings.get("priority", "")
    try:
        value = int(word)
    except ValueError:
        raise UsageError(f"priority={word!r}; it must be a whole number") from None
    if not -(2**31) <= value < 2**31 or settings.keys() != {"priority"}:
        raise UsageError(f"priority: {dict(settings)!r}; it must be one whole number of at most 31 bits")
    return value


# A FIFO in the run folder that wakes the dispatcher: what is asked lies in the queue, the bell only rings.
#
# The dispatcher sleeps until it rings, without looking at the queue in between. A bell that nobody hears is not
# there: ringing says so.

_BYTES = 4096


class Doorbell:
    """The dispatcher's end. ``fileno`` becomes readable when somebody has rung.

    Raises OSError where the file system has no FIFOs, or something else lies in the place.
    """

    def __init__(self, path: Path):
        self._path = path
        with suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # For writing too: else the end of the last who rang would make it readable for ever.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise FileExistsError(f"{path} is no FIFO; remove it")

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._fd

    def hush(self) -> None:
        """Takes note of the ringing; to be called before looking what is asked, so that nothing is missed."""
        with suppress(BlockingIOError):
            while len(os.read(self._fd, _BYTES)) == _BYTES:
                pass

    def close(self) -> None:
        """Nobody listens any more. The FIFO goes: whoever copies the folder would stumble over it."""
        with suppress(OSError):
            self._path.unlink()
        os.close(self._fd)


def ring(path: Path) -> bool:
    """Rings. False when nobody listens."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return False
        with suppress(BlockingIOError):  # full: it rings already
            os.write(fd, b"!")
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


# What Ctrl-C, SIGTERM and SIGHUP ask of a run, while one goes on in this process.
#
# First Ctrl-C: drain, that is start nothing new and let what runs end. Second: stop it and put it back in the queue.
# Third: the same without grace. SIGTERM (from a shutdown, a container, a batch system) stops at once, in order.
# SIGHUP (a terminal that is closed, or somebody who says so) ends nothing: the settings files are read again.


class Ask(IntEnum):
    """How far the wish to stop goes."""

    GO_ON = 0
    DRAIN = 1
    STOP = 2
    STOP_NOW = 3

    @property
    def mode(self) -> str:
        """How people call it: ``working``, ``draining``, ``stopping``."""
        return ("working", "draining", "stopping", "stopping")[self]


class StopSignals:
    """Listens from ``__enter__`` to ``__exit__``, then puts the former handlers back.

    ``fileno`` is readable after a signal, so that an event loop wakes; ``asked`` says what for, and ``reload`` that a
    SIGHUP came; ``terminated``: a SIGTERM was among them. In a thread other than the main one Python delivers no
    signals, and nothing is installed.
    """

    def __init__(self) -> None:
        self.asked = Ask.GO_ON
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
                # Ignored from the start: we run in the background of a script, and a Ctrl-C there is not for us.
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
            self.asked = Ask(max(self.asked, Ask.STOP))
        else:
            self.exit_code = self.exit_code or ExitCode.INTERRUPTED
            self.asked = Ask(min(self.asked + 1, Ask.STOP_NOW))
