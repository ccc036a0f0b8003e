"""By which somebody asks the leader of an attempt to make room: from a signal handler, or from another thread."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self


class Stop:
    """Asked once, for good. ``fileno`` becomes readable then, so that whoever waits wakes."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.asked = False

    def ask(self) -> None:
        """The attempt is to end, with its grace; nothing happens when it has ended already."""
        self.asked = True
        if self._descriptor >= 0:
            os.eventfd_write(self._descriptor, 1)

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
