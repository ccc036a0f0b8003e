"""Starts a job on this machine, follows it, and ends it, so that nothing about it is lost when gpuherd dies.

Between gpuherd and the job stands a shell with one constant script. It does three things that a plain child can't:

* It waits for a go-ahead on a pipe before it runs the job. Whoever starts a job can therefore write down its pid first;
  if the starter dies before that, the shell reads end-of-file and ends, and no job runs that nobody knows of.
* It survives a signal to the job's group until the job itself has ended, and then writes the exit status into the
  attempt's status file. It so survives a dispatcher that was killed; its successor reads it there.
* It holds the leases' file descriptors (and so does the job): the kernel's locks on the GPUs live exactly as long as
  they do, no longer and no shorter than the work.

The job's words reach the shell only as "$@" and are never parsed by it. CUDA's renumbering of GPUs happens here and
nowhere else: CUDA_VISIBLE_DEVICES is set in the job's own environment, together with the order that makes it mean the
PCI index. What to run and when is decided elsewhere.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from gpuherd.engines import progress
from gpuherd.engines.processes import ATTEMPT_VARIABLE, ProcessId, identify
from gpuherd.errors import GpuherdError
from gpuherd.gpus.state import Gpu

# $1 is the status file, the rest is the job's argv. Each echo is one write of a few bytes, so that a kill leaves the
# line whole or absent; a rename (as for results) would cost a process and gain nothing, since after a power cut the
# attempt is void anyhow. A status file that can't be written means that the job is not run: 75, "never started".
# The traps let the shell outlive a signal to the group; the job gets the default actions back.
_SCRIPT = """\
status=$1
shift
read -r go || exit 75
exec </dev/null
echo started >"$status" || exit 75
trap : HUP INT QUIT TERM USR1 USR2 ALRM
"$@"
code=$?
echo "exit $code" >>"$status"
exit "$code"
"""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
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
        code: exit code, None when a signal ended it or when nobody could record it.
        signal: number of the signal that ended it, else None.
    """

    started: bool
    code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """All that is needed to start one attempt.

    Attributes:
        tag: ``<queue id>/<attempt id>``, carried in the environment by everything that the job starts.
        argv: the command; its first word is looked up in PATH as a shell would.
        env: variables that the job adds to ours.
        cwd: working folder, None for ours.
        log: file that gets the output, appended to.
        status: file that the shell writes the exit status to; its folder exists.
        progress: file in which the job may tell how far it is.
        gpus: the GPUs that the job sees, in this order; () hides all of them.
        lease_fds: open lease files that the job's processes keep open.
        threads: CPU threads that this job may use, told to the numeric libraries unless the user told them something.
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
    threads: int | None = None


class LocalProcess:
    """A job's main process: started by us and waiting for ``go``, or taken over from a dispatcher that has died.

    ``pidfd`` becomes readable when the process has ended; then ``collect`` says how.
    """

    def __init__(self, identity: ProcessId, status: Path, child: subprocess.Popen[bytes] | None, go_fd: int | None):
        self.identity = identity
        self.pidfd = os.pidfd_open(identity.pid)
        self._status = status
        self._child = child
        self._go_fd = go_fd
        self._went = child is None

    def go(self) -> None:
        """Lets the job run. What must be known of it has to be written down before."""
        if self._go_fd is not None:
            # A shell that was killed meanwhile leaves a broken pipe; its end is noticed through the pidfd.
            with suppress(BrokenPipeError):
                os.write(self._go_fd, b"go\n")
                self._went = True
            os.close(self._go_fd)
            self._go_fd = None

    def signal(self, number: int) -> None:
        """Sends a signal to the job's process group. After ``collect`` it does nothing."""
        if self.pidfd >= 0 and (self._child is not None or self.identity.is_alive()):
            # A child that we have not waited for keeps its pid, and with it the group's number, from being used again.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.identity.pid, number)

    def collect(self) -> Exit:
        """How it ended. To be called once, when ``pidfd`` is readable. What is left of its group is told to end."""
        if self._child is None:
            ended = read_exit(self._status)
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


def start(launch: Launch, inherited: Mapping[str, str]) -> LocalProcess:
    """Starts the attempt's shell, which waits for ``go`` on the returned process. Raises CannotStart.

    ``inherited`` is the environment that the job's own comes on top of, usually ``os.environ``.
    """
    environment = job_environment(inherited, launch)
    program = _find(launch.argv[0], environment.get("PATH", os.defpath), launch.cwd)
    words = ["/bin/sh", "-c", _SCRIPT, "gpuherd-job", str(launch.status), program, *launch.argv[1:]]
    read_end, write_end = os.pipe()
    try:
        with launch.log.open("ab") as log:
            # No preexec_fn: subprocess can then use vfork, which stays cheap however much memory our caller holds.
            child = subprocess.Popen(
                words,
                stdin=read_end,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=launch.cwd,
                env=environment,
                pass_fds=launch.lease_fds,
                start_new_session=True,
            )
    except (OSError, ValueError) as problem:
        os.close(write_end)
        may_pass = isinstance(problem, OSError) and problem.errno in _MAY_PASS
        raise CannotStart(f"can't start {launch.argv[0]!r}: {problem}", may_pass=may_pass) from problem
    finally:
        os.close(read_end)
    try:
        identity = identify(child.pid)
        if identity is None:
            raise CannotStart(f"can't find process {child.pid} in /proc, where gpuherd needs to see its jobs")
        return LocalProcess(identity, launch.status, child, write_end)
    except BaseException:
        # Out of descriptors, say. The shell must not wait on for a go-ahead that never comes, with the leases in hand.
        os.close(write_end)
        child.wait()
        raise


def adopt(identity: ProcessId, status: Path) -> LocalProcess | None:
    """Takes over a process that an earlier dispatcher started; None when that process is no more."""
    try:
        process = LocalProcess(identity, status, None, None)
    except ProcessLookupError:
        return None
    # Only now, with the pidfd in hand, is it sure that the pid can't change hands between this look and the next use.
    if not identity.is_alive():
        process.release()
        return None
    return process


def read_exit(status: Path) -> Exit:
    """How an attempt ended, from its status file: the way to know it when its starter has died."""
    try:
        text = status.read_text(encoding="ascii", errors="replace")
    except OSError:
        return Exit(started=False)
    for line in text.splitlines(keepends=True):
        word, _, number = line.partition(" ")
        if word == "exit" and number.endswith("\n") and number.strip().isdigit():
            return _exit_of(int(number))
    return Exit(started=text.startswith("started"))


def job_environment(inherited: Mapping[str, str], launch: Launch) -> dict[str, str]:
    """The job's environment: ours, its own additions, and what only gpuherd decides: GPUs, tag and progress file."""
    environment = {**inherited, **launch.env}
    if launch.threads is not None and not any(name in environment for name in _THREAD_VARIABLES):
        # Each library would otherwise start a thread a core in every job at once.
        environment |= dict.fromkeys(_THREAD_VARIABLES, str(launch.threads))
    environment |= {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.cuda_name for gpu in launch.gpus),
        ATTEMPT_VARIABLE: launch.tag,
        progress.VARIABLE: str(launch.progress),
    }
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
    found = shutil.which(program, path=path)
    return None if found is None else str(Path(found).absolute())


def _exit_of(code: int) -> Exit:
    """From Popen's code (−9: the shell itself was killed) or the shell's (137: its child was)."""
    if code < 0:
        return Exit(started=True, signal=-code)
    if 128 < code <= 128 + _HIGHEST_SIGNAL:
        return Exit(started=True, signal=code - 128)
    return Exit(started=True, code=code)
