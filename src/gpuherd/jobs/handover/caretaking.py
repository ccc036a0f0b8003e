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
from gpuherd.jobs.records import AttemptRecord
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.whereabouts import engine_name

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0


def end_cancelled(
    run: RunDirectory, tell: Reporter, endings: Endings, records: Sequence[AttemptRecord], grace_s: float
) -> None:
    """Ends those that are to end, and records it. One that its engine can't be told of now, or that takes longer to end
    than its grace, stays marked, and is ended by the next gpuherd that works on the queue.
    """
    wanted = Followed.among((record for record in records if record.queued.cancelled_by is not None), run)
    if not wanted:
        return
    (name,) = {followed.handed.engine for followed in wanted.values()}
    options = opening.recall(run)
    if options is None or options.engine != name:
        options = EngineOptions(engine=name)  # type: ignore[arg-type]  # it stands in the queue
    try:
        with closing(opening.make(options)) as engine:
            _follow(run, Asking(engine, tell, engine_name(name)), endings, wanted, grace_s)
    except GpuherdError as problem:
        logger.warning("can't tell %s that jobs are cancelled: %s", engine_name(name), problem)


def _follow(run: RunDirectory, asking: Asking, endings: Endings, wanted: dict[int, Followed], grace_s: float) -> None:
    folder = Folder(run)
    collecting = Collecting(run, asking, folder, grace_s)
    until = clock.mono() + grace_s + _PATIENCE_S
    collecting.adopt(wanted.values())
    while True:
        now = clock.mono()
        if now >= asking.due_at:
            found = asking.look([followed.ticket for followed in wanted.values()], now)
            for number, followed in wanted.items():
                if found is not None:
                    followed.seen(found.get(number), now)
        ends = []
        for number, followed in tuple(wanted.items()):
            end = collecting.judge(followed)
            if end is None:
                collecting.call_off(followed)
            else:
                del wanted[number]
                ends.append(end)
        if ends:
            endings.settle(ends, now)
        asking.keep_time(now)
        if not wanted or now >= until:
            return
        select.select([], [], [], max(0.0, min(folder.due_at, asking.due_at, until) - clock.mono()))
        folder.look(wanted, clock.mono())
