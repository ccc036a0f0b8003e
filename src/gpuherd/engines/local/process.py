"""Starts a job on this machine, follows it, and ends it, so that nothing about it is lost when gpuherd dies.

Between gpuherd and the job stands a shell with one constant script. It does three things that a plain child can't:

* It waits for a go-ahead on a pipe before it runs the job. The pid can therefore be recorded first; if the starter dies
  before that, the shell reads end-of-file and ends, and no job runs without a record.
* It survives a signal to the job's group until the job itself has ended, and then writes the exit status into a
  status file. If the dispatcher is killed, its successor reads it there.
* It holds the leases' file descriptors (and so does the job): the kernel's locks on the GPUs live exactly as long as
  they do, no longer and no shorter than the work. It may have inherited the open lock file before it is locked: the
  lock belongs to the open file, and so to all who have it.

The job's words reach the shell only as "$@" and are never parsed by it. GPUs are renumbered here and nowhere else:
``gpus.visible`` says which variables of the job's own environment show it its GPUs. What to run and when is decided
elsewhere.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.engines import progress
from gpuherd.engines.process_tree import (
    ATTEMPT_VARIABLE,
    Lock,
    ProcessId,
    Seen,
    Traces,
    identify,
    locks_held,
    path_of,
    send,
    until_none,
)
from gpuherd.errors import GpuherdError
from gpuherd.gpus.visible import ORDER, PCI_ORDER, VARIABLES, chosen_in, without
from gpuherd.gpus.visible import environment as visible_environment

if TYPE_CHECKING:  # a leader on a node imports this, and is to begin at once
    from gpuherd.gpus.state import Gpu

# $1 is the status file, the rest is the job's argv. Many attempts write into one status file, a line at a time: each
# echo is one short write at the file's end, so that a kill leaves the line whole or absent and two never mix. (A file
# each, removed after each end, would cost more than all else here: ext4 does not use an inode again within 5 s, and
# walks past all such at every new file.) The empty line before it ends what a full disk may have left of another's.
# No sync: after a power cut the attempt is void anyhow. A status file that can't be written means that the job is not
# run: 75, "never started". The second number is the machine's time since boot, to know how long it ran. That of the
# start comes with the go-ahead, and so do the GPUs: a shell may be started before it is known which they will be.
# The traps let the shell outlive a signal to the group; the job gets the default actions back. The names are long
# because a variable that the job's environment has by the same name would be changed for the job too.
_SHELL = "/bin/sh"
_SCRIPT = f"""\
gpuherd_status=$1
shift
read -r gpuherd_up gpuherd_gpus || exit 75
if [ -n "$gpuherd_gpus" ]; then
unset {" ".join(VARIABLES)}
export $gpuherd_gpus
fi
exec </dev/null
echo "
$GPUHERD_ATTEMPT started $gpuherd_up" >>"$gpuherd_status" || exit 75
trap : HUP INT QUIT TERM USR1 USR2 ALRM
"$@"
gpuherd_code=$?
read -r gpuherd_up gpuherd_rest </proc/uptime
echo "
$GPUHERD_ATTEMPT exit $gpuherd_code $gpuherd_up" >>"$gpuherd_status"
exit "$gpuherd_code"
"""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_HIGHEST_SIGNAL = 64
_MAY_PASS = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT})


class CannotStart(GpuherdError):
    """The command could not be started: no such program or folder, too long an argument list.

    ``may_pass``: the machine was short of processes, files or memory, which may be over in a moment.
    """

    def __init__(self, message: str, *, may_pass: bool = False):
        super().__init__(message)
        self.may_pass = may_pass


@dataclass(frozen=True, slots=True)
class Exit:
    """How a job's main process ended.

    Attributes:
        started: False when the go-ahead never reached it: the job has not run at all.
        code: exit code, None when a signal ended it or when it could not be recorded.
        signal: number of the signal that ended it, else None.
        ran_s: how long it ran, by the status file; None where that does not say, as for one that we waited for.
    """

    started: bool
    code: int | None = None
    signal: int | None = None
    ran_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """All that is needed to start one attempt.

    Attributes:
        tag: ``<queue id>/<attempt id>``, carried in the environment by everything that the job starts.
        argv: the command; its first word is looked up in PATH as a shell would.
        env: variables that the job adds to ours.
        cwd: working folder, None for ours.
        log: file that gets the output, appended to.
        status: file that the shell adds the exit status to; its folder exists. Attempts may share it.
        progress: file for the job's reports of its progress.
        gpus: the GPUs that the job sees, in this order; () hides all of them.
        lease_fds: open lease files that the job's processes keep open.
        ahead_fds: open files that may become its leases before it gets its go-ahead (``LocalProcess.assign``).
        inherits_gpus: an engine has chosen the GPUs: the job sees those that the inherited environment names, or all
            where that names none; ``gpus`` is ().
        threads: CPU threads that this job may use, set for the numeric libraries unless the user has set them.
    """

    tag: str
    argv: Sequence[str]
    log: Path
    status: Path
    progress: Path
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    gpus: tuple[Gpu, ...] = ()
    lease_fds: tuple[int, ...] = ()
    ahead_fds: tuple[int, ...] = ()
    inherits_gpus: bool = False
    threads: int | None = None


class LocalProcess:
    """A job's main process: started by us and waiting for ``go``, or taken over from a dispatcher that has died.

    Attributes:
        identity: the process.
        traces: how all processes of the attempt are recognised, also after its end.
        pidfd: becomes readable when the process has ended; then ``collect`` returns how.
    """

    def __init__(
        self,
        traces: Traces,
        status: Path,
        child: subprocess.Popen[bytes] | None,
        go_fd: int | None,
    ):
        self.identity = traces.leader
        self.traces = traces
        self.pidfd = os.pidfd_open(traces.leader.pid)
        self._status = status
        self._child = child
        self._go_fd = go_fd
        self._gpus = ""
        self._went = child is None

    def assign(self, gpus: Sequence[Gpu], lease_fds: Sequence[int]) -> None:
        """Other GPUs for a process that still waits for ``go``, with leases that it was given when it was started."""
        self._gpus = " ".join(f"{name}={value}" for name, value in visible_environment(gpus).items())
        self.traces = replace(self.traces, locks=_locks(lease_fds))

    def waits_for_go(self) -> bool:
        """Whether the process is there and waits."""
        look = select.poll()
        look.register(self.pidfd, select.POLLIN)
        return self._go_fd is not None and not look.poll(0)

    def go(self) -> None:
        """Lets the job run. It must be recorded before."""
        if self._go_fd is not None:
            # A shell that was killed meanwhile leaves a broken pipe; its end is noticed through the pidfd.
            with suppress(BrokenPipeError):
                since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
                os.write(self._go_fd, f"{since_boot_s:.2f} {self._gpus}\n".encode())
                self._went = True
            os.close(self._go_fd)
            self._go_fd = None

    def signal(self, number: int) -> None:
        """Sends a signal to the job's process group. After ``collect`` it does nothing."""
        if self._is_there():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.identity.pid, number)

    def terminate(self) -> None:
        """SIGTERM to every process of the attempt, also to those that have left its group; what was paused goes on, or
        it could not obey."""
        if self._is_there():
            self.signal(signal.SIGTERM)
            for process in self.traces.members():
                if process.group != self.identity.pid:
                    send(process.process, signal.SIGTERM)
                send(process.process, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to every process of the attempt, again and again while it forks."""
        self._signal_all(signal.SIGKILL, self.traces.members)

    def pause(self) -> None:
        """Stops every process of the attempt where it is (SIGSTOP), until ``resume``."""
        self._signal_all(signal.SIGSTOP, lambda: [process for process in self.traces.members() if not process.held])

    def resume(self) -> None:
        """Lets every process of the attempt go on, also those that have yet to hear that they are to stop."""
        if self._is_there():
            for process in self.traces.members():
                send(process.process, signal.SIGCONT)

    def _signal_all(self, number: int, find: Callable[[], Sequence[Seen]]) -> None:
        """To the group first, in one instant: a shell must not go on when what it waits for has been ended."""
        if self._is_there():
            self.signal(number)
            until_none(find, number)

    def collect(self) -> Exit:
        """How it ended. To be called once, when ``pidfd`` is readable. What is left of its group gets SIGTERM."""
        if self._child is None:
            ended = read_exit(self._status, self.traces.tag)
        else:
            self.signal(signal.SIGTERM)
            code = self._child.wait()
            ended = _exit_of(code) if self._went else Exit(started=False)
        self.release()
        return ended

    def release(self) -> None:
        """Closes our descriptors. A job still waiting for its go-ahead ends without having run."""
        for descriptor in (self._go_fd, self.pidfd):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._go_fd, self.pidfd = None, -1
        if self._child is not None and not self._went:
            self._child.wait()

    def abandon(self) -> None:
        """Ends a process that still waits for its go-ahead, whatever state it is in: no job has run."""
        if self._child is not None and not self._went:
            self._child.kill()
        self.release()

    def _is_there(self) -> bool:
        # A child that we have not waited for keeps its pid, and with it the group's number, from being used again.
        return self.pidfd >= 0 and (self._child is not None or self.identity.is_alive())


def start(launch: Launch, inherited: Mapping[str, str]) -> LocalProcess:
    """Starts the attempt's shell, which waits for ``go`` on the returned process. Raises CannotStart.

    ``inherited`` is the environment that the job's own comes on top of, usually ``os.environ``.
    """
    environment = job_environment(inherited, launch)
    program = _find(launch.argv[0], environment.get("PATH", os.defpath), launch.cwd)
    words = [_SHELL, "-c", _SCRIPT, "gpuherd-job", str(launch.status), program, *launch.argv[1:]]
    read_end, write_end = os.pipe()
    try:
        child = _spawn(words, launch, environment, read_end)
    except (OSError, ValueError) as problem:
        os.close(write_end)
        may_pass = isinstance(problem, OSError) and problem.errno in _MAY_PASS
        raise CannotStart(f"can't start {launch.argv[0]!r}: {_reason(problem)}", may_pass=may_pass) from problem
    finally:
        os.close(read_end)
    try:
        identity = identify(child.pid)
        if identity is None:
            raise CannotStart(f"can't find process {child.pid} in /proc, where gpuherd needs to see its jobs")
        traces = Traces(launch.tag, identity, _locks(launch.lease_fds))
        return LocalProcess(traces, launch.status, child, write_end)
    except BaseException:
        # As for want of descriptors: the shell must not wait for a go-ahead that never comes, and hold the leases.
        os.close(write_end)
        child.wait()
        raise


def _locks(descriptors: Sequence[int]) -> frozenset[Lock]:
    return frozenset(Lock(path_of(descriptor), os.getpid()) for descriptor in descriptors)


def _reason(problem: OSError | ValueError) -> str:
    """Why it could not be started; the shell that waits for the go-ahead is our own business."""
    if not isinstance(problem, OSError) or problem.strerror is None:
        return str(problem)
    about = problem.filename
    return problem.strerror if about in (None, _SHELL) else f"{problem.strerror}: {about!r}"


def _spawn(words: list[str], launch: Launch, environment: Mapping[str, str], stdin: int) -> subprocess.Popen[bytes]:
    log = os.open(launch.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # No preexec_fn: subprocess can then use vfork, which stays cheap however much memory our caller holds.
        return subprocess.Popen(
            words,
            stdin=stdin,
            stdout=log,
            stderr=log,
            cwd=launch.cwd,
            env=environment,
            pass_fds=(*launch.lease_fds, *launch.ahead_fds),
            start_new_session=True,
        )
    finally:
        os.close(log)


def adopt(identity: ProcessId, status: Path, tag: str) -> LocalProcess | None:
    """Takes over a process that an earlier dispatcher started; None when that process is no more."""
    traces = Traces(tag, identity, locks_held(identity.pid))
    try:
        process = LocalProcess(traces, status, None, None)
    except ProcessLookupError:
        return None
    # Only now, with the pidfd in hand, is it sure that the pid can't change hands between this look and the next use.
    if not identity.is_alive():
        process.release()
        return None
    return process


def read_exit(status: Path, tag: str) -> Exit:
    """How the attempt with this tag ended, from a status file: the way to know it when its starter has died."""
    try:
        text = status.read_text(encoding="ascii", errors="replace")
    except OSError:
        return Exit(started=False)
    began, started = None, False
    for line in text.splitlines(keepends=True):
        words = line.split()
        if words[:1] != [tag] or not line.endswith("\n"):
            continue
        if words[1:2] == ["started"]:
            began, started = _seconds(words[2:3]), True
        elif words[1:2] == ["exit"] and words[2:3] and words[2].isdigit():
            ended = _seconds(words[3:4])
            ran_s = None if began is None or ended is None else max(0.0, ended - began)
            return replace(_exit_of(int(words[2])), ran_s=ran_s)
    return Exit(started=started)


def _seconds(words: list[str]) -> float | None:
    try:
        return float(words[0]) if words else None
    except ValueError:
        return None


def job_environment(inherited: Mapping[str, str], launch: Launch) -> dict[str, str]:
    """The job's environment: ours, its own additions, and what only gpuherd decides: GPUs, tag and progress file."""
    environment = {**inherited, **launch.env}
    if launch.threads is not None and not any(name in environment for name in THREAD_VARIABLES):
        # Each library would otherwise start a thread a core in every job at once.
        environment |= dict.fromkeys(THREAD_VARIABLES, str(launch.threads))
    shown = {ORDER: PCI_ORDER, **chosen_in(inherited)} if launch.inherits_gpus else visible_environment(launch.gpus)
    environment = without(environment) | shown
    environment |= {ATTEMPT_VARIABLE: launch.tag, progress.VARIABLE: str(launch.progress)}
    return environment


def _find(program: str, path: str, cwd: str | None) -> str:
    """The program as a path with a slash in it, which a shell can't take for one of its own commands (exit, eval)."""
    if "/" in program:
        if not Path(cwd or ".", program).exists():
            raise CannotStart(f"no such program: {program!r}" + (f" (seen from {cwd})" if cwd else ""))
        return program
    found = _which(program, path)
    if found is None:
        raise CannotStart(f"no such program: {program!r} is in no folder of PATH")
    return found


@lru_cache(maxsize=64)
def _which(program: str, path: str) -> str | None:
    import shutil  # here: a leader on a node is to begin at once, and most commands say where their program is

    found = shutil.which(program, path=path)
    return None if found is None else str(Path(found).absolute())


def _exit_of(code: int) -> Exit:
    """From Popen's code (−9: the shell itself was killed) or the shell's (137: its child was)."""
    if code < 0:
        return Exit(started=True, signal=-code)
    if 128 < code <= 128 + _HIGHEST_SIGNAL:
        return Exit(started=True, signal=code - 128)
    return Exit(started=True, code=code)
