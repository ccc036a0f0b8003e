"""One node's part of an attempt: from the start of its command to the report of its end."""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from gpuherd.engines import host
from gpuherd.engines.local.process import CannotStart, Exit, Launch, LocalProcess, adopt, read_exit, start
from gpuherd.engines.process_tree import ATTEMPT_VARIABLE, ProcessId, Traces, boot_id, end_rest
from gpuherd.engines.world import NodeFailure, Others, Stop, World
from gpuherd.errors import GpuherdError
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.time_limits import Supervised, TimeLimits, Timer
from gpuherd.jobs.remote import (
    LAST_S,
    OTHERS_END_S,
    OTHERS_LOOK_S,
    PATIENCE_S,
    PEAK_END_S,
    PEAK_EVERY_S,
    PEAK_FIRST_S,
)
from gpuherd.jobs.remote.protocol import (
    EndReport,
    Order,
    first_failure,
    has_result,
    order_of,
    patiently,
    read_ended,
    say,
    write_report,
)

if TYPE_CHECKING:
    from gpuherd.gpus.state import Gpu

# GPU peak: the most GPU memory that an attempt uses on one GPU, sampled every few seconds while it runs.
#
# Its processes are recognised by their pids, on any GPU of the node: inside an engine's container the numbers of GPUs
# need not be the driver's. Where the driver does not report memory by process, or has other pids, the peak is unknown.
# Sampling has a thread of its own, since a driver that hangs must not keep the job from being ended.


