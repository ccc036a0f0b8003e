"""Grid Engine's own options."""

from __future__ import annotations

from dataclasses import dataclass

from gpuherd.engines.registry import ClusterOptions, for_many
from gpuherd.options import option
from gpuherd.units import positive_int


@dataclass(frozen=True, kw_only=True)
class GridEngineOptions(ClusterOptions):
    """What jobs request from Grid Engine beyond the options of every cluster."""

    sge_queue: str | None = option(
        None, help="Grid Engine queues, like gpu.q or gpu.q@@a100 (qsub -q)", metavar="NAME", group="engine"
    )
    sge_project: str | None = option(
        None, help="Grid Engine project, like physics (qsub -P)", metavar="NAME", group="engine"
    )
    sge_pe: str | None = option(
        None,
        help="Grid Engine's parallel environment for jobs with several CPU cores or nodes, like smp (default: one "
        "that fits)",
        metavar="NAME",
        group="engine",
    )
    sge_gpu: str = option(
        "gpu", help="what Grid Engine calls GPUs, like ngpus for -l ngpus=2", metavar="RESOURCE", group="engine"
    )
    sge_memory: str = option(
        "mem_free",
        help="what Grid Engine calls the main memory that jobs request, like h_vmem",
        metavar="RESOURCE",
        group="engine",
    )
    sge_args: tuple[str, ...] = option(
        (), help="further arguments for qsub, like --sge-args='-m e'", many=True, metavar="WORDS", group="engine"
    )
    array_limit: int | None = for_many(
        option(
            None,
            help="most jobs of one array that run at once, like 16",
            parse=positive_int,
            metavar="N",
            group="engine",
        )
    )
    setup: tuple[str, ...] = option(
        (),
        help="shell lines that are run first on a node, like 'module load cuda'",
        many=True,
        metavar="LINE",
        group="engine",
    )
