"""One node's part of an attempt: from the start of its command to the report of its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gpuherd.engines import host
from gpuherd.engines.local.process import CannotStart, Exit, Launch, LocalProcess, read_exit, start
from gpuherd.engines.process_tree import Traces, everyone, members
from gpuherd.engines.world import Failure, Others, Stop, World
from gpuherd.errors import GpuherdError
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.time_limits import TimeLimits, Timer
from gpuherd.jobs.remote.guardian import Course, Guardian, end_rest
from gpuherd.jobs.remote.node_rank import first_failure
from gpuherd.jobs.remote.protocol import EndReport, Order, has_result, patiently, say, tell

if TYPE_CHECKING:
    from gpuherd.gpus.state import Gpu


# The most GPU memory that an attempt was seen to use on one GPU, looked at every few seconds while it runs.
#
# Its processes are told by their pids, on whatever GPU of the node they are: within an engine's walls the numbers of
# GPUs need not be the driver's. Where the driver does not tell who uses how much, or has other pids, nothing is
# known. The looks have a thread of their own, since a driver that hangs must not keep anybody from ending the job.

# Short jobs aren't worth the driver's start.
_FIRST_S, _EVERY_S = 2.0, 5.0
_PATIENCE_S = 1.0


class Peak:
    """Looks while the block lasts. ``mb`` is what was seen so far, in MB (2^20 bytes), None for nothing.

    Args:
        wanted: False for an attempt without GPUs: nobody looks.
        first_s, every_s: seconds from the start to the first look, and between two.
    """

    def __init__(self, traces: Traces, wanted: bool = True, first_s: float = _FIRST_S, every_s: float = _EVERY_S):
        self.mb: int | None = None
        self._wanted = wanted
        self._traces = traces
        self._first_s, self._every_s = first_s, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="gpuherd-peak", daemon=True)

    def _look(self) -> None:
        if self._over.wait(self._first_s):
            return
        from gpuherd.gpus.query import GpuReader  # here: the job runs by now, and need not wait for this

        driver = GpuReader()
        while gpus := driver.snapshot().gpus:
            self.mb = most(gpus, self._pids(), self.mb)
            if self._over.wait(self._every_s):
                break
        driver.close()

    def _pids(self) -> frozenset[int]:
        found = members(everyone(self._traces.leader.start_ticks), self._traces.tag.__eq__, (self._traces,))
        return frozenset(each.process.pid for each in found)

    def __enter__(self) -> Self:
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self._wanted:
            self._thread.join(_PATIENCE_S)


def most(gpus: Iterable[Gpu], pids: frozenset[int], before: int | None) -> int | None:
    """The most memory in MB that these processes use together on one of the GPUs, or what was known before."""
    for gpu in gpus:
        known = [each.memory_mb for each in gpu.processes if each.pid in pids and each.memory_mb is not None]
        if known:
            before = max(before or 0, sum(known))
    return before


# One node's part of an attempt, from the start of its command to the report of its end, with a guardian beside it.

_TAIL_BYTES = 16384


@dataclass(frozen=True, slots=True)
class Part:
    """What is to run here.

    Attributes:
        manifest, index: where the order stands.
        order: its files and its command are this node's.
        inherited: the environment that the job's own comes on top of.
        world: this node's place among several, where the command itself does not find it.
        ask_all: as in ``Course``.
        patience_s: how long a start or a report is tried again that fails.
    """

    manifest: str
    index: int
    order: Order
    inherited: Mapping[str, str]
    world: World | None = None
    ask_all: Callable[[], bool] | None = None
    patience_s: float = 60.0

    def run(self, stop: Stop, others: Others | None = None) -> EndReport:
        """Runs it, and tells how it ended. Raises OSError where that can't be told of one that has not succeeded: of a
        success the exit code tells as well."""
        try:
            if others is not None and self.world is not None:
                others.begin(self.world.port)
            process = patiently(self._start, "can't start", self.patience_s, stop)
        except (GpuherdError, OSError) as problem:
            return self._not_started(problem, stop, others)
        try:
            rank = 0 if self.world is None else self.world.rank
            guardian = Guardian(self.manifest, self.index, rank, self.order, process.identity)
        except OSError as problem:
            process.abandon()
            return self._not_started(problem, stop, others)
        try:
            with guardian:
                return self._lead(process, guardian, stop, others)
        finally:
            process.abandon()  # nothing is left of it but descriptors, unless we were interrupted twice

    def _not_started(self, problem: GpuherdError | OSError, stop: Stop, others: Others | None) -> EndReport:
        from gpuherd.engines.base import EngineAway  # here: the job is to begin at once

        if others is not None:
            others.end()
        say(str(problem))
        passing = isinstance(problem, OSError) or (isinstance(problem, CannotStart) and problem.may_pass)
        interrupted = isinstance(problem, EngineAway) or (stop.asked and passing)
        ended = EndReport(at=clock.wall(), ran_s=0.0, started=False, problem=str(problem), interrupted=interrupted)
        tell(self.order, ended, self.patience_s)
        return ended

    def _start(self) -> LocalProcess:
        order = self.order
        place = {} if self.world is None else self.world.variables()
        launch = Launch(
            tag=order.tag,
            argv=order.argv,
            env={**order.env, **place},
            cwd=order.cwd,
            log=Path(order.log),
            status=order.status,
            progress=Path(order.progress),
            inherits_gpus=True,
            threads=order.threads or host.cores(),
        )
        return start(launch, self.inherited)

    def _lead(self, process: LocalProcess, guardian: Guardian, stop: Stop, others: Others | None) -> EndReport:
        order, began = self.order, clock.mono()
        limits = TimeLimits(order.timeout_s, order.stage_timeout_s, order.heartbeat_s)
        timer = Timer(began, limits, seen_at=began)
        course = Course(process, Path(order.progress), timer, order.grace_s, order.notice_s, others, self.ask_all)
        thrown: BaseException | None = None
        with Peak(process.traces, order.gpus != 0) as peak:
            process.go()
            try:
                course.follow(stop)
            except BaseException as problem:
                thrown = problem
                course.make_room()
                course.follow(stop)
        try:
            ended = self._finish(course, clock.mono() - began, peak.mb)
        finally:
            guardian.dismiss()  # all has ended; where we can't tell it, it couldn't either
        if thrown is not None:
            raise thrown
        return ended

    def _finish(self, course: Course, ran_s: float, peak_mb: int | None) -> EndReport:
        """Ends what is left, and tells of the end."""
        order, at = self.order, clock.wall()
        found = course.process.collect()
        end_rest(course.process.traces)
        failure = course.failure
        if failure is None and order.has_ranks and found.code != 0:
            failure = first_failure(order.first_failure)
        elif failure is not None:
            _copy_tail(order, failure)
        if failure is not None and not failure.lost:
            found = Exit(started=True, code=failure.code, signal=failure.signal)
        started = found.code == 0 or read_exit(order.status, order.tag).started
        passed = course.passed
        ended = EndReport(
            at=at,
            ran_s=ran_s,
            started=started,
            problem=_problem(order, failure, started),
            code=found.code,
            signal=found.signal,
            has_result=has_result(order),
            limit=None if passed is None else passed.kind.value,
            limit_s=None if passed is None else passed.limit_s,
            stage=None if passed is None else passed.stage,
            interrupted=course.interrupted or (failure is not None and failure.lost),
            peak_mb=peak_mb,
        )
        try:
            tell(order, ended, self.patience_s)
        except OSError as problem:
            if not ended.well:
                raise
            say(f"{problem}; the exit code tells that it has succeeded")
        return ended


def _problem(order: Order, failure: Failure | None, started: bool) -> str | None:
    if not started:
        return f"it was ended before it began, or {order.status} could not be written"
    return None if failure is None else str(failure)


def _copy_tail(order: Order, failure: Failure) -> None:
    """The last words of the node that failed, into the log that people read."""
    there = Path(order.on_node(failure.rank).log)
    with suppress(OSError):
        text = there.read_bytes()[-_TAIL_BYTES:]
        with Path(order.log).open("ab") as log:
            log.write(f"\n--- {failure}; the end of {there}:\n".encode("utf-8", "backslashreplace") + text)