class GpuPeak:
    """``mb`` is the peak so far, in MB (2^20 bytes), None while unknown.

    Args:
        first_s, every_s: seconds from the start to the first sample, and between two.
    """

    def __init__(self, traces: Traces, first_s: float = PEAK_FIRST_S, every_s: float = PEAK_EVERY_S):
        self.mb: int | None = None
        self._traces = traces
        self._first_s, self._every_s = first_s, every_s
        self._over = threading.Event()

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Samples while the block lasts."""
        thread = threading.Thread(target=self._look, name="gpuherd-peak", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(PEAK_END_S)

    def _look(self) -> None:
        if self._over.wait(self._first_s):
            return
        from gpuherd.gpus.query import GpuReader  # here: the job runs by now, and need not wait for this

        driver = GpuReader()
        while gpus := driver.snapshot().gpus:
            self.mb = most(gpus, frozenset(each.process.pid for each in self._traces.members()), self.mb)
            if self._over.wait(self._every_s):
                break
        driver.close()


def most(gpus: Iterable[Gpu], pids: frozenset[int], before: int | None) -> int | None:
    """The most memory in MB that these processes use together on one of the GPUs, or the peak before."""
    for gpu in gpus:
        known = [each.memory_mb for each in gpu.processes if each.pid in pids and each.memory_mb is not None]
        if known:
            before = max(before or 0, sum(known))
    return before


# --- the part ------------------------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class Supervision(Supervised):
    """One attempt that runs on this node: its time limits, the request that it make room, and its other nodes.

    Attributes:
        grace_s, notice_s: how long it has to end: when it is asked to, and when its time is nearly up.
        others: its other nodes, where the engine starts them one by one.
        ask_all: sends SIGTERM to all of it on all of its nodes, where the main process would not hand it on; False
            where that failed.
        interrupted: it is being ended to make room.
        failure: another node that failed, for which it is being ended.
    """

    grace_s: float
    notice_s: float | None = None
    others: Others | None = None
    ask_all: Callable[[], bool] | None = None
    interrupted: bool = False
    failure: NodeFailure | None = None
    _ended: bool = field(default=False, init=False)
    _others_end_at: float | None = field(default=None, init=False)

    def follow(self, stop: Stop) -> None:
        """Returns when the main process has ended, and the other nodes too."""
        poll = select.poll()
        if not self._ended:
            poll.register(self.process.pidfd, select.POLLIN)
        poll.register(stop.fileno(), select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(self._wait_ms())}
            if self.process.pidfd in ready:
                poll.unregister(self.process.pidfd)
                self._ended = True
                if _failed(self.process.pidfd):
                    self._end_others()
            if stop.fileno() in ready:
                stop.heard()
                self.vacate(soon=stop.soon)
            if self._all_ended():
                # A sender of the request may have ended the job as well, and that may be noticed first: Ray's job
                # server does so.
                self.interrupted = self.interrupted or stop.asked
                return
            self.keep_time(clock.mono(), self.grace_s)

    def vacate(self, *, soon: bool = True) -> None:
        """SIGTERM to all that belongs to it, and SIGKILL after the grace, or when the notice of its end is over."""
        self.interrupted = True
        self.end(clock.mono(), self.grace_s if soon else max(self.grace_s, (self.notice_s or 0.0) - LAST_S))

    def _all_ended(self) -> bool:
        if self.others is None:
            return self._ended
        if self.failure is None and self._others_end_at is None:
            self.failure = self.others.failure()
            if self.failure is not None:
                self.end(clock.mono(), self.grace_s)
        given_up = self._others_end_at is not None and clock.mono() > self._others_end_at
        return self._ended and (self.others.over() or given_up)

    def _wait_ms(self) -> float | None:
        times, now = [self.next_at()], clock.mono()
        if self.others is not None:
            times.append(now + OTHERS_LOOK_S)
        at = min((at for at in times if at is not None), default=math.inf)
        return None if at == math.inf else math.ceil(1000 * max(0.0, at - now))

    def terminate(self) -> None:
        """SIGTERM to all of it on all nodes."""
        self._end_others()
        if self.ask_all is None or not self.ask_all():
            self.process.terminate()

    def kill(self) -> None:
        """SIGKILL to all of it here; the engine ends the rest."""
        self._end_others()
        self.process.kill()

    def _end_others(self) -> None:
        if self.others is not None:
            self.others.end()
            if self._others_end_at is None:
                end_at = clock.mono() + self.grace_s if self.kill_at is None else self.kill_at
                self._others_end_at = end_at + OTHERS_END_S


def _failed(pidfd: int) -> bool:
    """Whether the child has not ended with 0; it can still be waited for."""
    found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    return found is None or found.si_code != os.CLD_EXITED or found.si_status != 0


# One node's part of an attempt, from the start of its command to the report of its end, with a guardian.

_TAIL_BYTES = 16384


@dataclass(frozen=True, slots=True)
class NodePart:
    """What is to run here.

    Attributes:
        manifest, index: where the order stands.
        order: its files and its command are this node's.
        inherited: the environment that the job's own comes on top of.
        world: this node's place among several, where the command itself does not find it.
        ask_all: as in ``Supervision``.
        patience_s: how long a failed start or report is retried.
    """

    manifest: str
    index: int
    order: Order
    inherited: Mapping[str, str]
    world: World | None = None
    ask_all: Callable[[], bool] | None = None
    patience_s: float = 60.0

    def run(self, stop: Stop, others: Others | None = None) -> EndReport:
        """Runs it, and reports its end. Raises OSError where the end can't be reported, unless it is a success, which
        the exit code shows as well."""
        with ExitStack() as held:
            try:
                if others is not None and self.world is not None:
                    others.begin(self.world.port)
                process = patiently(self._start, "can't start", self.patience_s, stop)
                held.callback(process.abandon)  # only descriptors are left of it, unless we were interrupted twice
                rank = 0 if self.world is None else self.world.rank
                guardian = guarded(self.manifest, self.index, rank, self.order, process.identity)
                dismiss = held.enter_context(guardian)
            except (GpuherdError, OSError) as problem:
                held.close()
                return self._not_started(problem, stop, others)
            return self._lead(process, dismiss, stop, others)

    def _not_started(self, problem: GpuherdError | OSError, stop: Stop, others: Others | None) -> EndReport:
        from gpuherd.engines.base import EngineAway  # here: the job is to begin at once

        if others is not None:
            others.end()
        say(str(problem))
        passing = isinstance(problem, OSError) or (isinstance(problem, CannotStart) and problem.may_pass)
        interrupted = isinstance(problem, EngineAway) or (stop.asked and passing)
        ended = EndReport(at=clock.wall(), ran_s=0.0, started=False, problem=str(problem), interrupted=interrupted)
        write_report(self.order, ended, self.patience_s)
        return ended

    def _start(self) -> LocalProcess:
        order = self.order
        place = {} if self.world is None else self.world.variables()
        launch = Launch(
            tag=order.tag,
            argv=order.job.argv,
            env={**order.job.env, **place},
            cwd=order.job.cwd,
            log=Path(order.log),
            status=order.status,
            progress=Path(order.progress),
            inherits_gpus=True,
            threads=order.threads or host.cores(),
        )
        return start(launch, self.inherited)

    def _lead(self, process: LocalProcess, dismiss: Callable[[], None], stop: Stop, others: Others | None) -> EndReport:
        order, began = self.order, clock.mono()
        limits = TimeLimits(order.job.timeout_s, order.job.stage_timeout_s, order.job.heartbeat_s)
        timer = Timer(began, limits, seen_at=began)
        supervision = Supervision(
            process=process,
            progress_file=Path(order.progress),
            timer=timer,
            grace_s=order.grace_s,
            notice_s=order.notice_s,
            others=others,
            ask_all=self.ask_all,
        )
        thrown: BaseException | None = None
        peak = GpuPeak(process.traces)
        with nullcontext() if order.gpus == 0 else peak.sampled():
            process.go()
            try:
                supervision.follow(stop)
            except BaseException as problem:
                thrown = problem
                supervision.vacate()
                supervision.follow(stop)
        try:
            ended = self._finish(supervision, clock.mono() - began, peak.mb)
        finally:
            dismiss()  # all has ended; where we can't report it, the guardian couldn't either
        if thrown is not None:
            raise thrown
        return ended

    def _finish(self, supervision: Supervision, ran_s: float, peak_mb: int | None) -> EndReport:
        """Ends what is left, and reports the end."""
        order, at = self.order, clock.wall()
        found = supervision.process.collect()
        end_rest(supervision.process.traces)
        failure = supervision.failure
        if failure is None and order.has_ranks and found.code != 0:
            failure = first_failure(order.first_failure)
        elif failure is not None:
            _copy_tail(order, failure)
        if failure is not None and not failure.lost:
            found = Exit(started=True, code=failure.code, signal=failure.signal)
        started = found.code == 0 or read_exit(order.status, order.tag).started
        passed = supervision.passed
        lost = failure is not None and failure.lost
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
            interrupted=supervision.interrupted or lost,
            lost=lost,
            peak_mb=peak_mb,
        )
        try:
            write_report(order, ended, self.patience_s)
        except OSError as problem:
            if not ended.well:
                raise
            say(f"{problem}; the exit code tells that it has succeeded")
        return ended


def _problem(order: Order, failure: NodeFailure | None, started: bool) -> str | None:
    if not started:
        return f"it was ended before it began, or {order.status} could not be written"
    return None if failure is None else str(failure)


def _copy_tail(order: Order, failure: NodeFailure) -> None:
    """Copies the end of the failed node's log into the log that people read."""
    there = Path(order.on_node(failure.rank).log)
    with suppress(OSError):
        text = there.read_bytes()[-_TAIL_BYTES:]
        with Path(order.log).open("ab") as log:
            log.write(f"\n--- {failure}; the end of {there}:\n".encode("utf-8", "backslashreplace") + text)


