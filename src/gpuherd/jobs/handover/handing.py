"""The order of a hand-over: the manifest, the record in the queue, the engine, its words for what it has taken.

A death between two of these loses nothing. A manifest that no attempt is recorded with means nothing. An attempt that
is recorded and that the engine never got is not known there, and is claimed by the follower before its job waits again;
one that it got is found there by the name of its batch.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from gpuherd.engines.cluster import Batch, EngineAway, Parcel, Refused
from gpuherd.errors import CannotWrite
from gpuherd.jobs import clock
from gpuherd.jobs.durable import private_write
from gpuherd.jobs.events import Event, EventKind
from gpuherd.jobs.failures import clean
from gpuherd.jobs.fulldisk import may_pass
from gpuherd.jobs.handover.asking import Asking
from gpuherd.jobs.handover.decision import Group
from gpuherd.jobs.handover.folder import Folder
from gpuherd.jobs.handover.followed import Followed
from gpuherd.jobs.handover.manifest import Manifest, Order, portable, to_json
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue import Overtaken, Queue
from gpuherd.jobs.records import AttemptRecord, Handed, QueuedJob, StartRecord
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.timelimits import Limits

_LEADER = "gpuherd.jobs.handover.node"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What has become of a group.

    Attributes:
        followed: what has gone out; nothing where the queue has changed meanwhile.
        refused: what the engine says where it takes none of it. The jobs wait again, as if it had not been tried.
        unwritten: what could not be written, here or by the engine; with more space trying again may do.
    """

    followed: tuple[Followed, ...] = ()
    refused: Refused | None = None
    unwritten: Exception | None = None


