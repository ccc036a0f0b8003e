"""``gpuherd train``: checks, takes GPUs, starts the training's processes and waits for them; or submits the training to
a cluster's engine as one job, which may span several nodes, in a queue in its own folder.

How processes are asked to stop, ``runs.launch`` says. What is stopped in a cluster, for want of time or to make room
for others, waits again and resumes from its checkpoint.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gpuherd.batch.run import Taken, Waiter, record_use
from gpuherd.engines import progress
from gpuherd.engines.base import Placement
from gpuherd.engines.options import for_this_machine
from gpuherd.engines.registry import LOCAL, names
from gpuherd.errors import ExitCode, JobCannotFit, UsageError, printable
from gpuherd.jobs import feasibility
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.job import Job
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.monitor.display import display
from gpuherd.jobs.run import run_jobs
from gpuherd.jobs.settings import NO_SETTINGS, Settings
from gpuherd.lm.backend import beyond_rounding
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.inventory import idle_gpus, node_gpus
from gpuherd.posttrain.learning.prepare import (
    begin,
    check_data,
    check_model,
    data_lengths,
    look_over,
    need_of,
    refuse_another,
    too_short,
)
from gpuherd.posttrain.learning.settings import MODULE, TrainSettings, read_settings
from gpuherd.posttrain.runs import launch
from gpuherd.posttrain.runs.folder import TrainDirectory
from gpuherd.posttrain.runs.options import TrainOptions, Where
from gpuherd.posttrain.runs.plan import StepRequest

# A failed job of a cluster ends as a training in the foreground does.
_CODES = {
    FailureClass.BAD_INPUT: ExitCode.BAD_INPUT,
    FailureClass.MISSING: ExitCode.MISSING,
    FailureClass.OUT_OF_MEMORY: ExitCode.OUT_OF_MEMORY,
    FailureClass.CANNOT_WRITE: ExitCode.CANNOT_WRITE,
}


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

    @property
    def writes(self) -> bool:
        """Whether the folder is this machine's business: it is the first one's."""
        return self.settings.where.node_rank == 0

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

    @property
    def job(self) -> Job:
        """The training as a job of a cluster's queue. It is not tried again when it fails, as on this machine."""
        told = self.settings
        return Job(
            name="train",
            title=told.experiment_name,
            argv=tuple(self.argv),
            gpus=0 if told.on_cpu else told.here,
            nodes=told.machines,
            retries=0,
            env=launch.job_environment(),
            cwd=str(Path.cwd()),
            result=str(self.folder.done),
            identity="train",  # what else decides is looked at in the folder
        )


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
            JobCannotFit: it fits on no GPU, with what would. NoGpuFree, NoSuchGpu.
            MissingModel, BadModel, CannotWrite, QueueBusy; what ``run_jobs`` raises.
        """
        told, folder = self._settings()
        self._refuse_other_engine(folder)
        if folder.done.exists() and folder.config.exists() and self.options.resume:
            refuse_another(folder, told)
            self.summary = folder.summary()
            self._print(f"the training in {folder.root} has ended; nothing is left to do")
            return ExitCode.OK
        told.steps(told.processes)  # raises UsageError where they don't divide a step
        if self._is_inside(told, folder):
            self.options = for_this_machine(self.options)
        plan, waiter = self._planned(told, folder)
        here = plan.engine == LOCAL
        if self.options.dry_run:
            if not here:
                dispatch = self.options.dispatch
                (never,) = feasibility.never([plan.job], dispatch)
                asks = feasibility.in_words(feasibility.would_ask(plan.job, dispatch))
                self.plan = plan = replace(plan, asks=asks, never=never)
                self._print(f"asks {plan.engine} for {asks}", *([] if never is None else [f"never: {never}"]))
            self._print("nothing was started")
            return ExitCode.OK if plan.never is None else ExitCode.FAILED
        if plan.writes:
            look_over(folder, told, resume=self.options.resume)
        return self._here(plan, waiter) if here else self._there(plan)

    def _planned(self, told: TrainSettings, folder: TrainDirectory) -> tuple[Plan, Waiter | None]:
        """What would run, printed; and who takes the GPUs of this machine, where it needs some."""
        engine = self.options.engine
        here = engine == LOCAL
        if here:
            check_port(told)
        check_model(told)
        texts = check_data(told)
        short = too_short(told, texts)
        cards: Sequence[GpuSpec] | None = None
        need: StepRequest | None = None
        waiter: Waiter | None = None
        unknown: str | None = None
        if not told.on_cpu and here:
            cards = self._gpus_here(told)
        elif not told.on_cpu:
            cards, unknown = self._gpus_there()
        if cards is not None:
            need = need_of(told, cards, told.processes, data_lengths(told, texts))
            if here:
                wanted = self.options.run_options(told.here, told.gpu_ids, need.memory_mb)
                waiter = Waiter(wanted, self._print, self.settings)
        on_cpu = cards is None or (here and self.simulate)
        argv = command(told, folder.root, on_cpu=on_cpu, engine=engine)
        source = "" if texts is None else texts.source
        self.plan = Plan(told, folder, on_cpu, need, argv, engine, source=source, short=short)
        self._print(*self.plan.lines(), *([] if unknown is None else [f"whether it fits isn't known: {unknown}"]))
        return self.plan, waiter

    def _settings(self) -> tuple[TrainSettings, TrainDirectory]:
        options = self.options
        file = options.config
        if file is None:
            assert options.output is not None  # noqa: S101 - TrainOptions has looked
            file = str(TrainDirectory(options.output).config)
        told = placed(read_settings(file, self.overrides), options.where, options.engine)
        return told, told.directory(options.output)

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

    def _gpus_here(self, told: TrainSettings) -> Sequence[GpuSpec] | None:
        """This machine's GPUs; None where it has none and the CPU will do. Raises JobCannotFit, NoSuchGpu."""
        from gpuherd.jobs.gpu.watch import watch_for_plan

        here = told.here
        watch = watch_for_plan(self.options.run_options(here, told.gpu_ids, None).gpu_options(), self.settings)
        if watch.problem is not None:
            if here > 1 or told.device == "cuda":
                raise JobCannotFit(
                    f"{here} GPUs are asked for, and here are none ({watch.problem}); train on the CPU by --device cpu"
                )
            self._print(f"no GPUs: {watch.problem}; training on the CPU")
            return None
        if len(watch.gpus) < here:
            raise JobCannotFit(f"{here} GPUs are asked for, and this machine has {len(watch.gpus)} for us")
        return idle_gpus(watch.gpus)

    def _gpus_there(self) -> tuple[Sequence[GpuSpec], str | None]:
        """The GPUs of a node, and why they aren't known where they aren't. Raises EngineMissing, EngineAway, and
        UsageError for a --node-gpus that makes no sense."""
        try:
            return node_gpus(self.options.dispatch), None
        except UsageError as problem:
            if self.options.node_gpus is not None:
                raise
            return (), str(problem)

    # --- the training at work -----------------------------------------------------------------------------------------

    def _here(self, plan: Plan, waiter: Waiter | None) -> int:
        """Takes GPUs, starts the processes and waits for them."""
        if plan.writes:
            plan.folder.create_root()
            DispatcherLock(plan.folder.train_lock).close()  # raises QueueBusy before GPUs are waited for
        taken = Taken() if waiter is None else waiter.take()
        try:
            if plan.writes:
                self._begin(plan)
            record_use(plan.argv, taken, "train", plan.folder.root.absolute().name)
            gpus = taken.gpus if taken.gpus or plan.on_cpu else None
            given = launch.environment(os.environ, gpus, os.getpid(), plan.settings.here)
            with tempfile.TemporaryDirectory(prefix="gpuherd-train-") as place:
                given.setdefault(progress.VARIABLE, str(Path(place) / "progress"))
                descriptors = [lease.fd for lease in taken.leases]
                code = launch.run_watched(plan.argv, given, plan.folder.stop, descriptors, self.console)
        finally:
            for lease in taken.leases:
                lease.close()
        stopped = code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
        return self._ended(code, plan.folder, "stopped" if stopped else None)

    def _there(self, plan: Plan) -> int:
        """The same as one job of a cluster's engine, which finds GPUs and starts its machines: handed over, or followed
        where that was done before. Raises what ``run_jobs`` raises."""
        with display(self.console) as shown:
            outcome = run_jobs(
                [plan.job], self.options.dispatch, plan.folder, before=lambda: self._begin(plan), display=shown
            )
        self._print(*(f"failed: {failure.sentence}" for failure in outcome.failures))
        code: int = outcome.exit_code
        if outcome.stopped_by is None and outcome.failures:
            code = _CODES.get(outcome.failures[0].failure, ExitCode.FAILED)
        stopped = outcome.waiting or code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
        return self._ended(code, plan.folder, "cancelled" if outcome.cancelled else "stopped" if stopped else None)

    def _begin(self, plan: Plan) -> None:
        simulate = plan.engine == LOCAL and self.simulate and not plan.settings.on_cpu
        begin(plan.folder, plan.settings, resume=self.options.resume, simulate=simulate)
        plan.folder.stop.unlink(missing_ok=True)  # of a start before

    def _ended(self, code: int, folder: TrainDirectory, ended: str | None) -> int:
        """Says how it ended. ``ended``: a word for an end that is no failure. Returns the exit code."""
        self.summary = folder.summary()
        if code == ExitCode.OK and self.summary is not None:
            # The worker has said how long it took, and where the model is.
            self._print(f"at the end: {last_figures(self.summary.get('last', {}))}")
        elif ended is not None:
            engine = "" if self.options.engine == LOCAL else f" --engine {self.options.engine}"
            self._print(f"{ended}: gpuherd train --resume --output {folder.root}{engine} goes on from there")
        else:
            self._print(f"the training has failed (exit code {code}); see {folder.run_log}")
        return code

    def _print(self, *lines: str) -> None:
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


