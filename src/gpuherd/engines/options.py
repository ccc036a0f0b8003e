"""Where jobs run, and what is asked of a cluster: the options that every command starting jobs shares."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from gpuherd.errors import UsageError
from gpuherd.options import option
from gpuherd.quantities import duration_s, size_mb

EngineName = Literal["local", "slurm", "ray"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
_SLURM_ONLY = ("partition", "account", "qos", "constraint", "gpu_type", "array_limit", "slurm_args", "setup")
_RAY_ONLY = ("ray_address", "ray_resources")


def _positive(word: str) -> int:
    if not word.isascii() or not word.isdigit() or int(word) == 0:
        raise ValueError(f"{word!r} is not a whole number above 0")
    return int(word)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which engine runs the jobs, and what they ask of it. Times are seconds, memory MB (2^20 bytes)."""

    engine: EngineName = option(
        "local",
        help="what runs the jobs: this machine, a SLURM cluster, or a Ray cluster",
        choices=ENGINES,
        group="engine",
    )
    partition: str | None = option(None, help="SLURM partition", metavar="NAME", group="engine")
    account: str | None = option(None, help="SLURM account", metavar="NAME", group="engine")
    qos: str | None = option(None, help="SLURM quality of service", metavar="NAME", group="engine")
    constraint: str | None = option(None, help="SLURM node features", metavar="WORDS", group="engine")
    gpu_type: str | None = option(
        None, help="type of GPU, as SLURM calls it (--gres=gpu:TYPE:N)", metavar="TYPE", group="engine"
    )
    cpus_per_job: int | None = option(
        None, help="CPU cores that each job gets on each node", parse=_positive, metavar="N", group="engine"
    )
    host_mem: int | None = option(
        None,
        help="main memory that each job gets on each node, like 64GB",
        parse=size_mb,
        metavar="SIZE",
        group="engine",
    )
    time_limit: float | None = option(
        None,
        help="what the cluster grants a job at a time, like 4h; a job that is not done then goes on in another turn",
        parse=duration_s,
        metavar="TIME",
        group="engine",
    )
    notice: float = option(
        120.0,
        help="so long before its time is up a job gets SIGTERM, to save what it has",
        parse=duration_s,
        metavar="TIME",
        group="engine",
    )
    at_most: int = option(
        1000, help="most jobs in the cluster's queue at once", parse=_positive, metavar="N", group="engine"
    )
    array_limit: int | None = option(
        None, help="most jobs of one SLURM array that run at once", parse=_positive, metavar="N", group="engine"
    )
    slurm_args: tuple[str, ...] = option(
        (), help="further words for sbatch, like --slurm-args=--exclude=n3", many=True, metavar="WORD", group="engine"
    )
    setup: tuple[str, ...] = option(
        (),
        help="shell lines that a SLURM script runs first, like 'module load cuda'",
        many=True,
        metavar="LINE",
        group="engine",
    )
    ray_address: str | None = option(
        None,
        help="a Ray cluster: HOST:PORT, or http://HOST:8265 for its job server (default: one on this machine)",
        metavar="ADDRESS",
        group="engine",
    )
    ray_resources: tuple[str, ...] = option(
        (), help="custom Ray resources of each job, like licence=1", many=True, metavar="NAME=AMOUNT", group="engine"
    )

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise UsageError(f"engine={self.engine!r}; possible: {', '.join(ENGINES)}")
        beyond = (each.name for each in fields(EngineOptions) if each.name != "engine")
        foreign = {"local": tuple(beyond), "slurm": _RAY_ONLY, "ray": _SLURM_ONLY}[self.engine]
        plain = {each.name: each.default for each in fields(EngineOptions)}
        for name in foreign:
            if getattr(self, name) != plain[name]:
                meant = "slurm" if name in _SLURM_ONLY else "ray" if name in _RAY_ONLY else "slurm or --engine ray"
                raise UsageError(f"--{name.replace('_', '-')} is for --engine {meant}, and this is {self.engine}")
