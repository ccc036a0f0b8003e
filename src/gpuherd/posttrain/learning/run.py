"""``gpuherd train``: checks, takes GPUs, starts the training's processes and waits for them; or submits the training to
a cluster's engine as one job, which may span several nodes, in a queue in its own folder.

The processes have a session of their own: Ctrl-C comes to us alone, and is passed on as a file that they look for after
each step, so that they end behind a checkpoint. A second one ends them at once. Should we be killed, they notice. What
is stopped in a cluster, for want of time or to make room for others, waits again and resumes from its checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gpuherd.batch.run import Taken, Waiter
from gpuherd.engines import progress
from gpuherd.engines.base import Placement
from gpuherd.engines.options import for_this_machine
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import CannotWrite, ExitCode, JobCannotFit, UsageError, printable
from gpuherd.jobs import feasibility
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.job import Job
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.monitor.display import display
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.records import Outcome
from gpuherd.jobs.run import run_jobs
from gpuherd.jobs.settings import NO_SETTINGS, Settings
from gpuherd.lm.backend import beyond_rounding
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.inventory import idle_gpus, node_gpus
from gpuherd.posttrain.learning.folder import TrainDirectory, look_over, prepare, refuse_another
from gpuherd.posttrain.learning.preflight import check_data, check_model, data_lengths, need_of, too_short
from gpuherd.posttrain.learning.settings import TrainSettings, check_port, command, placed, read_settings
from gpuherd.posttrain.rollout.lengths import Texts
from gpuherd.posttrain.runs.launch import environment, job_environment
from gpuherd.posttrain.runs.options import TrainOptions
from gpuherd.posttrain.runs.plan import StepRequest

_LOOK_S = 0.2
_SHOW_AFTER_S = 2.0
_GRACE_S = 10.0  # between SIGTERM and SIGKILL, for those who were asked twice


@dataclass(frozen=True, slots=True)
class Plan:
    """What would run.

    Attributes:
        need: of each GPU; None on a CPU.
        argv: the command.
        source: what is learnt from, and what of the data is not.
        short: a warning where the model has no places for all tokens of an answer.
        engine: what runs it; ``asks`` for what it would ask a cluster, and ``never`` why that can't give it, as far as
            that was looked at.
    """

    settings: TrainSettings
    folder: TrainDirectory
    on_cpu: bool
    need: StepRequest | None
    argv: Sequence[str]
    engine: str = LOCAL
    asks: str | None = None
    never: str | None = None
    source: str = ""
    short: str | None = None

    def lines(self) -> list[str]:
        """For people."""
        told = self.settings
        many = told.processes
        place = "the CPU" if self.on_cpu else f"{told.here} GPU" + ("s" if told.here > 1 else "")
        place += f" of each of {told.machines} machines" if told.machines > 1 else ""
        shared = "" if many == 1 else f", {many} processes by {told.algorithm.strategy}"
        data = told.data_file or (told.policy_env.dataset if told.policy_env is not None else None) or "problems"
        return [
            f"{told.algorithm.name} of {told.base} on {data}",
            *([f"learns from {self.source}"] if self.source else []),
            f"on {place}{shared}, {told.steps(many).micro_batch_size} at once{'' if many == 1 else ' in each'}",
            *([] if self.need is None else [self.need.sentence]),
            *(f"warning: {warning}" for warning in (*told.warnings(), self.short) if warning is not None),
            f"output: {self.folder.root}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "algorithm": self.settings.algorithm.name,
            "model": self.settings.base,
            "folder": str(self.folder.root),
            "processes": self.settings.processes,
            "processes_here": self.settings.here,
            "device": "cpu" if self.on_cpu else "cuda",
            "memory_mb": None if self.need is None else self.need.memory_mb,
            "learns_from": self.source or None,
            "argv": list(self.argv),
            "engine": self.engine,
            "asks": self.asks,
            "never": self.never,
        }


class TrainRun:
    """One ``gpuherd train``.

    Args:
        overrides: settings over the configuration, ``training.batch_size=8``.
        simulate: the GPUs are pretended: it computes on the CPU.
    """

    def __init__(
        self,
        options: TrainOptions,
        overrides: Sequence[str] = (),
        *,
        console: Console | None = None,
        settings: Settings = NO_SETTINGS,
        simulate: bool = False,
    ):
        self.options, self.overrides, self.settings, self.simulate = options, overrides, settings, simulate
        self.console = Console() if console is None else console
        self.plan: Plan | None = None
        self.summary: Mapping[str, Any] | None = None

    def run(self) -> int:
        """Trains, or goes on. Returns the exit code.

        Raises:
            UsageError: settings that are wrong, data that is not there, another training in the folder, a port in use.
            JobCannotFit: it fits on no GPU here, with what would. NoGpuFree, NoSuchGpu.
            MissingModel, BadModel, CannotWrite, QueueBusy.
        """
        told, folder = self._settings()
        self._refuse_other_engine(folder)
        if folder.done.exists() and folder.config.exists() and self.options.resume:
            refuse_another(folder, told)
            self.summary = folder.summary()
            self._print([f"the training in {folder.root} has ended; nothing is left to do"])
            return ExitCode.OK
        told.steps(told.processes)  # raises UsageError where they don't divide a step
        if self._is_inside(told, folder):
            self.options = for_this_machine(self.options)
        if self.options.engine != LOCAL:
            return self._on_a_cluster(told, folder)
        check_port(told)
        check_model(told)
        texts = check_data(told)
        short = too_short(told, texts)
        waiter, need, on_cpu = self._waiter(told, texts)
        plan = self._planned(told, folder, texts, short, need, on_cpu=on_cpu)
        self._print(plan.lines())
        if self.options.dry_run:
            self._print(["nothing was started"])
            return ExitCode.OK
        first = told.where.node_rank == 0  # the folder is the first machine's business
        if first:
            look_over(folder, told, resume=self.options.resume)
            folder.create_root()
            DispatcherLock(folder.train_lock).close()  # raises QueueBusy before GPUs are waited for
        taken = Taken() if waiter is None else waiter.take()
        if first:
            self._begin(told, folder, simulate=self.simulate and not told.on_cpu)
        return self._ended(self._started(plan, taken), folder)

    def _on_a_cluster(self, told: TrainSettings, folder: TrainDirectory) -> int:
        """The same as one job of a cluster's engine, which finds GPUs and starts its machines."""
        options, engine = self.options.dispatch, self.options.engine
        need, unknown = None, None
        check_model(told)
        texts = check_data(told)
        if not told.on_cpu:
            cards, unknown = cards_there(options)
            need = need_of(told, cards, told.processes, data_lengths(told, texts))
        plan = self._planned(told, folder, texts, too_short(told, texts), need, on_cpu=told.on_cpu)
        job = job_of(told, plan.argv, folder)
        self._print([*plan.lines(), *([] if unknown is None else [f"whether it fits isn't known: {unknown}"])])
        if self.options.dry_run:
            asks, never = engine_request(job, options)
            self.plan = replace(plan, asks=asks, never=never)
            reasons = [] if never is None else [f"never: {never}"]
            self._print([f"asks {engine} for {asks}", *reasons, "nothing was started"])
            return ExitCode.OK if never is None else ExitCode.FAILED
        look_over(folder, told, resume=self.options.resume)
        outcome = train_there(job, options, folder, lambda: self._begin(told, folder), self.console)
        ended = "cancelled" if outcome.cancelled else "stopped" if outcome.waiting else None
        return self._ended(code_of(outcome), folder, ended)

    def _planned(
        self,
        told: TrainSettings,
        folder: TrainDirectory,
        texts: Texts | None,
        short: str | None,
        need: StepRequest | None,
        *,
        on_cpu: bool,
    ) -> Plan:
        engine, source = self.options.engine, "" if texts is None else texts.source
        argv = command(told, folder.root, on_cpu=on_cpu, engine=engine)
        self.plan = Plan(told, folder, on_cpu, need, argv, engine, source=source, short=short)
        return self.plan

    def _begin(self, told: TrainSettings, folder: TrainDirectory, *, simulate: bool = False) -> None:
        prepare(folder, told, resume=self.options.resume, simulate=simulate)
        folder.stop.unlink(missing_ok=True)  # of a start before

    def _is_inside(self, told: TrainSettings, folder: TrainDirectory) -> bool:
        """Whether it runs in the engine's job that this is typed in. Raises as ``place_inside``."""
        from gpuherd.jobs.remote.dispatcher import place_inside

        options = self.options
        wanted = Placement(
            gpus=0 if told.on_cpu else told.here,
            nodes=told.machines,
            cpus=options.cpus_per_job,
            memory_mb=options.host_mem,
            time_s=options.time_limit,
        )
        return place_inside(lambda: [wanted], options.dispatch, folder) is not None

    def _refuse_other_engine(self, folder: TrainDirectory) -> None:
        """Raises UsageError where the training is in the hands of another engine than is asked for now."""
        if folder.queue.exists():
            from gpuherd.jobs.queue.store import Queue
            from gpuherd.jobs.remote.dispatcher import refuse_other_engine

            with Queue(folder.queue) as queue:
                refuse_other_engine(queue, folder, self.options.dispatch)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _settings(self) -> tuple[TrainSettings, TrainDirectory]:
        options = self.options
        file = options.config
        if file is None:
            assert options.output is not None  # noqa: S101 - TrainOptions has looked
            file = str(TrainDirectory(options.output).config)
        told = placed(read_settings(file, self.overrides), options.where, options.engine)
        return told, TrainDirectory.of(told, options.output)

    def _waiter(self, told: TrainSettings, texts: Texts | None) -> tuple[Waiter | None, StepRequest | None, bool]:
        """Who takes the GPUs, what is needed of each, and whether it computes on the CPU."""
        here = told.here
        if told.on_cpu:
            return None, None, True
        asked = self.options.run_options(here, told.gpu_ids, None)
        from gpuherd.jobs.gpu.watch import watch_for_plan

        watch = watch_for_plan(asked.gpu_options(), self.settings)
        if watch.problem is not None:
            if here > 1 or told.device == "cuda":
                raise JobCannotFit(
                    f"{here} GPUs are asked for, and here are none ({watch.problem}); train on the CPU by --device cpu"
                )
            self._print([f"no GPUs: {watch.problem}; training on the CPU"])
            return None, None, True
        if len(watch.gpus) < here:
            raise JobCannotFit(f"{here} GPUs are asked for, and this machine has {len(watch.gpus)} for us")
        need = need_of(told, idle_gpus(watch.gpus), told.processes, data_lengths(told, texts))
        wanted = self.options.run_options(here, told.gpu_ids, need.memory_mb)
        return Waiter(wanted, lambda sentence: self._print([sentence]), self.settings), need, self.simulate

    def _started(self, plan: Plan, taken: Taken) -> int:
        """The processes' exit code, or that of the signal by which we were asked to end."""
        gpus = taken.gpus if taken.gpus or plan.on_cpu else None
        told = environment(os.environ, gpus, os.getpid(), plan.settings.here)
        with tempfile.TemporaryDirectory(prefix="gpuherd-train-") as place:
            told.setdefault(progress.VARIABLE, str(Path(place) / "progress"))
            try:
                child = subprocess.Popen(
                    plan.argv,
                    env=told,
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # standard output is ours: with --json it is read by programs
                    start_new_session=True,
                    pass_fds=[lease.fd for lease in taken.leases],
                )
            except OSError as problem:
                raise CannotWrite(f"can't start {plan.argv[0]}: {problem.strerror}") from None
            try:
                return _Watched(child, plan.folder, Path(told[progress.VARIABLE]), self.console).wait()
            finally:
                for lease in taken.leases:
                    lease.close()

    def _ended(self, code: int, folder: TrainDirectory, ended: str | None = None) -> int:
        """Says how it ended. ``ended``: a word for an end that is no failure. Returns the exit code."""
        self.summary = folder.summary()
        if ended is None and code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
            ended = "stopped"
        if code == ExitCode.OK and self.summary is not None:
            # The worker has said how long it took, and where the model is.
            self._print([f"at the end: {last_figures(self.summary.get('last', {}))}"])
        elif ended is not None:
            engine = "" if self.options.engine == LOCAL else f" --engine {self.options.engine}"
            self._print([f"{ended}: gpuherd train --resume --output {folder.root}{engine} goes on from there"])
        else:
            self._print([f"the training has failed (exit code {code}); see {folder.run_log}"])
        return code

    def _print(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


_TOLD = ("loss", "reward", "correct", "kl", "learning_rate")


def last_figures(last: Mapping[str, float]) -> str:
    """A training's last figures, those that are printed when it ends.

    >>> last_figures({"reward": 0.9375, "kl": -4e-08, "updates": 3.0})
    'reward 0.9375, kl 0'
    """
    shown = {name: beyond_rounding(value) if name == "kl" else value for name, value in last.items() if name in _TOLD}
    return ", ".join(f"{name} {value:.4g}" for name, value in shown.items())


class _Watched:
    """The processes at work: shows how far they are, and hands signals on."""

    def __init__(self, child: subprocess.Popen[bytes], folder: TrainDirectory, told: Path, console: Console):
        self._child, self._folder, self._told, self._console = child, folder, told, console
        self._signal: int | None = None
        self._kill_at: float | None = None

    def wait(self) -> int:
        """Until they have ended."""
        before = {number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)}
        began = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        task = bar.add_task("starting", total=None)
        shown = False
        try:
            while (code := self._child.poll()) is None:
                if not shown and time.monotonic() - began > _SHOW_AFTER_S:
                    bar.start()
                    shown = True
                now = progress.read(self._told)
                if now is not None:
                    bar.update(task, completed=now.done, total=now.total, description=printable(now.stage or "train"))
                if self._kill_at is not None and time.monotonic() > self._kill_at:
                    self._end(signal.SIGKILL)
                time.sleep(_LOOK_S)
        finally:
            if shown:
                bar.stop()
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._child.poll() is None:  # an error of ours
                self._end(signal.SIGKILL)
        if self._signal is not None and code != ExitCode.OK:
            return ExitCode.INTERRUPTED if self._signal == signal.SIGINT else ExitCode.TERMINATED
        return code if code >= 0 else 128 - code

    def _take(self, number: int, _frame: object) -> None:
        if self._signal is None:
            self._signal = number
            with suppress(OSError):
                self._folder.stop.touch()
            return
        self._end(signal.SIGTERM)
        self._kill_at = time.monotonic() + _GRACE_S

    def _end(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)


