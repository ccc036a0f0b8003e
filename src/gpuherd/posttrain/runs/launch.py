"""The processes of one training: the command that starts them, their environment, their exit code, requests to stop.

``python -m gpuherd.posttrain.runs.launch`` is torchrun with one difference: torchrun ends by 1 whatever its processes
end by, and here the exit code is that of the process that failed, so that whoever started it learns whether another try
can help.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gpuherd.engines import progress
from gpuherd.engines.process_tree import ATTEMPT_VARIABLE, identify
from gpuherd.errors import CannotWrite, ExitCode, GpuherdError, printable
from gpuherd.gpus.state import Gpu
from gpuherd.gpus.visible import environment as visible_environment
from gpuherd.gpus.visible import without
from gpuherd.posttrain.engine.dist_env import leave
from gpuherd.runs.worker import unbuffered

if TYPE_CHECKING:
    from rich.console import Console

MODULE = "gpuherd.posttrain.runs.launch"
STARTER = "GPUHERD_TRAIN_STARTER"  # pid of the gpuherd train that waits for us
ALONE = ("--standalone",)  # one machine: a free port is found
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
# The leader of a job says how long a checkpoint may take, and not torchrun: so many seconds are never over.
_SHUTDOWN = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
_PDEATHSIG = 1  # linux/prctl.h
_LOOK_S = 0.2
_SHOW_AFTER_S = 2.0
_GRACE_S = 10.0  # between SIGTERM and SIGKILL, for processes that were asked twice


def command(module: str, words: Sequence[str], processes: int, rendezvous: Sequence[str] | None = ALONE) -> list[str]:
    """The command that runs a module in so many processes of this machine.

    Args:
        rendezvous: torchrun's options for finding the processes of other machines; () where the environment has them;
            None for one process alone, which needs no torchrun.
    """
    if rendezvous is None:
        return [sys.executable, "-m", module, *words]
    return [sys.executable, "-m", MODULE, *_options(module, words, processes, rendezvous)]


def _options(module: str, words: Sequence[str], processes: int, rendezvous: Sequence[str]) -> list[str]:
    return [f"--nproc-per-node={processes}", *rendezvous, "-m", module, *words]


def launch(module: str, words: Sequence[str], processes: int) -> int:
    """Runs a module in so many processes of this machine, and waits for them. Returns their exit code.

    Each of them is to call ``end_with_launcher``. Asked to end, they may take as long for a checkpoint as whoever asked
    lets them.
    """
    os.environ[STARTER] = str(os.getpid())
    os.environ.setdefault(*_SHUTDOWN)
    if sys.flags.safe_path:  # python -P, which torchrun doesn't pass on
        os.environ["PYTHONSAFEPATH"] = "1"
    return torchrun(_options(module, words, processes, ALONE))


def end_with_launcher() -> None:
    """From now on this process is killed when the one that launched it ends, however that ends (Linux alone).

    torchrun gives each process a session of its own: a kill of the launcher's process group would leave them at work in
    a folder where the next attempt begins.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        if str(os.getppid()) != os.environ.get(STARTER):  # it has ended before
            os.kill(os.getpid(), signal.SIGKILL)


def run_process(main: Callable[[], int]) -> NoReturn:
    """Runs the main function of a program that ``command`` or ``launch`` starts, and ends by its exit code."""
    unbuffered()
    try:
        code = main()
    except SystemExit as end:  # of argparse, or where another of the processes says why (``DistEnv.from_main``)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if "RANK" in os.environ:
        leave(code)
    sys.exit(code)


def torchrun(argv: Sequence[str]) -> int:
    """Runs torchrun (``torch.distributed.run``) in this process. Returns the exit code of the process that failed, and
    128 + the signal's number of one that a signal ended, as this process was asked to end by."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    args = parse_args(list(argv))  # type: ignore[no-untyped-call]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it, but with a warning
    # The reason of a failure is the last line of a job's log; torchrun's own report of it would come behind.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        run(args)  # type: ignore[no-untyped-call]
    except ChildFailedError as problem:
        first = problem.get_first_failure()[1]
        # A process that loses the others fails too, perhaps in the same moment, but by 1.
        codes = [first.exitcode, *(each.exitcode for each in problem.failures.values())]
        code = next((each for each in codes if each > 1), codes[0])
        return code if code >= 0 else 128 - code
    except SignalException as problem:
        return 128 + int(problem.sigval)
    return ExitCode.OK


def job_environment() -> dict[str, str]:
    """Variables of a job's processes besides those that the engine sets."""
    return {**_QUIET, **dict([_SHUTDOWN])}


