"""``gpuherd run``: waits for GPUs and becomes the command, as ``flock`` does for a file.

The command replaces this process: signals, exit status, terminal and pipes are the command's own. It inherits the
leases' file descriptors; the kernel frees the GPUs when the command and all that inherited them have ended. When a GPU
is free is decided in ``gpuherd.jobs.gpu.watch``, whether this command may have it in ``gpuherd.jobs.scheduler.policy``.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.batch.options import RunOptions
from gpuherd.engines.local.process import THREAD_VARIABLES
from gpuherd.engines.process_tree import identify
from gpuherd.errors import ExitCode, GpuherdError, JobCannotFit
from gpuherd.gpus.visible import environment as visible_environment
from gpuherd.gpus.visible import without
from gpuherd.jobs import clock
from gpuherd.jobs.settings import NO_SETTINGS, Settings

if TYPE_CHECKING:
    from gpuherd.gpus.leases import Lease
    from gpuherd.gpus.state import Gpu
    from gpuherd.gpus.tickets import Need
    from gpuherd.jobs.gpu.reserved import ReservedGpus
    from gpuherd.jobs.gpu.watch import GpuWatch
    from gpuherd.jobs.scheduler.types import Decision, GpuView

NOT_EXECUTABLE = 126
NOT_FOUND = 127
# A reason that changes with every check is shown again only after so many seconds.
_TELL_EVERY_S = 30.0


class NoGpuFree(GpuherdError):
    """The GPUs did not become free within the user's time limit."""

    exit_code = ExitCode.BUSY


class CannotBecome(GpuherdError):
    """The command can't be run. As in shells the code is 127 where it does not exist, 126 where it is no program."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Taken:
    """GPUs that are ours now. Both are empty on a machine without GPUs, and when none were requested."""

    gpus: tuple[Gpu, ...] = ()
    leases: tuple[Lease, ...] = ()


def find_program(word: str, path: str | None = None) -> str:
    """The path of the command's program. Raises CannotBecome, before any wait."""
    found = shutil.which(word, path=path)
    if found is not None:
        return found
    if "/" in word and Path(word).exists():
        raise CannotBecome(f"{word}: it is there but is no program that may be run", NOT_EXECUTABLE)
    where = "there is no such program" if "/" in word else "there is no such program in any folder of PATH"
    raise CannotBecome(f"{word}: {where}", NOT_FOUND)


def become(
    program: str,
    argv: Sequence[str],
    taken: Taken,
    inherited: Sequence[int],
    threads: int | None = None,
    *,
    name: str | None = None,
    project: str | None = None,
    is_session: bool = False,
) -> None:
    """Replaces this process by the command on these GPUs. Returns only by raising CannotBecome.

    A small process stays next to it, which records what it uses in the machine's ledger.

    Args:
        name, project: what it is called there; without a project that of the folder.
        is_session: it is a session there (``gpuherd session``).
        inherited: the descriptors that we inherited; of all others the command gets only the leases.
        threads: CPU threads for numeric libraries, unless the user has set a number.
    """
    environment = without(os.environ) | visible_environment(taken.gpus)
    if threads is not None and not any(name in environment for name in THREAD_VARIABLES):
        environment |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    record_use(argv, taken, name, project, is_session=is_session)
    replace_process(program, argv, environment, inherited, keep={lease.fd for lease in taken.leases})


def record_use(
    argv: Sequence[str],
    taken: Taken,
    name: str | None = None,
    project: str | None = None,
    *,
    is_session: bool = False,
) -> None:
    """Leaves a small process that records the use of these GPUs by this process, and by what it becomes and leaves
    behind, in the machine's ledger; without leases nothing. Arguments as for ``become``."""
    process = identify(os.getpid())
    if not taken.leases or process is None:
        return
    from gpuherd.ledger.names import command_name
    from gpuherd.ledger.records import Kind, Use
    from gpuherd.ledger.watcher import leave_watcher

    now, kind = clock.wall(), Kind.SESSION if is_session else Kind.RUN
    with suppress(OSError):  # a folder that was removed
        project = project or Path.cwd().name or None
    leave_watcher(
        [
            Use(
                id=f"{kind}/{process.boot[:8]}/{process.pid}-{process.start_ticks}/{position}",
                uid=os.geteuid(),
                gpu=gpu.uuid,
                label=gpu.label,
                kind=kind,
                job=name,
                project=project,
                command=command_name(argv),
                pid=process.pid,
                since=now,
                until=now,
            )
            for position, gpu in enumerate(taken.gpus)
        ]
    )


