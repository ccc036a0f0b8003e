"""What GPUs the nodes of a SLURM partition have."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gpuherd.engines.options import EngineOptions
from gpuherd.engines.slurm import site
from gpuherd.engines.slurm.commands import Programs


def gpus_of_nodes(partition: str | None) -> tuple[Mapping[str, int], ...]:
    """The GPUs of each node of the partition (None: the one that jobs go to which name none), by SLURM's types; "" for
    GPUs of no type. Raises EngineMissing, EngineAway, and UsageError for a partition that is not there.
    """
    programs = Programs()
    there = site.Site(partitions=site.partitions(programs.nodes(), programs.partitions()))
    named = partition or os.environ.get("SBATCH_PARTITION")
    nodes = [node for each in site.chosen(there, EngineOptions(engine="slurm"), named) for node in each.nodes]
    return tuple({node.name: node.gpus for node in nodes}.values())
