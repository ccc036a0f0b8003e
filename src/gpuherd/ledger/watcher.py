"""Processes that do nothing but record: the one next to a command of ``gpuherd run``, and ``gpuherd record``.

``gpuherd run`` becomes its command, so that none of us stays. Before that it leaves a small process, which has no
terminal, no pipe of the command's and no lease. It watches the command's pidfd and, where the command's children keep
the GPUs, the leases. For a command of a moment that is a fork which only notes the end; after that it becomes a Python
of its own (``python -m gpuherd.ledger.watcher``), which reads the driver and samples others' processes too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from gpuherd.engines.process_tree import ATTEMPT_VARIABLE, SESSION_VARIABLE
from gpuherd.ledger.metering import Look, Meter, begun, part_of
from gpuherd.ledger.recorder import Recorder
from gpuherd.ledger.records import Use, line_of, use_of
from gpuherd.ledger.sampler import EVERY_S, Sampler, lease_holders, users_on

if TYPE_CHECKING:
    from gpuherd.gpus.state import Gpu

# A command that is over by then is recorded without looking at the driver.
_SHORT_S = 2.0
# The GPUs of a command that has ended are looked at again after so long, then after twice as long and so on.
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.02, 2.0


def _mono() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# --- next to a command ----------------------------------------------------------------------------------------------


def leave_watcher(uses: Sequence[Use]) -> None:
    """Leaves a process that records these uses of GPUs by this process and what it becomes, until the leases which it
    holds are given back. Without processes or descriptors to spare nothing is recorded.
    """
    with suppress(OSError):
        pidfd = os.pidfd_open(os.getpid())
        try:
            child = os.fork()
            if child == 0:
                _detach(pidfd, uses)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
        finally:
            os.close(pidfd)


def _detach(pidfd: int, uses: Sequence[Use]) -> None:
    """The child: never returns."""
    try:
        os.setsid()
        if os.fork() == 0:
            _close_all_but(pidfd)
            os.chdir("/")
            _watch_short_command(pidfd, uses)
    finally:
        # Nothing that this process has from its parent may be flushed or closed twice.
        os._exit(0)


def _close_all_but(kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):
            if int(name) != kept:
                os.close(int(name))
    for _ in range(3):
        os.open(os.devnull, os.O_RDWR)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _watch_short_command(pidfd: int, uses: Sequence[Use]) -> None:
    began = _mono()
    pid = uses[0].pid or 0
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    if ended.poll(_SHORT_S * 1000) and not _kept(pid, [use.gpu for use in uses]):
        recorder = Recorder()
        now, wall = _mono(), time.time()
        recorder.close(
            begun(use, mono=began, wall=wall - (now - began)).advanced(mono=now, wall=wall).use for use in uses
        )
        return
    # To be read from a pipe: others may read a process's arguments.
    read_end, write_end = os.pipe()
    os.write(write_end, json.dumps({"pidfd": pidfd, "mono": began}).encode() + b"\n" + b"".join(map(line_of, uses)))
    os.close(write_end)
    os.dup2(read_end, 0)
    os.set_inheritable(pidfd, True)
    # A job that waits for its own processes, where the command is a part of one, must not wait for this one.
    # Nor must the end of a session end it.
    no_longer = (ATTEMPT_VARIABLE, SESSION_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in no_longer}
    os.execve(sys.executable, [sys.executable, "-P", "-m", "gpuherd.ledger.watcher"], environment)  # noqa: S606


def _kept(pid: int, uuids: Collection[str]) -> set[str]:
    """Which of these GPUs are still held by a lease that this process has taken: it may have ended, and its children
    hold the lease."""
    from gpuherd.errors import CannotWrite, UsageError
    from gpuherd.gpus.leases import LeaseFolder

    try:
        folder = LeaseFolder.existing()
        holders = {} if folder is None else folder.holders(uuids)
    except (OSError, CannotWrite, UsageError):
        return set()
    return {uuid for uuid, holder in holders.items() if holder.pid == pid}


def _watch_command(pidfd: int, began: float, uses: Sequence[Use]) -> None:
    """Records until the last GPU has been given back."""
    from gpuherd.gpus.query import GpuReader

    recorder, reader, wall = Recorder(), GpuReader(), time.time() - (_mono() - began)
    recorder.begin()
    sampler = Sampler(recorder, reader.snapshot, lease_holders)
    meters = {use.id: begun(use, mono=began, wall=wall) for use in uses}
    pid, has_ended, pause_s, look_at = uses[0].pid or 0, False, _FIRST_LOOK_S, 0.0
    events = select.poll()
    events.register(pidfd, select.POLLIN)
    events.register(sampler.fileno(), select.POLLIN)
    while meters:
        now, wall = _mono(), time.time()
        if now >= look_at:
            look_at = now + EVERY_S
            gpus = {gpu.uuid: gpu for gpu in reader.snapshot().gpus}
            meters = {name: _looked(meter, gpus.get(meter.use.gpu), now, wall) for name, meter in meters.items()}
            sampler.keep_time(now, wall)
            recorder.sample([*(meter.use for meter in meters.values()), *sampler.uses])
        # While the command lives the leases are its own; a lease may be passed over at any time.
        kept = _kept(pid, [meter.use.gpu for meter in meters.values()])
        given_back = [name for name, meter in meters.items() if has_ended and meter.use.gpu not in kept]
        recorder.end(meters.pop(name).advanced(mono=now, wall=wall).use for name in given_back)
        if not meters:
            break
        wait_s = look_at - now
        if has_ended:
            wait_s, pause_s = min(wait_s, pause_s), min(2 * pause_s, _LONGEST_LOOK_S)
        for fd, _ in events.poll(max(1.0, wait_s * 1000)):
            if fd == pidfd:
                has_ended = True
                events.unregister(pidfd)
            else:
                sampler.note_ends(_mono(), time.time())
    recorder.sample(sampler.uses)
    recorder.close()
    sampler.close()


def _looked(meter: Meter, gpu: Gpu | None, now: float, wall: float) -> Meter:
    if gpu is None:
        return meter.advanced(mono=now, wall=wall)
    users = users_on(gpu)
    mine = [process.memory_mb for process in gpu.processes if process.compute]
    # The only one there: the driver's figure for the GPU is its own.
    memory_mb = gpu.used_mb if len(users | {meter.use.uid}) == 1 else sum(each or 0 for each in mine)
    look = Look.of(gpu, part=part_of(meter.use.uid, users), memory_mb=memory_mb)
    return meter.advanced(mono=now, wall=wall, look=look)


# --- gpuherd record -------------------------------------------------------------------------------------------------


def record_others(every_s: float, until: Callable[[], bool], tell: Callable[[str], None], wake: int) -> None:
    """Samples all processes on the machine's GPUs until it is asked to end, one sample every so many seconds.

    Args:
        until: whether to end.
        tell: takes sentences for people: what hinders it, once each time.
        wake: a descriptor that becomes readable when ``until`` may have changed.
    """
    from gpuherd.gpus.query import GpuReader

    recorder, reader = Recorder(), GpuReader()
    recorder.begin()
    sampler = Sampler(recorder, reader.snapshot, lease_holders, every_s)
    events = select.poll()
    events.register(wake, select.POLLIN)
    events.register(sampler.fileno(), select.POLLIN)
    reported = ""
    try:
        while not until():
            now, wall = _mono(), time.time()
            if sampler.keep_time(now, wall):
                recorder.sample(sampler.uses)
            trouble = recorder.trouble or ("" if sampler.samples else "another recorder samples; this one waits")
            if trouble != reported:
                reported = trouble
                tell(trouble or "it records again")
            for fd, _ in events.poll(max(1.0, (sampler.due_at - now) * 1000)):
                if fd == wake:
                    os.read(wake, 4096)
                else:
                    sampler.note_ends(_mono(), time.time())
    finally:
        recorder.sample(sampler.uses)
        recorder.close()
        sampler.close()


def main() -> None:
    """``python -m gpuherd.ledger.watcher``: see ``_watch_short_command``, which starts it."""
    head, *lines = sys.stdin.buffer.read().splitlines()
    started = json.loads(head)
    uses = [use for line in lines if (use := use_of(line)) is not None]
    if uses:
        _watch_command(int(started["pidfd"]), float(started["mono"]), uses)


if __name__ == "__main__":
    main()
