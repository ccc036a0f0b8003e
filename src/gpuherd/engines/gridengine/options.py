"""Grid Engine's own options."""

from __future__ import annotations

from dataclasses import dataclass

from gpuherd.engines.registry import BatchSystemOptions, engine_option


@dataclass(frozen=True, kw_only=True)
class GridEngineOptions(BatchSystemOptions):
    """What jobs request from Grid Engine beyond the options of every batch system."""

    sge_queue: str | None = engine_option(
        None, help="Grid Engine queues, like gpu.q or gpu.q@@a100 (qsub -q)", metavar="NAME"
    )
    sge_project: str | None = engine_option(None, help="Grid Engine project, like physics (qsub -P)", metavar="NAME")
    sge_pe: str | None = engine_option(
        None,
        help="Grid Engine's parallel environment for jobs with several CPU cores or nodes, like smp (default: one "
        "that fits)",
        metavar="NAME",
    )
    sge_gpu: str = engine_option(
        "gpu", help="what Grid Engine calls GPUs, like ngpus for -l ngpus=2", metavar="RESOURCE"
    )
    sge_memory: str = engine_option(
        "mem_free",
        help="what Grid Engine calls the main memory that jobs request, like h_vmem",
        metavar="RESOURCE",
    )
    sge_args: tuple[str, ...] = engine_option(
        (), help="further arguments for qsub, like --sge-args='-m e'", many=True, metavar="WORDS"
    )
