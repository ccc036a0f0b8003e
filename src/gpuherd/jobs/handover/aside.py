"""One question at a time, asked by a thread of its own: an answer that takes long keeps nobody waiting."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

_Answer = TypeVar("_Answer")


class Aside(Generic[_Answer]):
    """Asks. ``fileno`` is readable when an answer has come, so that an event loop wakes."""

    def __init__(self) -> None:
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = threading.Lock()
        self._closed = False
        self._future: Future[_Answer] | None = None

    @property
    def busy(self) -> bool:
        """Whether a question is under way, or its answer not fetched yet."""
        return self._future is not None

    @property
    def has_answer(self) -> bool:
        """Whether its answer is there to be fetched."""
        return self._future is not None and self._future.done()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._bell

    def drain(self) -> None:
        """Empties the descriptor."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def begin(self, ask: Callable[[], _Answer]) -> None:
        """Asks this. Raises ValueError while another question is under way."""
        if self._future is not None:
            raise ValueError("one question at a time")
        self._future = future = Future[_Answer]()
        # It ends with the process, whatever it waits for.
        threading.Thread(target=self._ask, args=(ask, future), name="gpuherd-aside", daemon=True).start()

    def fetch(self) -> Future[_Answer] | None:
        """The answer, or what was raised in its place; None while none has come. Each is fetched once."""
        future = self._future
        if future is None or not future.done():
            return None
        self._future = None
        return future

    def close(self) -> None:
        """Hears of nothing any more. What was asked is not waited for."""
        with self._open:
            self._closed = True
            os.close(self._bell)

    def _ask(self, ask: Callable[[], _Answer], future: Future[_Answer]) -> None:
        try:
            future.set_result(ask())
        except BaseException as problem:  # raised again where it is fetched
            future.set_exception(problem)
        with self._open:
            if not self._closed:
                os.eventfd_write(self._bell, 1)
