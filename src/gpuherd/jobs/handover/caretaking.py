"""Ends jobs in an engine's hands that are to end for good, while nobody follows the queue; the caller has its lock."""

from __future__ import annotations

import logging
import select
from collections.abc import Sequence
from contextlib import closing

from gpuherd.engines.options import EngineOptions
from gpuherd.errors import GpuherdError
from gpuherd.jobs import clock
from gpuherd.jobs.ending import Endings
from gpuherd.jobs.handover import opening
from gpuherd.jobs.handover.asking import Asking
from gpuherd.jobs.handover.collecting import Collecting
from gpuherd.jobs.handover.folder import Folder
from gpuherd.jobs.handover.followed import Followed
from gpuherd.jobs.queue import Queue
from gpuherd.jobs.records import AttemptRecord
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.settle import Blameless
from gpuherd.jobs.whereabouts import engine_name

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0


def end_cancelled(
    queue: Queue, run: RunDirectory, tell: Reporter, endings: Endings, records: Sequence[AttemptRecord], grace_s: float
) -> None:
    """Ends those that are to end, and those that wait there to follow them, and records it. One that its engine can't
    be told of now, or that takes longer to end than its grace, stays marked, and is ended by the next gpuherd that
    works on the queue.

    Args:
        records: all attempts in an engine's hands.
    """
    handed = Followed.among(records, run)
    wanted = {
        number: followed for number, followed in handed.items() if followed.record.queued.cancelled_by is not None
    }
    if not wanted:
        return
    (name,) = {followed.handed.engine for followed in wanted.values()}
    options = opening.recall(run)
    if options is None or options.engine != name:
        options = EngineOptions(engine=name)  # type: ignore[arg-type]  # it stands in the queue
    try:
        with closing(opening.make(options)) as engine:
            asking = Asking(engine, tell, engine_name(name))
            _Ending(queue, run, tell, asking, endings, handed, grace_s).follow(wanted)
    except GpuherdError as problem:
        logger.warning("can't tell %s that jobs are cancelled: %s", engine_name(name), problem)


class _Ending:
    """Sees some of those that are out to their ends."""

    def __init__(
        self,
        queue: Queue,
        run: RunDirectory,
        tell: Reporter,
        asking: Asking,
        endings: Endings,
        handed: dict[int, Followed],
        grace_s: float,
    ):
        self._queue = queue
        self._tell = tell
        self._asking = asking
        self._endings = endings
        self._handed = handed
        self._folder = Folder(run)
        self._collecting = Collecting(run, asking, self._folder, grace_s)
        self._folder.recall_gone(handed)
        self._until = clock.mono() + grace_s + _PATIENCE_S

    def follow(self, wanted: dict[int, Followed]) -> None:
        """Returns when these have ended, or it has taken too long."""
        asking = self._asking
        self._collecting.adopt(wanted.values())
        while True:
            now = clock.mono()
            if now >= asking.due_at:
                found = asking.look([followed.ticket for followed in wanted.values()], now)
                for number, followed in wanted.items():
                    if found is not None:
                        followed.seen(found.get(number), now, now)
            before, wanted = wanted, self._without_ended(wanted)
            self._folder.keep_gone(self._handed.values())
            if not wanted.keys() <= before.keys():
                continue  # what followed those that have ended needs to wait for nothing
            asking.keep_time(now)
            if not wanted or now >= self._until:
                return
            until = min(self._folder.due_at, asking.due_at, self._until)
            select.select([], [], [], max(0.0, until - clock.mono()))
            self._folder.look(wanted, clock.mono())

    def _without_ended(self, wanted: dict[int, Followed]) -> dict[int, Followed]:
        """Those of them that have not ended, and what is to end now that the others have."""
        left, ends = {}, []
        for number, followed in wanted.items():
            end = self._collecting.judge(followed)
            if end is None:
                self._collecting.call_off(followed)
                left[number] = followed
            else:
                ends.append(end)
                del self._handed[number]
        if not ends:
            return left
        self._endings.settle(ends, clock.mono())
        if any(end.blameless is not None for end in ends) and not self._endings.unrecorded:
            for needed, fate, names in self._queue.doom_hopeless():
                self._tell.cancelled(names, needed, fate)
        stranded = [self._handed[number] for number in self._queue.stranded() & self._handed.keys() - left.keys()]
        self._collecting.adopt(stranded)
        for followed in stranded:
            if not followed.has_begun:
                followed.recalled = followed.recalled or Blameless.STRANDED
                left[followed.record.id] = followed
        return left
