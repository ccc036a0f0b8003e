"""Ends what a job leaves behind: processes that carry the tag of an attempt whose main process has ended.

They are found by their environment, wherever they hide (forked twice, session of their own). TERM at first sight, KILL
when they are still there a moment later. One scan of /proc serves all attempts that ended since the last one, so that
many short jobs don't cost a scan each.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Collection

from gpuherd.engines.processes import ProcessId, send, tagged

logger = logging.getLogger(__name__)

_FIRST_SCAN_S = 0.2
_BETWEEN_SCANS_S = 0.5
_PATIENCE_S = 0.5
_GIVE_UP_S = 20.0


class Leftovers:
    """Follows up attempts that have ended. ``due_at`` is when ``sweep`` wants to be called, None for not at all."""

    def __init__(self, queue_tag: str):
        self._prefix = f"{queue_tag}/"
        self._seen: dict[ProcessId, float] = {}
        self._scanned_at = 0.0
        self.due_at: float | None = None

    def expect(self, now: float) -> None:
        """An attempt has ended, so that something of it may be left."""
        if self.due_at is None:
            self.due_at = max(now + _FIRST_SCAN_S, self._scanned_at + _BETWEEN_SCANS_S)

    def hurry(self, now: float) -> None:
        """Nothing else is left to wait for: a first scan that is due can be now."""
        if self.due_at is not None and not self._seen:
            self.due_at = now

    def sweep(self, live: Collection[int], now: float) -> None:
        """Ends every process of an attempt that is not ``live``; plans the next scan while one is left."""
        self._scanned_at = now
        left: dict[ProcessId, float] = {}
        for found in tagged(self._prefix):
            if _attempt_number(found.attempt) in live:
                continue
            since = self._seen.get(found.process, now)
            left[found.process] = since
            if since == now:
                logger.info("attempt %s left process %d behind; ending it", found.attempt, found.process.pid)
            send(found.process, signal.SIGTERM if now - since < _PATIENCE_S else signal.SIGKILL)
        stuck = [process for process, since in left.items() if now - since > _GIVE_UP_S]
        for process in stuck:
            # In uninterruptible sleep, usually in a driver: nothing that a user may do ends it.
            logger.warning("process %d can't be ended; look at it with ps", process.pid)
            del left[process]
        self._seen = left
        self.due_at = now + _FIRST_SCAN_S if left else None


def _attempt_number(tag: str) -> int | None:
    number = tag.rpartition("/")[2]
    return int(number) if number.isascii() and number.isdigit() else None
