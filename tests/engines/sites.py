"""The engines as the common tests use them: what a command needs to reach each, and how to take it away for a while."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.gridengine import cluster as gridengine
from tests.gridengine.configuration import Plan as GridEnginePlan
from tests.slurm import cluster as slurm
from tests.slurm.configuration import Plan as SlurmPlan

from gpuherd.standin.machine import SimulatedMachine


@dataclass(frozen=True, kw_only=True)
class Site:
    """An engine that is up.

    Attributes:
        words: what a command is given to use it. ``wrong``: words for a place that is not there, and what is said then.
        program: the program that submits jobs; None for an engine that runs none for that.
        limits: whether it ends jobs that are over the time that they are granted.
        outage: takes it away while the context lasts; None where that can't be done here.
        keeps: jobs go on there while no dispatcher runs.
    """

    name: str
    title: str
    words: tuple[str, ...]
    wrong: tuple[tuple[str, ...], str]
    variables: Mapping[str, str] = field(default_factory=dict)
    program: str | None = None
    limits: bool = True
    keeps: bool = True
    outage: Callable[[], AbstractContextManager[None]] | None = None


@contextmanager
def local(standin: Callable[..., SimulatedMachine]) -> Iterator[Site]:
    """This machine with 8 simulated GPUs."""
    standin("8x40GB")
    wrong = (("--partition", "main"), "--partition is for --engine slurm, and this is local")
    yield Site(name="local", title="this machine", words=(), wrong=wrong, limits=False)


@contextmanager
def on_slurm() -> Iterator[Site]:
    """A SLURM of one node with 8 GPUs, without accounting."""
    reason = slurm.why_not(accounting=False)
    if reason is not None:
        pytest.skip(reason)
    with slurm.cluster(SlurmPlan(accounting=False)) as made:

        @contextmanager
        def outage() -> Iterator[None]:
            made.stop_controller()
            yield
            made.start_controller()

        yield Site(
            name="slurm",
            title="SLURM",
            words=("--engine", "slurm"),
            wrong=(("--partition", "mian"), "there is no partition mian in SLURM; did you mean main?"),
            variables=made.environment,
            program="sbatch",
            outage=outage,
        )


@contextmanager
def on_grid_engine() -> Iterator[Site]:
    """A Grid Engine of one node with 8 GPUs, which a prolog of the site hands out."""
    reason = gridengine.why_not()
    if reason is not None:
        pytest.skip(reason)
    with gridengine.cluster(GridEnginePlan(gpu_consumable="JOB")) as made:

        @contextmanager
        def outage() -> Iterator[None]:
            made.stop_master()
            yield
            made.start_master()

        yield Site(
            name="gridengine",
            title="Grid Engine",
            words=("--engine", "gridengine"),
            wrong=(("--sge-queue", "mian"), "there is no queue mian in Grid Engine; did you mean main?"),
            variables=made.environment,
            program="qsub",
            outage=outage,
        )


@contextmanager
def on_ray() -> Iterator[Site]:
    """A Ray of two nodes with 4 GPUs each."""
    pytest.importorskip("ray")
    from tests.engines.ray.cluster import TwoNodes

    with TwoNodes() as made:
        yield Site(
            name="ray",
            title="Ray",
            words=("--engine", "ray", "--ray-address", made.address),
            wrong=(("--ray-address", "ftp://there"), "ftp:// is not taken"),
            variables={**made.variables},
            keeps=False,
        )


def submitting_once(folder: Path, program: str, script: str) -> dict[str, str]:
    """Variables with which ``program`` is a script of ours, once: after that it is the program itself. In ``script``
    ``"$real" "$@"`` is that one."""
    real = next(path for each in os.environ["PATH"].split(":") if (path := Path(each, program)).exists())
    place = folder / "bin"
    place.mkdir()
    (place / program).write_text(
        f'#!/bin/bash\nreal={real}\nif mkdir "{folder}/was-here" 2>/dev/null; then\n{script}\nfi\nexec "$real" "$@"\n'
    )
    (place / program).chmod(0o755)
    return {"PATH": f"{place}:{os.environ['PATH']}"}
