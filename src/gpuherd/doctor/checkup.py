"""The whole visit: which checks there are, in order, each ready to run. What they find is judged elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpuherd.doctor import checks as hardware
from gpuherd.doctor import checks as software
from gpuherd.doctor import checks as storage
from gpuherd.doctor import clusters, models
from gpuherd.doctor.checks import CheckResult
from gpuherd.doctor.child import Answer, ask
from gpuherd.engines.slurm.commands import Programs
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.gpus.idle import IdleRule
from gpuherd.gpus.leases import Holder, LeaseFolder
from gpuherd.gpus.query import GpuReader
from gpuherd.gpus.state import Gpu, Machine
from gpuherd.gpus.visible import VARIABLES, value_in, visible_in
from gpuherd.jobs.one_host import kind_of

_TORCH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Step:
    """Some checks that are made together. ``title`` says what is being done, for those who wait."""

    title: str
    run: Callable[[], list[CheckResult]]


def steps(
    *, simulated: bool, compiler: list[str] | None, engine: str | None = None, ray_address: str | None = None
) -> Iterator[Step]:
    """All checks of this machine, in the order in which they explain each other.

    Args:
        simulated: whether the GPUs that this process sees are simulated.
        compiler: the compile command that ``--simulate`` would use, None if there is none.
        engine: ``slurm`` or ``ray`` to look at that too, None for a line on what is there.
        ray_address: of the Ray cluster that is meant.
    """
    machine = GpuReader().snapshot(topology=True)
    inherited, shown = value_in(os.environ, machine.maker), visible_in(machine.gpus, os.environ)
    torch = software.installed(["torch"])["torch"]
    yield Step("versions", lambda: [software.python(), _libraries()])
    cards = hardware.nvidia_cards()
    yield Step(f"the {machine.maker} driver", lambda: [hardware.driver(machine, cards, simulated=simulated)])
    yield Step("torch", lambda: [_torch(torch, machine, simulated=simulated)])
    yield Step("visible GPUs", lambda: [hardware.visibility(inherited, machine, shown)])
    yield Step("who uses the GPUs", lambda: _usage(shown))
    yield Step("the interconnect", lambda: [hardware.interconnect(shown)] if machine.gpus else [])
    if torch is not None:
        yield Step("a small model on each device", lambda: _models(shown, simulated=simulated))
    yield Step("options", lambda: [_config(), storage.find_settings()])
    yield Step("disk and leases", lambda: [*_disks(), storage.find_leases(), storage.compiler(compiler)])
    yield Step("clusters", lambda: _clusters(engine, ray_address))


def _clusters(engine: str | None, ray_address: str | None) -> list[CheckResult]:
    if engine is None:
        here = Path.cwd()
        return [clusters.find_engines(), *clusters.queues_on(here, kind_of(here))]
    found = clusters.find_ray(ray_address) if engine == "ray" else clusters.find_slurm(Programs())
    return [*found, clusters.find_folder(Path.cwd(), engine)]


def _libraries() -> CheckResult:
    return software.libraries(software.installed((*software.CORE, *software.ESD)))


def _torch(version: str | None, machine: Machine, *, simulated: bool) -> CheckResult:
    answer = Answer()
    if version is not None:
        # All GPUs: what hides some of them is another line's subject.
        environment = dict.fromkeys(VARIABLES)
        answer = ask("gpuherd.doctor.torch_build", environment=environment, timeout_s=_TORCH_TIMEOUT_S)
    return software.torch_build(version, answer, machine, simulated=simulated)


def _usage(gpus: tuple[Gpu, ...]) -> list[CheckResult]:
    holder = _holder_of()
    return [hardware.usage(gpu, holder(gpu.uuid), IdleRule()) for gpu in gpus]


def _holder_of() -> Callable[[str], Holder | None]:
    """Who holds a GPU of a given UUID. A lease folder that can't be used is told by a line of its own."""
    with suppress(CannotWrite, UsageError):  # UsageError: the policy, which may name the folder, is wrong
        folder = LeaseFolder.existing()
        if folder is not None:
            return folder.holder
    return lambda _uuid: None


def _models(gpus: tuple[Gpu, ...], *, simulated: bool) -> list[CheckResult]:
    working = [gpu for gpu in gpus if gpu.problem is None]
    return models.on_gpus(working, simulated=simulated) if working else [models.on_cpu()]


def _config() -> CheckResult:
    from gpuherd.esd.config import ExperimentConfig

    usual = ExperimentConfig(single_model="org/model")
    # Values other than the defaults, one of each type that options have.
    return storage.config_round_trip(replace(usual, gpu_list=("2,0", 3), max_gpus=8, limit=5, check_interval=0.25))


def _disks() -> list[CheckResult]:
    results = []
    for what, place in (("results", Path.cwd()), ("models", storage.hub_cache())):
        folder, free_gb = storage.find_free_gb(place)
        results.append(storage.disk(what, folder, free_gb, writable=os.access(folder, os.W_OK)))
    return results