# As a training in the foreground ends.
_CODES = {
    FailureClass.BAD_INPUT: ExitCode.BAD_INPUT,
    FailureClass.MISSING: ExitCode.MISSING,
    FailureClass.OUT_OF_MEMORY: ExitCode.OUT_OF_MEMORY,
    FailureClass.CANNOT_WRITE: ExitCode.CANNOT_WRITE,
}


def cards_there(options: DispatchOptions) -> tuple[tuple[GpuSpec, ...], str | None]:
    """The GPUs of a node, and why they aren't known where they aren't. Raises EngineMissing, EngineAway, and UsageError
    for a --node-gpus that makes no sense."""
    try:
        return node_gpus(options), None
    except UsageError as problem:
        if options.node_gpus is not None:
            raise
        return (), str(problem)


def job_of(told: TrainSettings, argv: Sequence[str], folder: TrainDirectory) -> Job:
    """The training as a job of a queue. It is not tried again when it fails, as in the foreground."""
    return Job(
        name="train",
        title=told.experiment_name,
        argv=tuple(argv),
        gpus=0 if told.on_cpu else told.here,
        nodes=told.machines,
        retries=0,
        env=job_environment(),
        cwd=str(Path.cwd()),
        result=str(folder.done),
        identity="train",  # what else decides is looked at in the folder
    )


def engine_request(job: Job, options: DispatchOptions) -> tuple[str, str | None]:
    """What the engine would be asked for, for people, and why it can never give it, None where it can. Raises as
    ``Engine.check``."""
    (never,) = feasibility.never([job], options)
    return feasibility.in_words(feasibility.would_ask(job, options)), never


def train_there(
    job: Job, options: DispatchOptions, folder: TrainDirectory, begin: Callable[[], None], console: Console
) -> Outcome:
    """Hands it over, or follows it where that was done before, until it has ended.

    Args:
        begin: prepares the folder; called when nothing refuses the start any more.

    Raises what ``run_jobs`` raises.
    """
    with display(console) as shown:
        outcome = run_jobs([job], options, folder, before=begin, display=shown)
    for failure in outcome.failures:
        console.print(printable(f"failed: {failure.sentence}"), markup=False, highlight=False, soft_wrap=True)
    return outcome


def code_of(outcome: Outcome) -> int:
    """What the command exits with."""
    if outcome.stopped_by is None and outcome.failures:
        return _CODES.get(outcome.failures[0].failure, ExitCode.FAILED)
    return outcome.exit_code
