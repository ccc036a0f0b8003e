"""The options of ``gpuherd simulate``: which machines, which jobs, which strangers. The rules are ``rules.Rules``.

The command line reads this module at every start, so that what takes time to import is imported when a word is parsed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuherd.errors import UsageError
from gpuherd.jobs.options import count, positive_int
from gpuherd.options import option
from gpuherd.quantities import duration_s, size_mb

if TYPE_CHECKING:
    from datetime import datetime

    from gpuherd.jobs.failures import FailureClass
    from gpuherd.simulate.cluster import Machine
    from gpuherd.simulate.lengths import Spread
    from gpuherd.simulate.strangers import Background
    from gpuherd.simulate.workload import Mix, Recipe


def _machine(word: str) -> tuple[Machine, ...]:
    from gpuherd.simulate.cluster import machine

    return machine(word)


def _machines(word: str) -> tuple[Machine, ...]:
    from gpuherd.simulate.cluster import machines

    return machines(word)


def _background(word: str) -> Background:
    from gpuherd.simulate.strangers import background

    return background(word)


def _begin(word: str) -> datetime:
    from gpuherd.simulate.begin import begin

    return begin(word)


def _spread(word: str) -> Spread:
    from gpuherd.simulate.lengths import spread

    return spread(word)


def job_seconds(word: str) -> Spread | float:
    """How long jobs run: a spread, or ``cost`` (``cost:0.5``) for so many seconds for each unit of a job's own cost.

    >>> job_seconds("cost:0.5")
    0.5
    """
    kind, colon, factor = word.partition(":")
    if kind != "cost":
        return _spread(word)
    return duration_s(factor) if colon else 1.0


def _gpu_mix(word: str) -> Mix[int]:
    from gpuherd.simulate.workload import mix

    return mix(word, count)


def _node_mix(word: str) -> Mix[int]:
    from gpuherd.simulate.workload import mix

    return mix(word, positive_int)


def _memory_mix(word: str) -> Mix[int]:
    from gpuherd.simulate.workload import mix

    return mix(word, size_mb)


def _failures(word: str) -> Mapping[FailureClass, float]:
    from gpuherd.simulate.workload import failure_shares

    return failure_shares(word)


def _multiple(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 1 < value < math.inf:
        raise ValueError(f"{word!r}: a job's time limit is a multiple of its length, more than 1; write 1.5")
    return value


def _sigma(word: str) -> float:
    value = float(word)
    if not 0 <= value <= 10:
        raise ValueError(f"{word!r} is not a number from 0 to 10")
    return value


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """What is simulated."""

    machine: tuple[Machine, ...] | None = option(
        None, help="one machine: 8x80GB, or 4x24GB+2x80GB", parse=_machine, metavar="SPEC", group="machines"
    )
    machines: tuple[Machine, ...] | None = option(
        None,
        help="a cluster: 125x8x80GB for 125 machines of 8 GPUs; several kinds with commas",
        parse=_machines,
        metavar="SPEC",
        group="machines",
    )
    background: Background | None = option(
        None,
        help="strangers: busy=0.3,mean=2h,barge=0.1 for the share of time in which they would use a GPU, how long they "
        "stay, and the share of them that starts on GPUs in use",
        parse=_background,
        metavar="SPEC",
        group="machines",
    )
    begin: datetime | None = option(
        None,
        help='day and time at which it begins, like "Fri 17:00" (default: Mon 00:00)',
        parse=_begin,
        metavar="TIME",
        group="machines",
    )
    jobs: int | None = option(
        None, help="draw so many jobs, in place of SOURCE", parse=positive_int, metavar="N", group="workload"
    )
    seconds: Spread | float | None = option(
        None,
        help="how long a job runs: 5m, uniform:1m,10m, exponential:5m (mean), lognormal:5m,1 (median, sigma), "
        "pareto:1m,1.5 (least, exponent), or cost (cost:0.5) to take it from the jobs' own costs",
        parse=job_seconds,
        metavar="SPREAD",
        group="workload",
    )
    num_gpus: Mix[int] | None = option(
        None,
        help="GPUs that a drawn job asks for: 2, or with weights 1:8,4:2 (default: 1)",
        parse=_gpu_mix,
        metavar="N",
        group="workload",
    )
    num_nodes: Mix[int] | None = option(
        None,
        help="nodes that a drawn job spans, with --num-gpus on each: 1:9,2:1; for --policy handover (default: 1)",
        parse=_node_mix,
        metavar="N",
        group="workload",
    )
    mem: Mix[int] | None = option(
        None,
        help="memory that a drawn job asks for on each GPU: 20GB, or with weights 8GB:3,40GB:1; what --share goes by",
        parse=_memory_mix,
        metavar="SIZE",
        group="workload",
    )
    every: Spread | None = option(
        None,
        help="time from one job's coming to the next: 30s, exponential:30s (default: all are there from the start)",
        parse=_spread,
        metavar="SPREAD",
        group="workload",
    )
    failures: Mapping[FailureClass, float] | None = option(
        None,
        help="share of attempts that fail, by class: crash=0.02,gpu-fault=0.001",
        parse=_failures,
        metavar="SHARES",
        group="workload",
    )
    retries: int | None = option(
        None, help="further tries of a drawn job (default: 1)", parse=count, metavar="N", group="workload"
    )
    guess: float | None = option(
        None,
        help="error of the lengths that order=longest goes by, as the sigma of their logarithm (default: 0, all known)",
        parse=_sigma,
        metavar="SIGMA",
        group="workload",
    )
    limits: float | None = option(
        None,
        help="time limit of each drawn job, as a multiple of its length (default: none, or --timeout for all)",
        parse=_multiple,
        metavar="FACTOR",
        group="workload",
    )
    seed: int = option(0, help="of all that is drawn by chance", parse=count, metavar="N", group="workload")

    def recipe(self) -> Recipe | None:
        """How jobs are drawn; None when nothing says how long they run."""
        if self.seconds is None:
            return None
        from gpuherd.simulate.workload import Recipe

        plain = Recipe(seconds=self.seconds)
        return Recipe(
            seconds=self.seconds,
            gpus=self.num_gpus or plain.gpus,
            nodes=self.num_nodes or plain.nodes,
            memory_mb=self.mem,
            every=self.every,
            failures=self.failures or {},
            retries=plain.retries if self.retries is None else self.retries,
            guess=self.guess or 0.0,
            limits=self.limits,
        )

    def refuse_for_given_jobs(self) -> None:
        """Raises UsageError for options that only drawn jobs have a use for, and for those that need --seconds."""
        drawn_only = {"num_gpus": "--num-gpus", "mem": "--mem", "retries": "--retries", "guess": "--guess"}
        drawn_only |= {"limits": "--limits", "num_nodes": "--num-nodes"}
        for name, flag in drawn_only.items():
            if getattr(self, name) is not None:
                raise UsageError(f"{flag} is for drawn jobs (--jobs); those of SOURCE say it themselves")
        for name in ("every", "failures"):
            if getattr(self, name) is not None and self.seconds is None:
                raise UsageError(f"--{name} goes with --seconds here; say both")
