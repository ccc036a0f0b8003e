"""``gpuherd run`` beyond this machine: SLURM's srun takes our place, or the command is one job that is handed over and
whose log is followed here.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gpuherd.batch.foreground import NoGpuFree, RunOptions, replace_process
from gpuherd.batch.own_queue import folder, open_folder
from gpuherd.engines.cluster import EngineMissing, Placement
from gpuherd.engines.options import ClusterOptions
from gpuherd.errors import CannotWrite, ExitCode, GpuherdError, JobCannotFit, UsageError
from gpuherd.jobs import clock
from gpuherd.jobs.events import Event, EventKind
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.outcome import Outcome
from gpuherd.jobs.rundir import RunDirectory

_LOOK_S = 0.1
_BLOCK = 1 << 16
_NAME = "command"
_ENDS = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


def asked(options: RunOptions) -> Placement:
    """What the command asks of the cluster."""
    return Placement(
        gpus=options.gpus,
        nodes=options.nodes or 1,
        cpus=options.cpus,
        memory_mb=options.host_mem,
        time_s=options.time_limit,
    )


def why_never(options: RunOptions) -> str | None:
    """Why the cluster can never give what is asked, None where it can. Raises what its engine's ``check`` raises."""
    from gpuherd.jobs.handover.opening import opened

    wanted = asked(options)
    with opened(options.engine_options()) as engine:
        return None if engine is None else engine.check([wanted]).get(wanted)


def refuse_if_never(options: RunOptions) -> None:
    """Raises JobCannotFit for what the cluster can never give, and what its engine's ``check`` raises."""
    reason = why_never(options)
    if reason is not None:
        raise JobCannotFit(f"the command can never run there: {reason}")


# --- SLURM ------------------------------------------------------------------------------------------------------------


def srun_words(options: RunOptions, argv: Sequence[str]) -> list[str]:
    """The srun that runs the command. Raises UsageError."""
    from gpuherd.engines.slurm.foreground import srun

    return srun(
        argv,
        asked(options),
        options.engine_options(),
        name=options.name or "gpuherd-run",
        wait_s=0.0 if options.no_wait else options.wait,
        terminal=(options.nodes or 1) == 1 and os.isatty(0) and os.isatty(1),
    )


def become_srun(options: RunOptions, argv: Sequence[str], inherited: Sequence[int]) -> NoReturn:
    """Replaces this process by srun with the command. ``inherited``: the descriptors that we were given.

    Raises as ``refuse_if_never``, and CannotBecome.
    """
    from gpuherd.engines.slurm.foreground import environment

    words = srun_words(options, argv)
    program = shutil.which("srun")
    if program is None:
        raise EngineMissing("srun is not here; it comes with SLURM's own programs, as sbatch does")
    refuse_if_never(options)
    replace_process(program, words, environment(os.environ, asked(options)), inherited)
    raise AssertionError("unreachable")


# --- one job that is followed -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Followed:
    """What is known of the job so far. ``log`` is set when it has begun."""

    log: Path | None = None
    outcome: Outcome | None = None
    problem: BaseException | None = None
    asked_to_end: signal.Signals | None = None
    gave_up: bool = False


def follow(options: RunOptions, argv: Sequence[str], tell: Callable[[str], None]) -> int:
    """Runs the command as a job of the cluster, writes to standard output what it writes, and returns its exit code.

    Ctrl-C and SIGTERM end the job; the exit code is then 130 or 143. Its files are gone afterwards.

    Raises NoGpuFree when it has not begun in the time that was given, and what ``run_jobs`` raises.
    """
    if options.no_wait:
        raise UsageError(f"--no-wait: {options.engine} does not tell what is free at once; say --wait TIME")
    with _place(options) as run, _stopping() as stop, _own_words():
        state = _Followed()

        def hear(event: Event) -> None:
            if event.kind is EventKind.STARTED and event.log is not None:
                state.log = Path(event.log)
            if event.kind in (EventKind.HANDED, EventKind.STARTED, EventKind.REQUEUED, EventKind.NOTICE):
                tell(event.text)

        # Not in this thread: there signals would mean what they mean to a run of many jobs.
        thread = threading.Thread(target=_work, args=(options, tuple(argv), run, state, hear))
        thread.start()
        try:
            _watch(thread, run, state, stop, options.wait, tell)
        finally:
            thread.join()
        return _end(run, state, options)