class Handing:
    """Hands groups of jobs over, for one follower.

    Args:
        delay_s: how long a node's report may be on its way.

    Attributes:
        options: as they are now.
    """

    def __init__(
        self,
        queue: Queue,
        run: RunDirectory,
        asking: Asking,
        folder: Folder,
        tell: Reporter,
        options: DispatchOptions,
        *,
        run_id: int,
        began_at: float,
        grace_s: float,
        delay_s: float,
    ):
        self._queue = queue
        self._run = run
        self._asking = asking
        self._folder = folder
        self._tell = tell
        self.options = options
        self._run_id = run_id
        self._began_at = began_at
        self._grace_s = grace_s
        self._delay_s = delay_s
        # Where the queue is an older one than the folder (restored, or made anew), its next numbers may be taken there.
        self._numbers = count(max(queue.last_attempt(), folder.highest()) + 1)

    def hand_over(self, group: Group) -> Outgoing:
        """Hands these jobs over as one batch."""
        numbers = [next(self._numbers) for _ in group.jobs]
        batch = self._batch(group, numbers)
        records = [
            self._record(queued, number, batch.name, place)
            for place, (queued, number) in enumerate(zip(group.jobs, numbers, strict=True))
        ]
        try:
            self._write_manifest(batch, records, group)
            self._queue.record_starts([self._start(record, bool(group.after)) for record in records], self._run_id)
        except Overtaken:
            self._forget(batch.name)
            return Outgoing()  # the next decision, which follows at once, reads them anew
        except (OSError, sqlite3.OperationalError) as problem:
            self._forget(batch.name)
            if isinstance(problem, sqlite3.OperationalError) and not may_pass(problem):
                raise
            return Outgoing(unwritten=problem)
        self._folder.opened(batch.name, numbers, numbers, [each.attempt for each in group.after])
        return self._submit(batch, tuple(Followed.among(records, self._run).values()))

    # --- one hand-over ----------------------------------------------------------------------------------------

    def _submit(self, batch: Batch, followed: tuple[Followed, ...]) -> Outgoing:
        asked_at = clock.mono()
        try:
            handles = self._asking.engine.submit(batch)
        except EngineAway as problem:
            # It may have it or not: the next look tells.
            self._asking.failed(problem, clock.mono())
            return Outgoing(followed)
        except CannotWrite as problem:
            # The engine's own file, on a full disk. Whether it has some of them is told by the next look, too.
            return Outgoing(followed, unwritten=problem)
        except Refused as problem:
            return self._withdrawn(batch, followed, problem)
        self._asking.answered()
        for each, handle in zip(followed, handles, strict=True):
            each.handed = replace(each.handed, handle=handle)
            each.known_at = asked_at
        self._told(followed, handles)
        return Outgoing(followed)

    def _withdrawn(self, batch: Batch, followed: tuple[Followed, ...], refused: Refused) -> Outgoing:
        numbers = [each.record.id for each in followed]
        try:
            self._queue.withdraw(numbers)
        except sqlite3.OperationalError as problem:
            if not may_pass(problem):
                raise
            return Outgoing(followed, unwritten=problem)  # the next looks find that the engine has none of it
        for number in numbers:
            self._folder.closed(batch.name, number)
        return Outgoing(refused=refused)

    def _batch(self, group: Group, numbers: Sequence[int]) -> Batch:
        name = self._queue.batch_name(numbers[0])
        return Batch(
            name=name,
            placement=group.placement,
            parcels=tuple(
                Parcel(attempt=number, title=clean(queued.job.title or queued.job.name))
                for queued, number in zip(group.jobs, numbers, strict=True)
            ),
            command=(sys.executable, "-m", _LEADER, str(self._run.manifest(name))),
            folder=self._run.handover,
            after=tuple(each.handle for each in group.after),
            at_once=self.options.array_limit,
        )

    def _record(self, queued: QueuedJob, number: int, batch: str, place: int) -> AttemptRecord:
        return AttemptRecord(
            id=number,
            queued=queued,
            number=queued.attempts + 1,
            gpus=(),
            labels=(),
            process=None,
            handed=Handed(self.options.engine, batch, place),
            log=str(self._run.attempt_log(queued.job.name, queued.attempts + 1)),
            started_at=clock.wall(),
            started_mono=clock.mono(),
        )

    def _start(self, record: AttemptRecord, follows: bool) -> StartRecord:
        waited_s = 0.0 if follows else max(0.0, record.started_at - max(record.queued.ready_at, self._began_at))
        return StartRecord(record, waited_s, None)

    def _write_manifest(self, batch: Batch, records: Sequence[AttemptRecord], group: Group) -> None:
        orders = tuple(self._order(record, group) for record in records)
        manifest = Manifest(
            batch=batch.name, engine=self.options.engine, environment=portable(os.environ), orders=orders
        )
        self._run.handover.mkdir(exist_ok=True)
        private_write(self._run.manifest(batch.name), to_json(manifest).encode())

    def _order(self, record: AttemptRecord, group: Group) -> Order:
        job, placement = record.queued.job, group.placement
        limits = Limits.of(job, self.options)
        return Order(
            attempt=record.id,
            tag=f"{self._queue.tag}/{record.id}",
            argv=job.argv,
            log=record.log,
            progress=str(self._run.attempt_progress(record.id)),
            claim=str(self._run.attempt_claim(record.id)),
            ended=str(self._run.attempt_ended(record.id)),
            env=dict(job.env),
            cwd=job.cwd or str(Path.cwd()),
            result=job.result,
            after=tuple(str(self._run.attempt_ended(each.attempt)) for each in group.after),
            delay_s=self._delay_s,
            nodes=placement.nodes,
            tasks=placement.tasks,
            mpi=self.options.mpi,
            gpus=placement.gpus,
            timeout_s=limits.whole_s,
            stage_timeout_s=limits.stage_s,
            heartbeat_s=limits.heartbeat_s,
            grace_s=self._grace_s,
            notice_s=self.options.notice,
            threads=None if placement.cpus is None else max(1, placement.cpus // placement.tasks),
        )

    def _told(self, followed: Sequence[Followed], handles: Sequence[str]) -> None:
        title = self._asking.title
        if len(followed) == 1:
            record = followed[0].record
            self._tell.about(EventKind.HANDED, record, f"handed to {title} as {clean(handles[0])}")
            return
        text = f"{len(followed)} jobs handed to {title} as {clean(handles[0])} to {clean(handles[-1])}"
        self._tell.tell(Event(kind=EventKind.HANDED, at=clock.wall(), text=text))

    def _forget(self, batch: str) -> None:
        with suppress(OSError):
            self._run.manifest(batch).unlink()
