"""What a user can say of Grid Engine."""

from __future__ import annotations

from dataclasses import dataclass

from gpuherd.options import option


@dataclass(frozen=True, kw_only=True)
class GridEngineOptions:
    """Options of ``--engine gridengine``."""

    notice: float = 120.0
    setup: tuple[str, ...] = ()
    sge_queue: str | None = option(
        None, help="Grid Engine's queues, like gpu.q or gpu.q@@a100 (qsub -q)", metavar="NAME", group="engine"
    )
    sge_project: str | None = option(
        None, help="Grid Engine's project, like physics (qsub -P)", metavar="NAME", group="engine"
    )
    sge_pe: str | None = option(
        None,
        help="parallel environment for jobs with several CPU cores or nodes, like smp (default: one that fits)",
        metavar="NAME",
        group="engine",
    )
    sge_gpu: str = option(
        "gpu", help="what Grid Engine calls GPUs, like ngpus for -l ngpus=2", metavar="RESOURCE", group="engine"
    )
    sge_memory: str = option(
        "mem_free",
        help="what Grid Engine calls the main memory that jobs ask for, like h_vmem",
        metavar="RESOURCE",
        group="engine",
    )
    sge_args: tuple[str, ...] = option(
        (), help="further words for qsub, like --sge-args='-m e'", many=True, metavar="WORDS", group="engine"
    )