# The guardian: ends an attempt on its node, and reports its end, when its leader has died (SIGKILL, a Ray worker that
# is ended).
#
# A shell waits on a pipe whose other end only the leader has. It ends when the leader says that all is done. When the
# pipe ends without that, it becomes ``agent guardian``, which ends the attempt's process tree
# (SIGTERM, the grace, SIGKILL) and reports in the leader's place how it ended. So it costs a thousandth of a second
# and next to no memory while all goes well.

# It survives the signals that an engine sends to all of a job's processes, except SIGKILL; and it is no child of the
# agent, because a worker of Ray kills its children when it ends. A background process of a shell reads from /dev/null
# unless its input is redirected.
_SCRIPT = """\
trap '' HUP INT QUIT TERM USR1 USR2 ALRM
exec 3<&0
{ read -r word; [ "$word" = done ] || exec "$@"; } <&3 3<&- &
"""


@contextmanager
def guarded(manifest: str, index: int, rank: int, order: Order, process: ProcessId) -> Iterator[Callable[[], None]]:
    """A guardian of this process while the block lasts; the call that it gives dismisses the guardian: the attempt has
    ended and was reported. Leaving the block without that leaves the attempt to the guardian. Raises OSError.

    Args:
        order: what runs here; ``manifest`` and ``index`` locate it, ``rank`` is this node's place.
        process: the attempt's main process here.
    """
    words = [sys.executable, "-m", "gpuherd.jobs.remote.agent", "guardian", str(Path(manifest).absolute())]
    words += [str(index), str(rank), str(process.pid), str(process.start_ticks)]
    # To end the attempt no file is needed: by then the manifest may be gone, or its network file system.
    words += [order.tag, str(order.status), str(order.grace_s)]
    # It must find gpuherd's modules wherever it is started; and it is not a part of a job that we may be a part of.
    environment = host.finding_us(os.environ)
    environment.pop(ATTEMPT_VARIABLE, None)
    shell = subprocess.Popen(
        ["/bin/sh", "-c", _SCRIPT, "gpuherd-guardian", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    shell.wait()  # from here on init is the guardian's parent
    word, ended = cast(IO[bytes], shell.stdin), cast(IO[bytes], shell.stdout)

    def dismiss() -> None:
        with suppress(BrokenPipeError):
            word.write(b"done\n")
            word.flush()

    try:
        yield dismiss
    finally:
        with suppress(BrokenPipeError):
            word.close()
        ended.read()  # until it has ended
        ended.close()


def guard(words: Sequence[str]) -> int:
    """The guardian's command: manifest, index, rank; the pid and start time of the attempt's main process; tag, status,
    grace."""
    manifest, index, rank, pid, ticks, tag, status, grace = words
    identity, grace_s = ProcessId(int(pid), int(ticks), boot_id()), float(grace)
    process = adopt(identity, Path(status), tag)
    if process is not None:
        _end(process, grace_s)
        process.release()
    left = end_rest(Traces(tag, identity), grace_s)
    try:
        _, order = order_of(Path(manifest), int(index))
    except OSError as problem:
        say(f"nobody waits for the end of attempt {tag} any more: {problem}")
        return 0
    if int(rank) > 0:
        order = order.on_node(int(rank))
    if read_ended(Path(order.ended)) is not None:
        return 0
    found = read_exit(order.status, order.tag)
    # Where its shell was killed with its agent, how the job would have ended is unknown: we have ended it.
    cut = left and found.code is None and found.signal is None
    ended = EndReport(
        at=clock.wall(),
        ran_s=found.ran_s or 0.0,
        started=found.started,
        problem="the process that led it was killed",
        code=found.code,
        signal=found.signal,
        has_result=has_result(order),
        interrupted=process is not None or not found.started or cut,
    )
    write_report(order, ended, PATIENCE_S)
    return 0


def _end(process: LocalProcess, grace_s: float) -> None:
    ended = select.poll()
    ended.register(process.pidfd, select.POLLIN)
    process.terminate()
    if not ended.poll(1000 * grace_s):
        process.kill()
        ended.poll()
