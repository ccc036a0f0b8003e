"""The dispatcher's part of the ledger: attempts on GPUs become uses, and others' processes are sampled on the way.

The queue stays the only truth about progress. A record of an end is appended before the end is in the queue, so that a
kill in between appends it again, under the same id. Nothing that fails here concerns a job: the ledger is tried again.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.errors import GpuherdError
from gpuherd.jobs import clock
from gpuherd.jobs.completion import Known, NoFault
from gpuherd.ledger.metering import Look, Meter, begun, part_of
from gpuherd.ledger.names import command_name
from gpuherd.ledger.records import Kind, Use

if TYPE_CHECKING:
    from gpuherd.gpus.state import Gpu
    from gpuherd.jobs.attempts.supervise import Attempt
    from gpuherd.jobs.gpu.watch import GpuWatch
    from gpuherd.jobs.queue.store import Queue
    from gpuherd.jobs.records import AttemptRecord
    from gpuherd.ledger.recorder import Recorder
    from gpuherd.ledger.sampler import Sampler

logger = logging.getLogger(__name__)

# Of attempts that ended without a word in the ledger so many are looked for at a start, in blocks, and those of the
# last month where there is no ledger yet.
_MOST_MISSING, _BLOCK = 4096, 256
_NEWEST = 1 << 62
_FIRST_S = 31 * 86400.0


class AttemptLedger:
    """Records the attempts of one dispatcher. It touches no file before the first of them has a GPU.

    Args:
        tag: of the queue.
        root: the run's folder.
        watch: the GPUs.
        project: that of jobs without another; None for the name of the run's folder.
    """

    def __init__(self, tag: str, root: Path, watch: GpuWatch, project: str | None = None) -> None:
        self._tag = tag
        self._project = project or root.absolute().name or None
        self._watch = watch
        self._uid = os.geteuid()
        self._meters: dict[str, Meter] = {}
        self._users: Mapping[str, frozenset[int]] = {}
        self._warned = False
        self._recorder: Recorder | None = None
        self._sampler: Sampler | None = None

    # --- while attempts run -------------------------------------------------------------------------------------

    @property
    def ends_fd(self) -> int | None:
        """Readable when another user's process has ended (``note_ends``); None while nothing is sampled."""
        return None if self._sampler is None else self._sampler.fileno()

    def look(
        self, running: Iterable[Attempt], in_use: Mapping[str, int], now: float, wall: float, *, waits: bool = False
    ) -> None:
        """Our attempts as of the look at their GPUs that was just made; others' processes every few of these.

        Args:
            running: all attempts.
            in_use: MB, by attempt's tag.
            waits: a job waits for a GPU, so that others' use of them is worth recording also while none of ours runs.
        """
        attempts = [attempt for attempt in running if attempt.record.gpus]
        if not attempts and not waits and self._recorder is None:
            return
        with self._harmless():
            recorder, sampler = self._started()
            gpus = {gpu.uuid: gpu for gpu in self._watch.gpus}
            self._users = {uuid: self._users_on(gpus[uuid]) for uuid in self._gpus_of(attempts) if uuid in gpus}
            for attempt in sorted(attempts, key=lambda each: each.record.started_mono):
                for use in self._uses(attempt.record):
                    self._add(use, attempt.record)
            memory = {f"{attempt.tag}/": in_use.get(attempt.tag) for attempt in attempts}
            for name, meter in self._meters.items():
                part = self._part(meter.use.gpu)
                look = _look(gpus.get(meter.use.gpu), part, memory.get(name[: name.rindex("/") + 1]))
                self._meters[name] = meter.advanced(mono=now, wall=wall, look=look)
            # Ours stand in the ledger before others' are looked at: these are distinguished by that.
            own = [meter.use for meter in self._meters.values()]
            recorder.sample([*own, *sampler.uses])
            if sampler.keep_time(now, wall):
                recorder.sample([*own, *sampler.uses])

    def began(self, running: Iterable[Attempt]) -> None:
        """Attempts have begun: of those that share a GPU each has a smaller part from now on."""
        if self._recorder is None:
            # While the first jobs run: loading all this between an end and the next start would cost GPU time.
            with self._harmless():
                self._started()
        for attempt in running:
            record = attempt.record
            if record.shared_mb is not None and f"{attempt.tag}/0" not in self._meters:
                with self._harmless():
                    self._started()
                    for use in self._uses(record):
                        self._add(use, record)

    def note_ends(self, now: float, wall: float) -> None:
        """Processes of others have ended."""
        if self._sampler is not None:
            with self._harmless():
                self._sampler.note_ends(now, wall)

    def rest(self, now: float, wall: float) -> None:
        """Nothing of ours runs or waits: others' use is left to other recorders."""
        if self._recorder is not None and self._sampler is not None:
            with self._harmless():
                self._sampler.rest(now, wall)
                self._recorder.sample(meter.use for meter in self._meters.values())

    def close(self) -> None:
        """The dispatcher ends; attempts that go on without it stay open in the ledger."""
        if self._recorder is not None and self._sampler is not None:
            with self._harmless():
                self._recorder.sample([*(meter.use for meter in self._meters.values()), *self._sampler.uses])
                self._recorder.close()
                self._sampler.close()

    # --- ends -----------------------------------------------------------------------------------------------------

    def ended(self, ends: Sequence[Known]) -> None:
        """These attempts have ended, and the queue does not have that yet."""
        on_gpus = [known for known in ends if known.record.gpus and known.record.handed is None]
        if not on_gpus:
            return
        with self._harmless():
            recorder, _ = self._started()
            uses = [(known, use) for known in on_gpus for use in self._uses(known.record)]
            finished = [(known, use) for known, use in uses if self._is_known(known, use)]
            recorder.end(self._finish(known, use) for known, use in finished)

    def _is_known(self, known: Known, use: Use) -> bool:
        """Whether its length is known: not where the machine was restarted (what was recorded until then stays), nor
        for the attempts of the folder of which this one is a copy."""
        if known.mono is not None and known.no_fault is not NoFault.COPIED:
            return True
        self._meters.pop(use.id, None)
        return False

    def _finish(self, known: Known, use: Use) -> Use:
        mono = known.record.started_mono if known.mono is None else known.mono
        self._add(use, known.record)
        self._share_again(use.gpu, mono, known.at, fewer=1)
        use = self._meters.pop(use.id).advanced(mono=mono, wall=known.at).use
        peak_mb = known.observed.peak_mb
        return use if peak_mb is None else replace(use, peak_mb=max(peak_mb, use.peak_mb or 0))

    def catch_up(self, queue: Queue) -> int:
        """Appends the ends that the queue has and the ledger lacks; how many. Where the newest are there, so are the
        others: that costs a few milliseconds, however long the queue is."""
        missing: list[Use] = []
        with self._harmless():
            if not queue.ended_on_gpus(_NEWEST, 1):
                return 0
            recorder, _ = self._started()
            known, since = recorder.recent()
            # A folder that was moved or restored has another tag, and the same name and numbers.
            name = self._tag.rpartition(".")[0]
            seen = {_number(each) for each in known if each.startswith(f"{name}.")}
            oldest = clock.wall() - _FIRST_S if since is None else since
            before = _NEWEST
            while len(missing) < _MOST_MISSING:
                block = queue.ended_on_gpus(before, _BLOCK)
                lacking = [each for each in block if each[1] > oldest and each[0].id not in seen]
                for record, at, run_s in lacking:
                    for use in self._uses(record):
                        meter = begun(use, mono=0.0, wall=at - run_s)
                        missing.append(meter.advanced(mono=run_s, wall=at).use)
                if not lacking:
                    break
                before = block[-1][0].id
            recorder.end(reversed(missing))
        return len(missing)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _started(self) -> tuple[Recorder, Sampler]:
        if self._recorder is None or self._sampler is None:
            from gpuherd.ledger.recorder import Recorder
            from gpuherd.ledger.sampler import Sampler, lease_holders

            self._recorder = Recorder()
            self._recorder.begin()
            self._sampler = Sampler(self._recorder, self._watch.machine, lease_holders)
        return self._recorder, self._sampler

    def _add(self, use: Use, record: AttemptRecord) -> None:
        """A meter from the attempt's start on, unless there is one; with what a dead dispatcher has measured of it."""
        if use.id in self._meters:
            return
        known = None if self._recorder is None else self._recorder.recovered.get(use.id)
        if known is None:
            meter = begun(use, mono=record.started_mono, wall=record.started_at)
        else:
            meter = Meter.resumed(use, known, mono=record.started_mono + known.span_s)
        self._share_again(use.gpu, record.started_mono, record.started_at, fewer=-1)
        self._meters[use.id] = replace(meter, look=Look(self._part(use.gpu, more=1)))

    def _share_again(self, uuid: str, mono: float, wall: float, *, fewer: int) -> None:
        """The uses on a GPU up to a time at which one of them begins or ends; from then on their parts are others."""
        here = {name: meter for name, meter in self._meters.items() if meter.use.gpu == uuid}
        if len(here) - fewer < 2 and len(here) < 2:
            return
        part = part_of(self._uid, self._users.get(uuid, frozenset()), len(here) - fewer)
        for name, meter in here.items():
            meter = meter.advanced(mono=mono, wall=wall)
            self._meters[name] = replace(meter, look=replace(meter.look, part=part))

    def _part(self, uuid: str, more: int = 0) -> float:
        ours = sum(meter.use.gpu == uuid for meter in self._meters.values())
        return part_of(self._uid, self._users.get(uuid, frozenset()), ours + more)

    @staticmethod
    def _gpus_of(attempts: Iterable[Attempt]) -> set[str]:
        return {uuid for attempt in attempts for uuid in attempt.record.gpus}

    @staticmethod
    def _users_on(gpu: Gpu) -> frozenset[int]:
        from gpuherd.ledger.sampler import users_on

        return users_on(gpu)

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """No failure in here is one of the run: a warning once."""
        try:
            yield
        except (OSError, GpuherdError, sqlite3.OperationalError) as problem:
            if not self._warned:
                self._warned = True
                logger.warning("what GPUs are used for can't be recorded: %s", problem)

    def _uses(self, record: AttemptRecord) -> Iterator[Use]:
        job = record.queued.job
        for position, (uuid, label) in enumerate(zip(record.gpus, record.labels, strict=True)):
            yield Use(
                id=f"{self._tag}/{record.id}/{position}",
                uid=self._uid,
                gpu=uuid,
                label=label,
                kind=Kind.JOB,
                job=job.title or job.name,
                project=job.project or self._project,
                command=command_name(job.argv),
                pid=None if record.process is None else record.process.pid,
                since=record.started_at,
                until=record.started_at,
            )


def _look(gpu: Gpu | None, part: float, memory_mb: int | None) -> Look:
    return Look(part) if gpu is None else Look.of(gpu, part=part, memory_mb=memory_mb)


def _number(use_id: str) -> int:
    """The attempt's number in a use's id, -1 where it is none of ours."""
    words = use_id.split("/")
    return int(words[1]) if len(words) == 3 and words[1].isdigit() else -1
