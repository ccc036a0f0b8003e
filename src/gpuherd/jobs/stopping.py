"""What Ctrl-C, SIGTERM and SIGHUP ask of a run, while one goes on in this process.

First Ctrl-C: drain, that is start nothing new and let what runs end. Second: stop it and put it back in the queue.
Third: the same without grace. SIGTERM (from a shutdown, a container, a batch system) stops at once, in order. SIGHUP
(a terminal that is closed, or somebody who says so) ends nothing: the settings files are read again.
"""

from __future__ import annotations

import signal
import socket
import threading
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Any, Self

from gpuherd.errors import ExitCode


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