def _work(
    options: RunOptions, argv: tuple[str, ...], run: RunDirectory, state: _Followed, hear: Callable[[Event], None]
) -> None:
    from gpuherd.jobs.run import run_jobs

    job = Job(
        name=_NAME,
        title=options.name,
        argv=argv,
        gpus=options.gpus,
        nodes=options.nodes or 1,
        cpus=options.cpus,
        host_memory_mb=options.host_mem,
        retries=0,
        cwd=os.getcwd(),  # noqa: PTH109 - as text, whatever it is
    )
    engine = {each.name: getattr(options, each.name) for each in fields(ClusterOptions)}
    try:
        state.outcome = run_jobs([job], DispatchOptions(**engine), run, on_event=hear)
    except BaseException as problem:
        state.problem = problem


def _watch(
    thread: threading.Thread,
    run: RunDirectory,
    state: _Followed,
    stop: Callable[[], signal.Signals | None],
    wait_s: float | None,
    tell: Callable[[str], None],
) -> None:
    """Until the job is over: hands its output on; ends it when we are asked to, or when it has not begun in time."""
    began, cancelled = clock.mono(), False
    position, path = 0, None
    while True:
        over = not thread.is_alive()
        if state.log != path:
            path, position = state.log, 0
        if path is not None:
            position = _hand_on(path, position)
        if over:
            return
        state.asked_to_end = stop() or state.asked_to_end
        late = wait_s is not None and path is None and clock.mono() - began > wait_s
        if not cancelled and (state.asked_to_end is not None or late):
            state.gave_up = state.asked_to_end is None
            tell("ending it" if not state.gave_up else "it has not begun in time; it is taken back")
            cancelled = _cancel(run)
        thread.join(_LOOK_S)


def _cancel(run: RunDirectory) -> bool:
    """Whether the wish is written down; not yet where there is no queue yet."""
    from gpuherd.jobs.control import send
    from gpuherd.jobs.wishes import Control, ControlKind

    try:
        send(run, Control(ControlKind.CANCEL, (_NAME,)))
    except GpuherdError:
        return False
    return True


def _hand_on(path: Path, position: int) -> int:
    """Writes to standard output what the file has behind this position; returns where it ends."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(position)
        while block := file.read(_BLOCK):
            sys.stdout.buffer.write(block)
            position += len(block)
        sys.stdout.buffer.flush()
    return position


def _end(run: RunDirectory, state: _Followed, options: RunOptions) -> int:
    if state.problem is not None:
        raise state.problem
    if state.asked_to_end is not None:
        return _ENDS[state.asked_to_end]
    if state.gave_up:
        raise NoGpuFree(f"the command has not begun in {options.wait:g} s")
    outcome = state.outcome
    code = _code(run)
    if outcome is not None and outcome.failures and code in (None, 0):
        raise GpuherdError(outcome.failures[0].reason)
    return ExitCode.FAILED if code is None else code


def _code(run: RunDirectory) -> int | None:
    """The exit code of the last attempt, as a shell says it; None where it is not known."""
    from gpuherd.jobs.reader import QueueReader

    with closing(QueueReader(run.queue)) as reader:
        row = reader.one("SELECT exit_code, signal FROM attempts ORDER BY id DESC LIMIT 1")
    if row is None:
        return None
    return int(row["exit_code"]) if row["signal"] is None else 128 + int(row["signal"])


@contextmanager
def _place(options: RunOptions) -> Iterator[RunDirectory]:
    """A run folder for this command alone, beside the user's own queue: all nodes must see it."""
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
    """Keeps the log of runs from the terminal: what concerns the user is told, and the folder is gone afterwards."""
    logger = logging.getLogger("gpuherd.jobs")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _stopping() -> Iterator[Callable[[], signal.Signals | None]]:
    """Listens to Ctrl-C and SIGTERM; the function tells of the first that came. One that is ignored stays so."""
    heard: list[signal.Signals] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        heard.append(signal.Signals(number))

    before = {number: signal.getsignal(number) for number in _ENDS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, hear)
    try:
        yield lambda: heard[0] if heard else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
