"""Reads matrices ahead of the GPUs that work on them: one thread, in a given order, no more ahead than so many bytes.

It knows order and memory. It knows neither what the pieces are used for nor who takes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """Reading was stopped: what was asked for will not come."""


class Delivery(Generic[T]):
    """The pieces of one matrix, on their way from the reader to whoever takes them: iterate over it once."""

    def __init__(self, ahead: ReadAhead[T]) -> None:
        self._ahead = ahead
        self._pieces: SimpleQueue[tuple[T, int] | BaseException | None] = SimpleQueue()
        self._unwanted = False
        self._ended = False

    def __iter__(self) -> Iterator[T]:
        """The pieces in order. A piece counts as in memory until the next one is asked for.

        Raises:
            Stopped: another part of the work failed.
            BaseException: what reading this matrix raised.
        """
        while True:
            item = self._next()
            if item is None:
                return
            piece, nbytes = item
            del item
            try:
                yield piece
            finally:
                del piece
                self._ahead.freed(nbytes)

    def discard(self) -> None:
        """The rest is not wanted: it is not read, and what was read is let go. Reading errors are told no more."""
        self._unwanted = True
        while not self._ended:
            with suppress(BaseException):
                item = self._next()
                if item is not None:
                    self._ahead.freed(item[1])

    def _next(self) -> tuple[T, int] | None:
        item = self._pieces.get()
        self._ended = not isinstance(item, tuple)
        if isinstance(item, BaseException):
            raise item
        return item

    def fill(self, pieces: Callable[[], Iterable[T]], size: Callable[[T], int]) -> None:
        """Reads everything into the delivery; what goes wrong goes in too. By the reader's thread."""
        try:
            if self._ahead.stopped:
                raise Stopped
            for piece in pieces():
                if self._unwanted:
                    break
                self._ahead.wait_for_room(size(piece))
                self._pieces.put((piece, size(piece)))
                del piece
        except BaseException as problem:
            self._pieces.put(problem)
        else:
            self._pieces.put(None)


class ReadAhead(Generic[T]):
    """Counts the bytes that were read and not yet taken. A piece larger than the limit waits until nothing else is."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held = 0
        self._stopped = False
        self._changed = threading.Condition()

    def wait_for_room(self, nbytes: int) -> None:
        """Waits until so many bytes more may be held, and counts them. Raises Stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._held == 0 or self._held + nbytes <= self._most)
            if self._stopped:
                raise Stopped
            self._held += nbytes

    def freed(self, nbytes: int) -> None:
        """So many bytes are held no longer."""
        with self._changed:
            self._held -= nbytes
            self._changed.notify_all()

    def stop(self) -> None:
        """Nothing more is read: a reader that waits for room gets Stopped, and so does who waits for its pieces."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopped
