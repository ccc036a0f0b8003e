"""One node's part of an attempt, from the start of its command to the report of its end, with a guardian beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuherd.engines import allotment
from gpuherd.engines.local import CannotStart, Exit, Launch, LocalProcess, read_exit, start
from gpuherd.engines.stop import Stop
from gpuherd.engines.world import Failure, Others, World
from gpuherd.errors import GpuherdError
from gpuherd.jobs import clock
from gpuherd.jobs.handover.course import Course, end_rest
from gpuherd.jobs.handover.guardian import Guardian
from gpuherd.jobs.handover.manifest import Order
from gpuherd.jobs.handover.peak import Peak
from gpuherd.jobs.handover.rank import first_failure
from gpuherd.jobs.handover.reports import Ended
from gpuherd.jobs.handover.telling import has_result, patiently, say, tell
from gpuherd.jobs.timelimits import Limits, Timer

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

    def run(self, stop: Stop, others: Others | None = None) -> Ended:
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

    def _not_started(self, problem: GpuherdError | OSError, stop: Stop, others: Others | None) -> Ended:
        from gpuherd.engines.cluster import EngineAway  # here: the job is to begin at once

        if others is not None:
            others.end()
        say(str(problem))
        passing = isinstance(problem, OSError) or (isinstance(problem, CannotStart) and problem.may_pass)
        interrupted = isinstance(problem, EngineAway) or (stop.asked and passing)
        ended = Ended(at=clock.wall(), ran_s=0.0, started=False, problem=str(problem), interrupted=interrupted)
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
            threads=order.threads or allotment.cores(),
        )
        return start(launch, self.inherited)

    def _lead(self, process: LocalProcess, guardian: Guardian, stop: Stop, others: Others | None) -> Ended:
        order, began = self.order, clock.mono()
        limits = Limits(order.timeout_s, order.stage_timeout_s, order.heartbeat_s)
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

    def _finish(self, course: Course, ran_s: float, peak_mb: int | None) -> Ended:
        """Ends what is left, and tells of the end."""
        order, at = self.order, clock.wall()
        found = course.process.collect()
        end_rest(course.process.traces)
        failure = course.failure
        if failure is None and order.by_srun and found.code != 0:
            failure = first_failure(order.first_failure)
        elif failure is not None:
            _copy_tail(order, failure)
        if failure is not None and not failure.lost:
            found = Exit(started=True, code=failure.code, signal=failure.signal)
        started = found.code == 0 or read_exit(order.status, order.tag).started
        passed = course.passed
        ended = Ended(
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
