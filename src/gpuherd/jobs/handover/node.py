"""Leads one attempt on its node: ``python -m gpuherd.jobs.handover.node MANIFEST INDEX``.

It claims the attempt, runs it in a session of its own with its log, keeps its time limits, ends all of it when the
node is to make room (SIGTERM, SIGINT, SIGHUP or SIGUSR1), and tells by a file how it has ended. It exits with 0 only if
the job has succeeded, with 1 if it has failed, and with 75 if it may run again: it was interrupted, or somebody else
has it.

Everything comes from the manifest, and everything is told in files beside it: no queue is opened here. What is imported
is little, for this begins once for each attempt.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuherd.engines.local import CannotStart, Launch, LocalProcess, read_exit, start
from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.jobs import clock
from gpuherd.jobs.handover.course import Course, end_rest
from gpuherd.jobs.handover.guardian import Guardian
from gpuherd.jobs.handover.manifest import Order, order_of
from gpuherd.jobs.handover.reports import Claim, Ended, read_claim, read_ended, take
from gpuherd.engines.stop import Stop
from gpuherd.jobs.handover.telling import INTERRUPTED, exit_code, has_result, pauses, say, tell
from gpuherd.jobs.timelimits import Limits, Timer

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# A start that failed for want of processes, files or space, and a report that could not be written, are tried again.
_PATIENCE_S = 60.0


def main(words: Sequence[str]) -> int:
    """The command: a manifest's path and an index in it. Returns the exit code."""
    if len(words) != 2 or not words[1].isdigit():
        say("usage: python -m gpuherd.jobs.handover.node MANIFEST INDEX")
        return ExitCode.USAGE
    with Stop() as stop:
        for number in _SIGNALS:
            signal.signal(number, lambda *_: stop.ask())
        try:
            return lead(words[0], int(words[1]), stop)
        except (GpuherdError, OSError) as problem:
            say(str(problem))
            return problem.exit_code if isinstance(problem, GpuherdError) else ExitCode.CANNOT_WRITE
        finally:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # ``stop`` is gone, and nothing is left to be stopped


def lead(
    manifest: str, index: int, stop: Stop | None = None, *, handle: str | None = None, patience_s: float = _PATIENCE_S
) -> int:
    """Runs the attempt at this place of the manifest, from its claim to the report of its end. Returns the exit code.

    It may be called in a process that lives on, in any thread; it installs no signal handlers there. ``stop`` asks it
    to make room, and so does an exception that is thrown into it (KeyboardInterrupt, SystemExit), which goes on when
    the attempt has ended. If the process dies, a guardian ends the attempt and tells of it.

    Args:
        handle: the engine's word for the attempt, where SLURM's variables do not say it.
        patience_s: how long a start or a report is tried again that fails for want of space, say.

    Raises UsageError for a manifest or an index that is none, OSError where the attempt can't be claimed.
    """
    told, order = order_of(Path(manifest), index)
    inherited = environment(os.environ, told.environment, order)
    if not take(Path(order.claim), _claim(inherited, handle)):
        return _taken(order)
    if stop is not None:
        return _lead(manifest, index, order, inherited, stop, patience_s)
    with Stop() as never:
        return _lead(manifest, index, order, inherited, never, patience_s)


def environment(own: Mapping[str, str], told: Mapping[str, str], order: Order) -> dict[str, str]:
    """What the job inherits on this node: what it is told, over the node's own. The GPUs are those of the engine."""
    merged = {**own, **told}
    merged.pop(_VISIBLE, None)
    if order.gpus == 0:
        merged[_VISIBLE] = ""
    elif _VISIBLE in own:
        merged[_VISIBLE] = own[_VISIBLE]
    return merged


def _lead(manifest: str, index: int, order: Order, inherited: Mapping[str, str], stop: Stop, patience_s: float) -> int:
    try:
        process = _start(order, inherited, stop, patience_s)
    except CannotStart as problem:
        say(str(problem))
        interrupted = stop.asked and problem.may_pass
        ended = Ended(at=clock.wall(), ran_s=0.0, started=False, problem=str(problem), interrupted=interrupted)
        return tell(order, ended, patience_s)
    try:
        guardian = Guardian.posted(manifest, index, process.identity)
    except OSError as problem:
        process.abandon()
        text = f"can't start its guardian: {problem}"
        say(text)
        return tell(order, Ended(at=clock.wall(), ran_s=0.0, started=False, problem=text), patience_s)
    with guardian:
        began = clock.mono()
        limits = Limits(order.timeout_s, order.stage_timeout_s, order.heartbeat_s)
        course = Course(process, Path(order.progress), Timer(began, limits, seen_at=began), order.grace_s)
        process.go()
        try:
            course.follow(stop)
        except BaseException:
            course.make_room()
            course.follow(stop)
            _finish(order, course, began, patience_s)
            guardian.dismiss()
            raise
        code = _finish(order, course, began, patience_s)
        guardian.dismiss()
        return code


def _start(order: Order, inherited: Mapping[str, str], stop: Stop, patience_s: float) -> LocalProcess:
    launch = Launch(
        tag=order.tag,
        argv=order.argv,
        env=order.env,
        cwd=order.cwd,
        log=Path(order.log),
        status=order.status,
        progress=Path(order.progress),
        inherits_gpus=True,
        threads=order.threads,
    )
    until = time.monotonic() + patience_s
    for pause_s in pauses():
        try:
            return start(launch, inherited)
        except CannotStart as problem:
            if not problem.may_pass or stop.asked or time.monotonic() + pause_s > until:
                raise
            say(f"{problem}; trying again")
        time.sleep(pause_s)
    raise AssertionError("there is always another pause")


def _finish(order: Order, course: Course, began: float, patience_s: float) -> int:
    """Ends what is left, and tells of the end."""
    process, at, now = course.process, clock.wall(), clock.mono()
    found = process.collect()
    end_rest(process.traces)
    started = read_exit(order.status, order.tag).started or found.code == 0
    ended = Ended(
        at=at,
        ran_s=now - began,
        started=started,
        problem=None if started else f"can't write {order.status}, by which it would tell its end",
        code=found.code,
        signal=found.signal,
        has_result=has_result(order),
        limit=None if course.passed is None else course.passed.kind.value,
        limit_s=None if course.passed is None else course.passed.limit_s,
        stage=None if course.passed is None else course.passed.stage,
        interrupted=course.interrupted,
    )
    return tell(order, ended, patience_s)


def _taken(order: Order) -> int:
    """Somebody else has it. Only a success may let begin what comes after it (SLURM's ``afterok``)."""
    claim, ended = read_claim(Path(order.claim)), read_ended(Path(order.ended))
    if ended is not None:
        say(f"attempt {order.attempt} has ended before")
        return exit_code(ended)
    if claim is not None and claim.void:
        say(f"attempt {order.attempt} is not to run any more")
    else:
        say(f"attempt {order.attempt} is run by {'another' if claim is None else claim.node} already")
    return INTERRUPTED


def _claim(inherited: Mapping[str, str], handle: str | None) -> Claim:
    visible = inherited.get(_VISIBLE, "")
    return Claim(
        at=clock.wall(),
        node=os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        handle=handle or _slurm_handle(os.environ),
        gpus=tuple(name for name in visible.split(",") if name),
        pid=os.getpid(),
    )


def _slurm_handle(variables: Mapping[str, str]) -> str | None:
    array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else variables.get("SLURM_JOB_ID")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
