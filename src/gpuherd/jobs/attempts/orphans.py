"""Ends orphans: processes of an attempt whose main process has ended.

They are found by what they inherited, wherever they hide (``engines.process_tree``). SIGTERM at first sight, SIGKILL
when they are still there a moment later. One scan of all processes serves all attempts that have ended since the last
one, so that many short jobs don't cost a scan each.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from gpuherd.engines.process_tree import ProcessId, Seen, Traces, any_held, ask_to_end, everyone, kill, members
from gpuherd.jobs.attempts import (
    ORPHANS_FIRST_SCAN_S,
    ORPHANS_GIVE_UP_S,
    ORPHANS_GRACE_S,
    ORPHANS_NEXT_SCAN_S,
    ORPHANS_SURE_S,
)

logger = logging.getLogger(__name__)

# One scan can miss a process that forks and exits in a loop. Orphans are gone when so many scans in a row don't find
# any.
_LOOKS_TO_BE_SURE = 3


@dataclass
class _Spell:
    """When orphans of an attempt were first and last seen."""

    first: float
    last: float


class Orphans:
    """Finds and ends the orphans of attempts that have ended. ``due_at`` is when to call ``sweep``, None for never.

    Args:
        queue_tag: prefix of the tags of this queue's attempts; a tag with this prefix that no live attempt has belongs
            to an attempt that has ended, perhaps under an earlier dispatcher.
    """

    def __init__(self, queue_tag: str):
        self._prefix = f"{queue_tag}/"
        self._ended: set[Traces] = set()
        self._spells: dict[str | None, _Spell] = {}
        self._stuck: set[ProcessId] = set()
        self._nothing_seen = 0
        self._looked_at_all = False
        self._since_ticks = 0
        self._scanned_at = 0.0
        self._expected_at = 0.0
        self.due_at: float | None = None

    def expect(self, now: float, traces: Traces | None = None) -> None:
        """An attempt has ended and may have left orphans; ``traces`` where they are known."""
        if traces is not None:
            self._ended.add(traces)
        self._expected_at = now
        if self.due_at is None:
            self.due_at = max(now + ORPHANS_FIRST_SCAN_S, self._scanned_at + ORPHANS_NEXT_SCAN_S)

    def hurry(self, now: float) -> None:
        """There is nothing else to wait for: a first scan that is planned is due now."""
        if self.due_at is not None and not self._spells:
            self.due_at = now

    def sweep(self, live: Collection[Traces], now: float) -> None:
        """Ends every process of an attempt that is not ``live``; plans the next scan until none is left."""
        self._scanned_at = now
        if self._looked_at_all and not self._spells:
            # The first scan found what an earlier dispatcher left; the rest is no older than its attempts.
            self._since_ticks = min((each.leader.start_ticks for each in self._ended), default=0)
        strays = self._find(live)
        self._remember(strays, now)
        late = {attempt for attempt, spell in self._spells.items() if now - spell.first >= ORPHANS_GRACE_S}
        for process in strays:
            if process.attempt not in late:
                self._ask(process, first=self._spells[process.attempt].first == now)
        if late:
            kill(lambda: [process for process in self._find(live) if process.attempt in late])
        for attempt in [key for key, spell in self._spells.items() if now - spell.first > ORPHANS_GIVE_UP_S]:
            self._give_up(attempt, strays)
        if self._is_done(live, now):
            # A session without processes has ended, and its number may be used again.
            self._ended.clear()
            self._spells.clear()
            self.due_at = None
        else:
            self.due_at = now + (ORPHANS_FIRST_SCAN_S if strays else ORPHANS_SURE_S)

    def _remember(self, strays: Collection[Seen], now: float) -> None:
        # One time an attempt, not one a process: a process that forks in a loop is always new, and would never be old
        # enough.
        for process in strays:
            self._spells.setdefault(process.attempt, _Spell(now, now)).last = now
        self._looked_at_all = True
        self._spells = {key: spell for key, spell in self._spells.items() if now - spell.last <= 2 * ORPHANS_GRACE_S}
        self._nothing_seen = 0 if strays else self._nothing_seen + 1

    def _is_done(self, live: Collection[Traces], now: float) -> bool:
        if self._nothing_seen < (_LOOKS_TO_BE_SURE if self._spells else 1):
            return False
        # If a lease is still held, a process was missed, or we are not permitted to see it.
        in_use = {lock for each in live for lock in each.locks}
        held = any_held({lock for each in self._ended for lock in each.locks} - in_use)
        return not held or now - self._expected_at > ORPHANS_GIVE_UP_S

    def _find(self, live: Collection[Traces]) -> tuple[Seen, ...]:
        tags = {each.tag for each in live}
        found = members(
            everyone(self._since_ticks), lambda tag: tag.startswith(self._prefix) and tag not in tags, self._ended, live
        )
        return tuple(process for process in found if process.process not in self._stuck)

    def _ask(self, process: Seen, *, first: bool) -> None:
        if first:
            logger.info("an attempt left process %d behind; ending it", process.process.pid)
        ask_to_end(process.process)

    def _give_up(self, attempt: str | None, strays: Collection[Seen]) -> None:
        """In uninterruptible sleep, usually in a driver: a user can't end such a process."""
        stuck = {process.process for process in strays if process.attempt == attempt}
        logger.warning("can't end process %s; look at it with ps", ", ".join(str(each.pid) for each in stuck))
        self._stuck |= stuck
        del self._spells[attempt]
