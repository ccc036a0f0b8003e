"""By which somebody asks the leader of an attempt to make room: from a signal handler, or from another thread."""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType
from typing import Self


class Stop:
    """``fileno`` becomes readable when it is asked, so that whoever waits wakes; ``heard`` makes it wait again.

    Attributes:
        asked: somebody has asked.
        soon: somebody has asked who did not say that it has its notice.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.asked = False
        self.soon = False

    def ask(self, *, time_up: bool = False) -> None:
        """The attempt is to end, with its grace; nothing happens when it has ended already.

        Args:
            time_up: its time is nearly up: it has the notice for which it asked, and not only the grace.
        """
        self.asked = True
        self.soon = self.soon or not time_up
        if self._descriptor >= 0:
            os.eventfd_write(self._descriptor, 1)

    def heard(self) -> None:
        """What was asked so far is known."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._descriptor

    def close(self) -> None:
        """Frees the descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
