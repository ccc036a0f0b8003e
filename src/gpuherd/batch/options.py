"""The options of ``gpuherd batch``, ``gpuherd run`` and ``gpuherd session``. Their command lines load this module at
every start, and the rest of the room only to run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from gpuherd.engines.options import EngineOptions, for_one_command
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import UsageError
from gpuherd.jobs.job import Job, ModelUse, Planner, job_name, model_use
from gpuherd.jobs.options import DispatchOptions, GpuOptions
from gpuherd.options import option, option_fields, same_option
from gpuherd.units import count, duration_s, positive_int, size_mb


@dataclass(frozen=True, kw_only=True)
class BatchOptions(DispatchOptions):
    """The options of ``gpuherd batch``."""

    output_dir: str | None = option(
        None,
        help="folder for queue and logs (default: <file>_results); the same folder continues where it stopped",
        metavar="DIR",
        group="jobs",
    )
    shell: bool = option(False, help="run each command line with /bin/sh", group="jobs")
    retries: int = option(
        1, help="further tries of jobs that don't give a number", parse=count, metavar="N", group="jobs"
    )
    dry_run: bool = option(False, help="show what would run and start nothing", group="jobs")
    enqueue_only: bool = option(False, help="put the jobs into the queue of the run folder and exit", group="jobs")

    def to_dict(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """What a command in the foreground needs, and how long to wait for it."""

    num_gpus: int | None = option(
        None,
        help="GPUs that the command gets (default: 1, or what --model needs)",
        parse=count,
        metavar="N",
        group="job",
    )
    mem: int | None = option(
        None, help="memory that must be free on each, like 20GB", parse=size_mb, metavar="SIZE", group="job"
    )
    nodes: int = same_option(Job, "nodes")
    cpus: int | None = same_option(Job, "cpus")
    host_mem: int | None = same_option(Job, "host_memory_mb")
    model: str | None = same_option(ModelUse, "model")
    dtype: str | None = same_option(ModelUse, "dtype")
    batch: int | None = same_option(ModelUse, "batch")
    prompt_tokens: int | None = same_option(ModelUse, "prompt_tokens")
    new_tokens: int | None = same_option(ModelUse, "new_tokens")
    parallel: str | None = same_option(ModelUse, "parallel")
    name: str | None = option(
        None, help="name that others see as the holder of the GPUs (default: run)", parse=job_name, metavar="NAME"
    )
    wait: float | None = option(
        None,
        help="give up after this time, like 10m, with exit code 75; on a cluster: if it has not started by then",
        parse=duration_s,
        metavar="TIME",
    )
    no_wait: bool = option(
        False,
        help="give up at once if too few GPUs can be free; the checks still take their time (SLURM: if it can't start "
        "at once)",
    )
    quiet: bool = option(False, help="don't print what it waits for")
    dry_run: bool = option(False, help="check once, print what would happen, and start nothing")
    gpu_list: tuple[str | int, ...] = same_option(GpuOptions, "gpu_list")
    gpu_memory_threshold: int = same_option(GpuOptions, "gpu_memory_threshold")
    max_checks: int | None = same_option(GpuOptions, "max_checks")
    check_interval: float = same_option(GpuOptions, "check_interval")

    def __post_init__(self) -> None:
        if self.wait is not None and self.no_wait:
            raise UsageError("give --wait TIME or --no-wait, not both")


@dataclass(frozen=True, kw_only=True)
@for_one_command
class RunOptions(EngineOptions, CommandOptions):
    """The same, and the options of engines."""

    project: str | None = option(
        None,
        help="what its GPU hours count for, in gpuherd usage (default: the name of this folder)",
        parse=job_name,
        metavar="NAME",
        group="job",
    )

    def __post_init__(self) -> None:
        CommandOptions.__post_init__(self)
        EngineOptions.__post_init__(self)
        if self.engine == LOCAL:
            return
        if self.gpu_list:
            hint = "" if self.spec.gpu_type_flag is None else f": use {self.spec.gpu_type_flag}"
            raise UsageError(f"--gpu-list is for this machine's GPUs, and the engine is {self.engine}{hint}")
        if self.mem is not None and self.model is None:
            hint = "" if self.spec.gpu_type_flag is None else f", which {self.spec.gpu_type_flag} chooses"
            raise UsageError(f"--mem is for this machine; {self.engine} gives whole GPUs{hint}")

    @property
    def gpus(self) -> int:
        """How many GPUs the command gets."""
        return 1 if self.num_gpus is None else self.num_gpus

    def planned(self, planner: Planner) -> RunOptions:
        """The same with the GPUs and the memory that the named model needs; unchanged where none is named.

        Raises UsageError for words that need a model, and what the planner raises.
        """
        given = {each.name: getattr(self, each.name) for each, _ in option_fields(ModelUse)}
        given |= {"gpus": None if self.num_gpus is None else (self.num_gpus, self.num_gpus), "memory_mb": self.mem}
        use = model_use({name: value for name, value in given.items() if value is not None})
        if use is None:
            return self
        need = planner(use)
        return replace(self, num_gpus=need.gpus, mem=need.memory_mb if self.mem is None else self.mem)

    def gpu_options(self) -> DispatchOptions:
        """The options that a dispatcher would have."""
        return DispatchOptions(
            max_gpus=max(1, self.gpus),
            gpu_list=self.gpu_list,
            gpu_memory_threshold=self.gpu_memory_threshold,
            max_checks=self.max_checks,
            check_interval=self.check_interval,
        )


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """What interactive work on GPUs of this machine needs, and when it gives them back."""

    num_gpus: int = option(1, help="GPUs that the session gets", parse=positive_int, metavar="N", group="job")
    mem: int | None = same_option(CommandOptions, "mem")
    cpus: int | None = same_option(CommandOptions, "cpus")
    session_idle_after: float | None = option(
        None,
        help="give the GPUs back when neither they nor the terminal have been used for this time, like 30m "
        "(default: 1h)",
        flag="idle-after",
        parse=duration_s,
        metavar="TIME",
        group="end",
    )
    warn: float | None = option(
        None,
        help="say so this long before (default: 10m, and no more than a quarter of --idle-after and --for)",
        parse=duration_s,
        metavar="TIME",
        group="end",
    )
    longest: float | None = option(
        None,
        help="give the GPUs back after this time in any case, like 8h",
        flag="for",
        parse=duration_s,
        metavar="TIME",
        group="end",
    )
    grace: float | None = option(
        None,
        help="from SIGTERM to SIGKILL for what the session has started (default: 30s)",
        parse=duration_s,
        metavar="TIME",
        group="end",
    )
    name: str | None = option(
        None, help="name that others see as the holder of the GPUs (default: session)", parse=job_name, metavar="NAME"
    )
    wait: float | None = option(
        None, help="give up after this time, like 10m, with exit code 75", parse=duration_s, metavar="TIME"
    )
    no_wait: bool = same_option(CommandOptions, "no_wait")
    quiet: bool = same_option(CommandOptions, "quiet")
    project: str | None = same_option(RunOptions, "project")
    gpu_list: tuple[str | int, ...] = same_option(GpuOptions, "gpu_list")
    gpu_memory_threshold: int = same_option(GpuOptions, "gpu_memory_threshold")
    max_checks: int | None = same_option(GpuOptions, "max_checks")
    check_interval: float = same_option(GpuOptions, "check_interval")
    notify_command: str | None = option(
        None,
        help="run this command with the warning and at the end (words, no shell; the notice is its input)",
        metavar="COMMAND",
        group="notices",
    )
    webhook: str | None = same_option(DispatchOptions, "webhook")

    def __post_init__(self) -> None:
        if self.wait is not None and self.no_wait:
            raise UsageError("give --wait TIME or --no-wait, not both")
        if self.warn is not None and self.warn >= self._shortest_s:
            raise UsageError("--warn must be shorter than --idle-after and --for: the warning comes before the end")

    @property
    def warn_s(self) -> float:
        """How long before its end the session is warned, in seconds."""
        return min(600.0, self._shortest_s / 4) if self.warn is None else self.warn

    @property
    def idle_after_s(self) -> float:
        """Seconds without use after which it ends."""
        return 3600.0 if self.session_idle_after is None else self.session_idle_after

    @property
    def grace_s(self) -> float:
        """Seconds from SIGTERM to SIGKILL."""
        return 30.0 if self.grace is None else self.grace

    @property
    def _shortest_s(self) -> float:
        return min(self.idle_after_s, self.longest or self.idle_after_s)

    @property
    def run_options(self) -> RunOptions:
        """The options of a command that takes the same GPUs."""
        same = {each.name for each, _ in option_fields(SessionOptions)} & {
            each.name for each, _ in option_fields(RunOptions)
        }
        values = {name: getattr(self, name) for name in same}
        return RunOptions(**values | {"name": self.name or "session"})