def replace_process(
    program: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    inherited: Sequence[int],
    keep: Collection[int] = (),
) -> None:
    """Replaces this process. Of descriptors that were not inherited the program gets those to ``keep``. Returns only by
    raising CannotBecome."""
    for descriptor in open_descriptors():
        if descriptor not in inherited:
            # The driver library may have opened files that would stay open in the command.
            with suppress(OSError):
                os.set_inheritable(descriptor, descriptor in keep)
    # Python ignores these signals; the command must not inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, list(argv), environment)  # noqa: S606 - the very purpose: no shell
    except OSError as problem:
        code = NOT_FOUND if problem.errno == errno.ENOENT else NOT_EXECUTABLE
        raise CannotBecome(f"{argv[0]}: {problem.strerror}", code) from None


def open_descriptors() -> tuple[int, ...]:
    """The numbers of this process's open files."""
    return tuple(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, of a folder that lives


class Waiter:
    """Waits for the GPUs of one command and takes them.

    Args:
        options: the request.
        tell: takes sentences for the user.
        settings: the limits that the user and the machine set.

    Raises NoSuchGpu for a GPU id that is not there.
    """

    def __init__(self, options: RunOptions, tell: Callable[[str], None], settings: Settings = NO_SETTINGS):
        self._options = options
        self._tell = tell
        self._settings = settings
        self._told = ""
        self._told_at = 0.0
        self._allowed: int | None = None  # GPUs that the settings allow now, by the last decision
        self._refuse_more_than_allowed()
        self._watch = self._open_watch() if options.gpus else None
        self._reserved = self._open_reserved() if options.gpus else None

    def take(self) -> Taken:
        """Waits for the GPUs and takes them. Raises NoGpuFree when that takes too long, JobCannotFit if it is
        impossible."""
        watch = self._watch
        if watch is None:
            return Taken()
        began = clock.mono()
        watch.leases.turns.wait(self._need(watch), began)
        try:
            return self._take_when_free(watch, began)
        finally:
            watch.rest()

    def _take_when_free(self, watch: GpuWatch, began: float) -> Taken:
        while True:
            now = clock.mono()
            watch.look(now, ())
            decided = self._decide(watch)
            self._refuse(decided)
            if watch.problem is not None and not watch.awaits_driver:
                self._tell(f"no GPUs: {watch.problem}; the command runs on the CPU")
                return Taken()
            taken = self._take(watch, decided.starts[0].gpus) if decided.starts else None
            for notice in (*watch.fetch_notices(), *(self._reserved.fetch_notices() if self._reserved else ())):
                self._tell(notice)
            if taken is not None:
                watch.rest()  # before a process is forked that would keep its locks
                self._keep_reservations(taken)
                self._say_taken(taken, clock.mono() - began)
                return taken
            self._wait(watch, began, decided)

    def look(self) -> tuple[tuple[Gpu, ...], str | None]:
        """One look for a dry run: the GPUs that pass a first check and would be taken, or why there are too few."""
        watch = self._watch
        if watch is None:
            return (), None
        if watch.problem is None:
            watch.look(clock.mono(), ())
        decided = self._decide(watch)
        self._refuse(decided)
        if watch.problem is not None:
            return (), watch.problem if watch.awaits_driver else None
        passing = self._passing(watch)
        chosen = watch.choose([gpu for gpu in watch.gpus if gpu.uuid in passing], self._options.gpus, self._options.mem)
        return ((), decided.waits[0].reason if decided.waits else None) if chosen is None else (chosen, None)

    @property
    def checks(self) -> int:
        """Checks in a row that must find a GPU free, by the last look."""
        return 0 if self._watch is None else self._watch.checks

    # --- steps --------------------------------------------------------------------------------------------------

    def _open_watch(self) -> GpuWatch:
        from gpuherd.jobs.gpu.watch import GpuWatch

        return GpuWatch(self._options.gpu_options(), f"run-{os.getpid()}", self._settings)

    def _need(self, watch: GpuWatch) -> Need:
        """What this command waits for, for its ticket."""
        from gpuherd.gpus.tickets import Need
        from gpuherd.jobs.scheduler.types import fits

        gpus, memory_mb = self._options.gpus, self._options.mem
        usable = frozenset(gpu.uuid for gpu in watch.gpus if fits(gpu, gpus, memory_mb))
        return Need(gpus=gpus, smallest=gpus, usable=usable or None, jobs=1)

    def _open_reserved(self) -> ReservedGpus:
        from gpuherd.jobs.gpu.reserved import ReservedGpus

        return ReservedGpus(self._settings)

    def _views(self, watch: GpuWatch) -> tuple[GpuView, ...]:
        """The GPUs with the verdicts on them."""
        now, wall = clock.mono(), clock.wall()
        if self._reserved is None:
            return watch.views(now, ())
        self._reserved.look(wall, now)
        return self._reserved.watched(watch, (), now, wall)

    def _decide(self, watch: GpuWatch) -> Decision:
        from gpuherd.jobs.scheduler.limits import limits
        from gpuherd.jobs.scheduler.policy import decide
        from gpuherd.jobs.scheduler.types import Decision, Wait, WaitingJob

        if watch.awaits_driver and watch.problem is not None:
            return Decision(waits=(Wait(0, watch.problem),))

        job = WaitingJob(0, self._options.gpus, self._options.mem)
        allowed = watch.leases.allowance(())
        self._allowed = allowed.max_gpus
        most = replace(
            limits(self._options.gpu_options(), watch.gpus, cores=1),
            gpus_now=allowed.max_gpus,
            gpus_now_why=allowed.sentence,
        )
        return decide([job], self._views(watch), most, watch.choose)

    def _refuse_more_than_allowed(self) -> None:
        """Raises JobCannotFit for more GPUs than the settings ever let the user hold."""
        from gpuherd.gpus.lease_files import user_name
        from gpuherd.jobs.scheduler.limits import most_ever

        most = most_ever(self._settings, user_name(os.geteuid()))
        if most is not None and most < self._options.gpus:
            raise JobCannotFit(
                f"the command asks for {self._options.gpus} GPUs; you may hold {most} by your own settings or this"
                " machine's policy"
            )

    @staticmethod
    def _refuse(decided: Decision) -> None:
        for refused in decided.refused:
            raise JobCannotFit(f"the command {refused.reason}")

    def _take(self, watch: GpuWatch, gpus: tuple[Gpu, ...]) -> Taken | None:
        """Leases on the GPUs and one more look under them; None when another process was faster."""
        now = clock.mono()
        leases = watch.leases.take(gpus, self._options.name or "run", now)
        if leases is None:
            return None
        uuids = {gpu.uuid for gpu in gpus}
        if watch.still_free(uuids, now) == uuids:
            return Taken(gpus, leases)
        for lease in leases:
            lease.close()
        return None

    def _wait(self, watch: GpuWatch, began: float, decided: Decision) -> None:
        options = self._options
        reason = decided.waits[0].reason if decided.waits else "somebody else was faster"
        needed = f"{options.gpus} GPU" + ("s" if options.gpus > 1 else "")
        too_few = self._allowed is not None and self._allowed < options.gpus
        if options.no_wait and (too_few or len(self._passing(watch) - _kept(watch)) < options.gpus):
            raise NoGpuFree(f"{needed} can't be had at once: {reason}")
        now = clock.mono()
        if options.wait is not None and now - began >= options.wait:
            raise NoGpuFree(f"{needed} did not become free in {options.wait:g} s: {reason}")
        if self._told == "" or (reason != self._told and now - self._told_at >= _TELL_EVERY_S):
            self._tell(f"waiting for {needed}: {reason}")
            self._told, self._told_at = reason, now
        pause = watch.look_in_s(now)
        time.sleep(pause if options.wait is None else max(0.0, min(pause, options.wait - (now - began))))

    def _passing(self, watch: GpuWatch) -> set[str]:
        """UUIDs of the GPUs that this look found free, whatever earlier looks found."""
        from gpuherd.gpus.idle import IdleRule, check
        from gpuherd.gpus.leases import LeaseFolder
        from gpuherd.jobs.scheduler.types import WaitingJob

        rule = IdleRule(memory_threshold_mb=self._options.gpu_memory_threshold)
        leases = LeaseFolder.existing()
        job = WaitingJob(0, self._options.gpus)
        reserved = {
            view.gpu.uuid
            for view in self._views(watch)
            if view.reserved is not None and view.reserved.is_overrun_by(job)
        }
        free = {gpu.uuid for gpu in watch.gpus if check(gpu, rule).free} - reserved
        return {uuid for uuid in free if leases is None or not leases.is_held(uuid)}

    def _keep_reservations(self, taken: Taken) -> None:
        """Our reservations of these GPUs must not lapse while the command, which this process becomes, runs."""
        if self._reserved is not None:
            self._reserved.mark_until_the_end({gpu.uuid for gpu in taken.gpus})

    def _say_taken(self, taken: Taken, after_s: float) -> None:
        labels = ", ".join(gpu.label for gpu in taken.gpus)
        self._tell(f"on GPU {labels}" + (f" after {after_s:.0f} s" if after_s >= 1 else ""))


def _kept(watch: GpuWatch) -> set[str]:
    """UUIDs of the GPUs that we could have now if it were not another user's turn."""
    return {view.gpu.uuid for view in watch.views(clock.mono(), ()) if view.kept}