def environment(
    inherited: Mapping[str, str], gpus: Sequence[Gpu] | None, starter: int, processes: int
) -> dict[str, str]:
    """The environment of processes that ``gpuherd train`` starts.

    Args:
        gpus: those that they see, () for none; None: as inherited.
        starter: the pid that waits for them.
        processes: how many, of this machine.
    """
    shown = inherited if gpus is None else without(inherited) | visible_environment(gpus)
    found = {**shown, **_QUIET, STARTER: str(starter)}
    if processes > 1:
        found.setdefault("OMP_NUM_THREADS", "1")
    return found


def port_problem(port: int) -> str | None:
    """Why a port of this machine can't be listened at; None where it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as problem:
            return problem.strerror
    return None


def run_watched(
    argv: Sequence[str], given: Mapping[str, str], stop: Path, descriptors: Sequence[int], console: Console
) -> int:
    """Starts the processes, shows how far they are, and hands signals on, until they have ended.

    They have a session of their own: Ctrl-C comes to us alone, and is passed on as the file ``stop``, which they look
    for after each step (``StopRequest``), so that they end behind a checkpoint. A second one ends them at once. Should
    we be killed, they notice.

    Args:
        given: their environment, with the file of their progress.
        descriptors: open files that they inherit.

    Returns their exit code, or that of the signal by which we were asked to end. Raises CannotWrite.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    try:
        child = subprocess.Popen(
            argv,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output is ours: with --json it is read by programs
            start_new_session=True,
            pass_fds=descriptors,
        )
    except OSError as problem:
        raise CannotWrite(f"can't start {argv[0]}: {problem.strerror}") from None
    heard: list[int] = []
    kill_at: list[float] = []

    def end(number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)

    def take(number: int, _frame: object) -> None:
        heard.append(number)
        if len(heard) == 1:
            with suppress(OSError):
                stop.touch()
            return
        end(signal.SIGTERM)
        kill_at.append(time.monotonic() + _GRACE_S)

    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("starting", total=None)
    shown = False
    try:
        while (code := child.poll()) is None:
            if not shown and time.monotonic() - began > _SHOW_AFTER_S:
                bar.start()
                shown = True
            if (now := progress.read(Path(given[progress.VARIABLE]))) is not None:
                bar.update(task, completed=now.done, total=now.total, description=printable(now.stage or "train"))
            if kill_at and time.monotonic() > kill_at[-1]:
                end(signal.SIGKILL)
            time.sleep(_LOOK_S)
    finally:
        if shown:
            bar.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
        if child.poll() is None:  # an error of ours
            end(signal.SIGKILL)
    if heard and code != ExitCode.OK:
        return ExitCode.INTERRUPTED if heard[0] == signal.SIGINT else ExitCode.TERMINATED
    return code if code >= 0 else 128 - code


class StopRequest:
    """Whether a training is to end: by a signal, by a file in its folder, or because its starter has ended.

    Attributes:
        code: what the process exits with then.
        alone: no process waits for this one: it was started by hand, or by the user's torchrun.
    """

    def __init__(self) -> None:
        self.code = ExitCode.INTERRUPTED
        pid = os.environ.get(STARTER, "")
        self.alone = not pid.isdecimal()
        self._starter = None if self.alone else identify(int(pid))
        self._signalled = False
        self._file: Path | None = None

    @contextmanager
    def listen(self, file: Path | None = None) -> Iterator[None]:
        """From now on, also when the context has ended. A second signal ends the process at once.

        Within it, an error that says INTERRUPTED (``Stopped``) gets the exit code of the signal that came.

        Args:
            file: exists when the training is to end.
        """
        self._file = file
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)
        try:
            yield
        except GpuherdError as problem:
            if problem.exit_code is ExitCode.INTERRUPTED:
                problem.exit_code = self.code
            raise

    def stopping(self) -> bool:
        """Called after each step."""
        if self._file is not None and self._file.exists():
            return True
        gone = self._starter is None or not self._starter.is_alive()
        return self._signalled or (gone and not self.alone)

    def _take(self, number: int, _frame: object) -> None:
        # Requested before, perhaps by the file: of two requests to gpuherd train only the second one comes as a signal.
        # In a job one request comes several times, from whoever leads it, from torchrun and from SLURM; and who
        # requested it ends us when our time is over.
        again = self._signalled or (self._file is not None and self._file.exists())
        again = again and ATTEMPT_VARIABLE not in os.environ
        self._signalled = True
        self.code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED
        if again:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


if __name__ == "__main__":
    sys.exit(torchrun(sys.argv[1:]))
