"""``gpuherd run`` beyond this machine: a program of the engine replaces this process (SLURM's srun), or the command is
one job that is submitted and whose log is followed here.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gpuherd.batch.options import RunOptions
from gpuherd.batch.run import NoGpuFree, replace_process
from gpuherd.batch.user_queue import folder, open_folder
from gpuherd.engines.base import CommandRequest, EngineMissing, Placement, Replacement
from gpuherd.engines.options import engine_values
from gpuherd.errors import CannotWrite, ExitCode, GpuherdError, JobCannotFit, UsageError
from gpuherd.jobs import clock
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.records import Event, EventKind, Outcome
from gpuherd.jobs.run_dir import RunDirectory

_LOOK_S = 0.1
# A pipe with any room takes this much at once.
_BLOCK = select.PIPE_BUF
_MOST_AT_ONCE = 1 << 20
_NAME = "command"
_ENDS = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}
# A shell's exit code for a command whose reader has gone.
_UNREAD = 128 + signal.SIGPIPE


def placement_of(options: RunOptions) -> Placement:
    """The resources that the command requests from the engine."""
    return Placement(
        gpus=options.gpus,
        nodes=options.nodes or 1,
        tasks=options.spec.tasks(options),
        cpus=options.cpus,
        memory_mb=options.host_mem,
        time_s=options.time_limit,
    )


def why_never(options: RunOptions) -> str | None:
    """Why the cluster can never grant it, None where it can. Raises what its engine's ``check`` raises."""
    from gpuherd.jobs.remote.dispatcher import opened

    wanted = placement_of(options)
    with opened(options) as engine:
        return None if engine is None else engine.check([wanted]).get(wanted)


def refuse_if_never(options: RunOptions) -> None:
    """Raises JobCannotFit for what the cluster can never grant, and what its engine's ``check`` raises."""
    reason = why_never(options)
    if reason is not None:
        raise JobCannotFit(f"the command can never run there: {reason}")


# --- a program of the engine in our place -----------------------------------------------------------------------------


def replacement(options: RunOptions, argv: Sequence[str], tell: Callable[[str], None]) -> Replacement | None:
    """The engine's program that runs the command; None where the command becomes a job that is followed. Raises as
    ``Foreground.replacement``."""
    command = CommandRequest(
        argv=tuple(argv),
        placement=placement_of(options),
        name=options.name or "gpuherd-run",
        wait_s=0.0 if options.no_wait else options.wait,
        tell=tell,
    )
    foreground = options.spec.foreground()
    return None if foreground is None else foreground.replacement(command, options)


def become(found: Replacement, inherited: Sequence[int]) -> NoReturn:
    """Replaces this process by the engine's program. ``inherited``: the descriptors that we inherited.

    Raises EngineMissing, CannotBecome.
    """
    program = shutil.which(found.argv[0])
    if program is None:
        raise EngineMissing(f"{found.argv[0]} is not here; it comes with the cluster's own programs")
    replace_process(program, found.argv, found.environment, inherited)
    raise AssertionError("unreachable")


# --- one job that is followed -----------------------------------------------------------------------------------------


def follow(options: RunOptions, argv: Sequence[str], tell: Callable[[str], None]) -> int:
    """Runs the command as a job of the cluster, copies its output to standard output, and returns its exit code.

    Ctrl-C and SIGTERM end the job; the exit code is then 130 or 143. So does a reader of its output that has gone
    (``… | head``); the exit code is then 141, as of a local command. A second signal ends this process at once, whether
    the engine answers or not. The job's files are removed afterwards.

    Raises NoGpuFree when it has not begun in time, and as ``run_jobs``.
    """
    if options.no_wait:
        raise UsageError(f"--no-wait: {options.engine} does not tell what is free at once; say --wait TIME")
    with _place(options) as run, _stopping(lambda number: _leave(run, options, number, tell)) as heard, _own_words():
        return _Follower(options, run, tell, heard).follow(argv)


