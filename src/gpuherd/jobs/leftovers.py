"""Ends what a job leaves behind: processes of an attempt whose main process has ended.

They are found by what they inherited, wherever they hide (``engines.tree``). TERM at first sight, KILL when they are
still there a moment later. One look at all processes serves all attempts that ended since the last one, so that many
short jobs don't cost a look each.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Collection

from gpuherd.engines.processes import ProcessId, Seen, everyone, send
from gpuherd.engines.tree import Traces, kill, members

logger = logging.getLogger(__name__)

_FIRST_SCAN_S = 0.2
_BETWEEN_SCANS_S = 0.5
_PATIENCE_S = 0.5
_GIVE_UP_S = 20.0


class Leftovers:
    """Follows up attempts that have ended. ``due_at`` is when ``sweep`` wants to be called, None for not at all.

    Args:
        queue_tag: how the tags of this queue's attempts begin; a tag of the queue that no live attempt has belongs to
            one that has ended, perhaps under an earlier dispatcher.
    """

    def __init__(self, queue_tag: str):
        self._prefix = f"{queue_tag}/"
        self._ended: set[Traces] = set()
        self._since: dict[str | None, float] = {}
        self._stuck: set[ProcessId] = set()
        self._scanned_at = 0.0
        self.due_at: float | None = None

    def expect(self, now: float, traces: Traces | None = None) -> None:
        """An attempt has ended, so that something of it may be left; ``traces`` where they are known."""
        if traces is not None:
            self._ended.add(traces)
        if self.due_at is None:
            self.due_at = max(now + _FIRST_SCAN_S, self._scanned_at + _BETWEEN_SCANS_S)

    def hurry(self, now: float) -> None:
        """Nothing else is left to wait for: a first scan that is due can be now."""
        if self.due_at is not None and not self._since:
            self.due_at = now

    def sweep(self, live: Collection[Traces], now: float) -> None:
        """Ends every process of an attempt that is not ``live``; plans the next scan while one is left."""
        self._scanned_at = now
        strays = self._find(live)
        if not strays:
            # Without a process a session has ended, and its number may come again.
            self._ended.clear()
        # One clock an attempt: what forks in a loop is ever new, and would never have been there long enough.
        self._since = {process.attempt: self._since.get(process.attempt, now) for process in strays}
        late = {attempt for attempt, since in self._since.items() if now - since >= _PATIENCE_S}
        for process in strays:
            if process.attempt not in late:
                self._ask(process, first=self._since[process.attempt] == now)
        if late:
            kill(lambda: [process for process in self._find(live) if process.attempt in late])
        for attempt, since in tuple(self._since.items()):
            if now - since > _GIVE_UP_S:
                self._give_up(attempt, strays)
        self.due_at = now + _FIRST_SCAN_S if self._since else None

    def _find(self, live: Collection[Traces]) -> tuple[Seen, ...]:
        tags = {each.tag for each in live}
        found = members(everyone(), lambda tag: tag.startswith(self._prefix) and tag not in tags, self._ended, live)
        return tuple(process for process in found if process.process not in self._stuck)

    def _ask(self, process: Seen, *, first: bool) -> None:
        if first:
            logger.info("an attempt left process %d behind; ending it", process.process.pid)
        send(process.process, signal.SIGTERM)
        if process.held:
            send(process.process, signal.SIGCONT)

    def _give_up(self, attempt: str | None, strays: Collection[Seen]) -> None:
        """In uninterruptible sleep, usually in a driver: nothing that a user may do ends such a process."""
        stuck = {process.process for process in strays if process.attempt == attempt}
        logger.warning("can't end process %s; look at it with ps", ", ".join(str(each.pid) for each in stuck))
        self._stuck |= stuck
        del self._since[attempt]