# ---- processes and machines


def placed(settings: TrainSettings, where: Where, engine: str = LOCAL) -> TrainSettings:
    """The settings with what the command line says of GPUs over them, checked.

    ``--gpu-ids`` and ``--num-gpus`` stand above both keys of the file, and ``enabled`` follows them.

    Args:
        engine: what starts the machines. Only where that is the user, one by one, each needs the address of the others.

    Raises UsageError.
    """
    keys: dict[str, Any] = {}
    if engine != LOCAL:
        for flag in ("gpu_ids", "node_rank", "master_addr", "master_port"):
            if getattr(where, flag) is not None:
                raise UsageError(
                    f"--{flag.replace('_', '-')} is for machines that you start yourself; --engine {engine} chooses "
                    "that: leave it out"
                )
        # What a file says of machines that its user starts is none of a cluster's.
        keys |= {"num_gpus": settings.here, "gpu_ids": None, "node_rank": 0, "master_port": None}
    if where.num_gpus is not None and where.gpu_ids is not None and where.num_gpus != len(where.gpu_ids):
        raise UsageError(f"--num-gpus {where.num_gpus}, and --gpu-ids names {len(where.gpu_ids)}; leave one out")
    if where.num_gpus is not None or where.gpu_ids is not None:
        ids = None if where.gpu_ids is None else list(where.gpu_ids)
        keys |= {"num_gpus": where.num_gpus, "gpu_ids": ids, "enabled": None}
    others = {"num_nodes": "nnodes", "node_rank": "node_rank", "master_addr": "master_addr",
              "master_port": "master_port"}  # fmt: skip
    keys |= {key: getattr(where, flag) for key, flag in others.items() if getattr(where, flag) is not None}
    device = {} if where.device is None else {"model__device": where.device}
    found = settings.changed(**{f"distributed__{name}": each for name, each in keys.items()}, **device)
    if engine == LOCAL and found.machines > 1 and found.where.master_port is None:
        raise UsageError(
            "distributed.master_port is missing: with several nodes all must know it (a cluster's engine, --engine "
            f"{' or --engine '.join(names()[1:])}, starts them all, and then it isn't needed)"
        )
    return found