class _Follower:
    """Follows one job. ``heard``: the signals that have arrived."""

    def __init__(
        self, options: RunOptions, run: RunDirectory, tell: Callable[[str], None], heard: Sequence[signal.Signals]
    ):
        self._options = options
        self._run = run
        self._tell = tell
        self._heard = heard
        self._log: Path | None = None  # where the job writes; None until it has begun
        self._copied: tuple[Path | None, int] = None, 0  # how much of which file is copied
        self._asked_to_end: signal.Signals | None = None  # the first signal that arrived while the job ran
        self._gave_up = False  # it has not begun in time
        self._unwritable: OSError | None = None  # why standard output takes nothing more

    def follow(self, argv: Sequence[str]) -> int:
        """As the function ``follow``."""
        from gpuherd.jobs.run import run_jobs

        options = self._options
        job = Job(
            name=_NAME,
            title=options.name,
            argv=tuple(argv),
            gpus=options.gpus,
            nodes=options.nodes or 1,
            cpus=options.cpus,
            host_memory_mb=options.host_mem,
            retries=0,
            cwd=os.getcwd(),  # noqa: PTH109 - as text, whatever it is
        )
        # Not in this thread: there signals would have the meaning that they have for a run of many jobs.
        with ThreadPoolExecutor(1) as pool:
            dispatch = DispatchOptions(**engine_values(options))
            running = pool.submit(run_jobs, [job], dispatch, self._run, on_event=self._hear)
            self._watch(running)
        return self._end(running.result())

    def _hear(self, event: Event) -> None:
        if event.kind is EventKind.STARTED and event.log is not None:
            self._log = Path(event.log)
        if event.kind in (EventKind.HANDED, EventKind.STARTED, EventKind.REQUEUED, EventKind.NOTICE):
            self._tell(event.text)

    def _watch(self, running: Future[Outcome]) -> None:
        """Until the job is over: copies its output; ends it on a signal, when it has not begun in time, or when its
        output has no reader any more."""
        began, cancelled, wait_s = clock.mono(), False, self._options.wait
        while True:
            over, more = running.done(), False
            if self._log is not None and self._unwritable is None:
                try:
                    more = self._copy(self._log)
                except OSError as problem:
                    self._unwritable = problem
            if over and (not more or self._heard):
                return
            self._asked_to_end = self._heard[0] if self._heard else None
            self._gave_up |= wait_s is not None and self._log is None and clock.mono() - began > wait_s
            if not cancelled and (why := self._ending()) is not None:
                self._tell(why)
                cancelled = _cancel(self._run)
            if not more:
                wait([running], _LOOK_S)

    def _ending(self) -> str | None:
        """Why the job has to end now; None while it goes on."""
        if self._asked_to_end is not None:
            return "ending it"
        if self._unwritable is not None:
            return f"ending it: its output can't be written ({self._unwritable.strerror})"
        return "it has not begun in time; it is taken back" if self._gave_up else None

    def _copy(self, log: Path) -> bool:
        """Copies what is new of the log to standard output, as much as its reader takes in a moment, so that signals
        are noticed in between. Returns whether there is more. Raises OSError."""
        path, position = self._copied
        if path != log:
            position = 0
        output, until = sys.stdout.fileno(), position + _MOST_AT_ONCE
        try:
            file = os.open(log, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            while block := os.pread(file, _BLOCK, position):
                if position >= until or not select.select([], [output], [], _LOOK_S)[1]:
                    return True
                with suppress(BlockingIOError):
                    position += os.write(output, block)
            return False
        finally:
            os.close(file)
            self._copied = log, position

    def _end(self, outcome: Outcome) -> int:
        if self._asked_to_end is not None:
            return _ENDS[self._asked_to_end]
        if isinstance(self._unwritable, BrokenPipeError):
            return _UNREAD
        if self._unwritable is not None:
            raise self._unwritable
        if self._gave_up:
            raise NoGpuFree(f"the command has not begun in {self._options.wait:g} s")
        code = _code(self._run)
        if outcome.failures and code in (None, 0):
            raise GpuherdError(outcome.failures[0].reason)
        return ExitCode.FAILED if code is None else code


def _cancel(run: RunDirectory) -> bool:
    """Requests the job's end. False where there is no queue yet."""
    from gpuherd.jobs.control.client import send
    from gpuherd.jobs.control.messages import ControlKind, Request

    try:
        send(run, Request(ControlKind.CANCEL, (_NAME,)))
    except GpuherdError:
        return False
    return True


def _code(run: RunDirectory) -> int | None:
    """The exit code of the last attempt as in shells; None where it is not known."""
    from gpuherd.jobs.queue.reader import QueueReader

    with closing(QueueReader(run.queue)) as reader:
        row = reader.one("SELECT exit_code, signal FROM attempts ORDER BY id DESC LIMIT 1")
    if row is None:
        return None
    return int(row["exit_code"]) if row["signal"] is None else 128 + int(row["signal"])


@contextmanager
def _place(options: RunOptions) -> Iterator[RunDirectory]:
    """A run folder for this command alone, next to the user's own queue: all nodes must see it."""
    base = folder(options.engine).parent
    try:
        base.mkdir(parents=True, exist_ok=True)
        place = tempfile.mkdtemp(prefix=f"run-{socket.gethostname()}-", dir=base)
    except OSError as problem:
        raise CannotWrite(f"can't make a folder in {base}: {problem.strerror}") from None
    try:
        yield open_folder(Path(place))
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _own_words() -> Iterator[None]:
    """Keeps the log of runs from the terminal: the user gets the events, and the folder is removed afterwards."""
    logger = logging.getLogger("gpuherd.jobs")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _leave(run: RunDirectory, options: RunOptions, number: signal.Signals, tell: Callable[[str], None]) -> NoReturn:
    """Ends this process whatever its threads wait for. Without its folder a job that has not begun never begins."""
    with suppress(Exception):
        tell(f"leaving at once; if {options.engine} does not answer, the job may still run there")
    shutil.rmtree(run.root, ignore_errors=True)
    os._exit(_ENDS[number])


@contextmanager
def _stopping(leave: Callable[[signal.Signals], NoReturn]) -> Iterator[Sequence[signal.Signals]]:
    """Handles Ctrl-C and SIGTERM; gives those that arrived. The second one calls ``leave`` in the signal's handler: the
    main thread may be waiting for an answer. A signal that is ignored stays so."""
    heard: list[signal.Signals] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        heard.append(signal.Signals(number))
        if len(heard) > 1:
            leave(heard[-1])

    before = {number: signal.getsignal(number) for number in _ENDS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, hear)
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
