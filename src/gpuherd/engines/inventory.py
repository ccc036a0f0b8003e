"""What GPUs the nodes of a cluster have, as far as the cluster itself says."""

from __future__ import annotations

from collections.abc import Mapping


def node_gpus(engine: str, partition: str | None) -> tuple[Mapping[str, int], ...] | None:
    """The GPUs of each node that jobs can get to, by type ("" for one that has no name); None where it can't be known.

    Raises EngineMissing, EngineAway, and UsageError for a partition that is not there.
    """
    if engine != "slurm":
        return None  # Ray counts GPUs, whatever they are
    from gpuherd.engines.slurm.inventory import gpus_of_nodes

    return gpus_of_nodes(partition)
