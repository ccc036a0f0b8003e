"""The command lines of ``gpuherd posttrain`` and ``gpuherd train``, besides the configurations that they read: GPUs,
jobs, folders, which run is resumed. Light: read by commands that start at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from gpuherd.batch.options import RunOptions
from gpuherd.engines.options import EngineOptions, engine_values, for_one_command, refuse_ranks
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import UsageError
from gpuherd.jobs.options import DispatchOptions
from gpuherd.options import option, same_option
from gpuherd.units import count


@dataclass(frozen=True, kw_only=True)
class RoundsOptions(DispatchOptions):
    """How an experiment's jobs run. Raises UsageError."""

    config: str | None = option(
        None,
        help="a YAML file of your own over the shipped configuration; overrides on the command line go before it",
        metavar="FILE",
        group="experiment",
    )
    resume: str | None = option(
        None,
        help="go on with the run in DIR, with its own configuration (the same as resume_from=DIR)",
        metavar="DIR",
        group="experiment",
    )
    retries: int = option(
        1, help="further tries for a job that crashed or ran out of memory", parse=count, metavar="N", group="jobs"
    )
    dry_run: bool = option(
        False, help="show the jobs with their GPUs and memory, and start nothing", group="experiment"
    )
    enqueue_only: bool = option(
        False, help="put the jobs into the queue of the run's folder and end", group="experiment"
    )

    def __post_init__(self) -> None:
        DispatchOptions.__post_init__(self)
        refuse_ranks(self)
        object.__setattr__(self, "gpu_list", tuple(self.gpu_list))
        if self.gpus_per_job != 1:
            raise UsageError(
                "--gpus-per-job: a job of an experiment computes on 1 GPU, and a training on as many as algos.NAME.gpus"
            )
        if self.resume is not None and self.config is not None:
            raise UsageError("--resume goes on with the configuration of its run; leave --config out")


@dataclass(frozen=True, slots=True)
class Where:
    """What the command line says of it; None is what it didn't say.

    Attributes:
        device: cpu or cuda.
    """

    num_gpus: int | None = None
    gpu_ids: tuple[int, ...] | None = None
    device: str | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


def _port(word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= 65535:
        raise UsageError(f"{word!r} is no port; it is a number from 1 to 65535")
    return int(word)


def _gpu(word: str) -> int:
    if "=" in word:
        raise UsageError(f"{word!r} stands behind --gpu-ids, which takes numbers alone; write settings before it")
    if not word.isdecimal():
        raise UsageError(f"{word!r} is no GPU's number")
    return int(word)


def _rank(word: str) -> int:
    if not word.isdecimal():
        raise UsageError(f"{word!r} is no machine's number; they are counted from 0")
    return int(word)


_OF_RUN = ("wait", "no_wait", "gpu_memory_threshold", "max_checks", "check_interval")  # as of gpuherd run


@dataclass(frozen=True, kw_only=True)
@for_one_command
class TrainOptions(EngineOptions):
    """Where a training runs, and where its files go."""

    config: str | None = option(None, help="the configuration, YAML", metavar="FILE", group="training")
    output: str | None = option(
        None, help="the output folder (default: output_dir, or outputs/NAME)", metavar="DIR", group="training"
    )
    resume: bool = option(False, help="go on with the training that lies in the output folder", group="training")
    num_gpus: int | None = option(None, help="so many GPUs, a process each", parse=count, metavar="N", group="GPUs")
    gpu_ids: tuple[int, ...] | None = option(
        None, help="these GPUs, by the driver's numbers", parse=_gpu, many=True, metavar="ID", group="GPUs"
    )
    device: str | None = option(
        None,
        help="where, whatever the configuration says",
        choices=("cpu", "cuda"),
        group="GPUs",
    )
    nnodes: int | None = option(
        None,
        help="machines that train together: a cluster's (--engine), or each started by hand with the three flags below",
        parse=count,
        metavar="N",
        group="GPUs",
    )
    node_rank: int | None = option(None, help="this machine's number, from 0", parse=_rank, metavar="N", group="GPUs")
    master_addr: str | None = option(None, help="address of machine 0", metavar="ADDRESS", group="GPUs")
    master_port: int | None = option(
        None,
        help="a free port there (default: one is found)",
        parse=_port,
        metavar="PORT",
        group="GPUs",
    )
    dry_run: bool = option(False, help="check everything, say what would run and what memory it takes; start nothing")
    wait: float | None = same_option(RunOptions, "wait")
    no_wait: bool = same_option(RunOptions, "no_wait")
    gpu_memory_threshold: int = same_option(RunOptions, "gpu_memory_threshold")
    max_checks: int | None = same_option(RunOptions, "max_checks")
    check_interval: float = same_option(RunOptions, "check_interval")

    cpus_per_job: int | None = same_option(EngineOptions, "cpus_per_job")
    host_mem: int | None = same_option(EngineOptions, "host_mem")
    notice: float = same_option(EngineOptions, "notice")

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_ranks(self)
        if self.config is None and not (self.resume and self.output is not None):
            raise UsageError("--config FILE is missing (to go on with a training: --resume --output DIR)")

        if self.engine != LOCAL and (self.wait is not None or self.no_wait):
            flag = "--no-wait" if self.no_wait else "--wait"
            raise UsageError(f"{flag} is for GPUs of this machine; in the queue of --engine {self.engine} it waits")

    @property
    def dispatch(self) -> DispatchOptions:
        """What a cluster's engine is told."""
        return DispatchOptions(**engine_values(self))

    @property
    def where(self) -> Where:
        """What is said of processes and GPUs."""
        return Where(**{each.name: getattr(self, each.name) for each in fields(Where)})

    def run_options(self, gpus: int, ids: tuple[int, ...] | None, memory_mb: int | None) -> RunOptions:
        """Options of a command in the foreground that needs these GPUs."""
        return RunOptions(
            num_gpus=gpus,
            mem=memory_mb,
            name="train",
            gpu_list=() if ids is None else ids,
            **{name: getattr(self, name) for name in _OF_RUN},
        )
