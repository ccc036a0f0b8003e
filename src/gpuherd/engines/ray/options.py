"""Ray's own options."""

from __future__ import annotations

from dataclasses import dataclass

from gpuherd.engines.registry import ClusterOptions, engine_option


@dataclass(frozen=True, kw_only=True)
class RayOptions(ClusterOptions):
    """Which Ray cluster runs the jobs, and what they take of it beyond the options of every cluster."""

    ray_address: str | None = engine_option(
        None,
        help="a Ray cluster, like 10.0.0.1:6379, or its job server, like http://10.0.0.1:8265 "
        "(default: one on this machine)",
        metavar="ADDRESS",
    )
    ray_resources: tuple[str, ...] = engine_option(
        (), help="custom Ray resources of each job, like licence=1", many=True, metavar="NAME=AMOUNT"
    )