def command(settings: TrainSettings, folder: Path, *, on_cpu: bool, engine: str = LOCAL) -> list[str]:
    """The command that starts the training: Python alone, or torchrun (``launch``).

    On one machine torchrun finds a free port itself, unless one is configured. On several of a cluster it reads its
    place among them from the environment that each is given.
    """
    where = settings.where
    words = ["--output", str(folder), "--resume", "--device", "cpu" if on_cpu else "cuda"]
    rendezvous: Sequence[str] | None
    if settings.processes == 1:
        rendezvous = None
    elif settings.machines == 1 and where.master_port is None:
        rendezvous = launch.ALONE
    elif engine != LOCAL:
        rendezvous = ()
    else:
        address = "127.0.0.1" if settings.machines == 1 else where.master_addr
        rendezvous = (
            f"--nnodes={settings.machines}",
            f"--node-rank={where.node_rank}",
            f"--master-addr={address}",
            f"--master-port={where.master_port}",
        )
    return launch.command(MODULE, words, settings.here, rendezvous)


def check_port(settings: TrainSettings) -> None:
    """Raises UsageError where the port that this machine is to listen at is in use."""
    where = settings.where
    if where.master_port is None or where.node_rank != 0 or settings.processes == 1:
        return
    if (problem := launch.port_problem(where.master_port)) is not None:
        hint = "" if settings.machines > 1 else ", or leave it out: a free one is found"
        raise UsageError(
            f"distributed.master_port={where.master_port} can't be listened at ({problem}); choose another{hint}"
        )
