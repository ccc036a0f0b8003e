"""All checks of ``gpuherd doctor``, in order, each ready to run. The findings are judged in ``checks``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpuherd.checks import Answer, CheckResult, Status, ask, version_of
from gpuherd.doctor import checks, models
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.registry import LOCAL, specs
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.gpus.idle import IdleRule
from gpuherd.gpus.leases import Holder, LeaseFolder
from gpuherd.gpus.query import GpuReader
from gpuherd.gpus.state import Gpu, Machine
from gpuherd.gpus.visible import VARIABLES, value_in, visible_in
from gpuherd.jobs.lock import kind_of, may_be_shared

_TORCH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Step:
    """Checks that run together. ``title`` is shown while they run."""

    title: str
    run: Callable[[], list[CheckResult]]


def steps(*, simulated: bool, compiler: list[str] | None, options: EngineOptions | None = None) -> Iterator[Step]:
    """All checks of this machine, in the order in which they explain each other.

    Args:
        simulated: whether the GPUs that this process sees are simulated.
        compiler: the compile command that ``--simulate`` would use, None if there is none.
        options: of an engine that is to be checked too; None for a line on what is installed.
    """
    machine = GpuReader().snapshot(topology=True)
    inherited, shown = value_in(os.environ, machine.maker), visible_in(machine.gpus, os.environ)
    torch = version_of("torch")
    yield Step("versions", lambda: [checks.python(), _libraries()])
    cards = checks.nvidia_cards()
    yield Step(f"the {machine.maker} driver", lambda: [checks.driver(machine, cards, simulated=simulated)])
    yield Step("torch", lambda: [_torch(torch, machine, simulated=simulated)])
    yield Step("visible GPUs", lambda: [checks.visibility(inherited, machine, shown)])
    yield Step("who uses the GPUs", lambda: _usage(shown))
    yield Step("the interconnect", lambda: [checks.interconnect(shown)] if machine.gpus else [])
    if torch is not None:
        yield Step("a small model on each device", lambda: _models(shown, simulated=simulated))
    yield Step("options", lambda: [_config(), checks.find_settings()])
    yield Step("disk and leases", lambda: [*_disks(), checks.find_leases(), checks.compiler(compiler)])
    yield Step("clusters", lambda: _clusters(options))


def _clusters(options: EngineOptions | None) -> list[CheckResult]:
    here = Path.cwd()
    if options is None:
        return [engines_here(), *queues_on(here, kind_of(here))]
    return [*options.spec.doctor(options), folder_on(here, kind_of(here), options.engine)]


def engines_here() -> CheckResult:
    """Which engines beyond this machine are installed, in one line: none of them is looked at."""
    clusters = [spec for spec in specs() if spec.name != LOCAL]
    there = {spec.name: what for spec in clusters if (what := spec.installed()) is not None}
    if not there:
        titles = [spec.title for spec in clusters]
        detail = f"neither {', '.join(titles[:-1])} nor {titles[-1]} is here"
        return CheckResult("clusters", Status.SKIP, detail, "needed for --engine only")
    remedy = f"gpuherd doctor --engine {next(iter(there))} looks at it"
    return CheckResult("clusters", Status.SKIP, f"{' and '.join(there.values())}: not looked at", remedy)


def folder_on(folder: Path, kind: str, engine: str) -> CheckResult:
    """Judges by the kind of its file system whether nodes can see this folder."""
    name = "shared folder"
    if kind and not may_be_shared(kind):
        remedy = f"--engine {engine} wants its --output-dir on a file system that all nodes have at the same place"
        return CheckResult(name, Status.WARN, f"{folder} is on {kind}, which only this machine sees", remedy)
    if not kind:
        return CheckResult(name, Status.WARN, f"what {folder} lies on is not known", "see findmnt")
    detail = f"{folder} is on {kind}; its queue is opened on one machine at a time"
    return CheckResult(name, Status.OK, detail)


def queues_on(folder: Path, kind: str) -> list[CheckResult]:
    """A warning about queues of runs in this folder where other machines may see it; else none."""
    if not kind or not may_be_shared(kind):
        return []
    detail = f"{folder} is on {kind}, which other machines may see: a queue here is opened on one machine at a time"
    remedy = "look at a run on the machine that works on it; or give it an --output-dir on a disk of its own"
    return [CheckResult("queues", Status.WARN, detail, remedy)]


def _libraries() -> CheckResult:
    return checks.libraries({name: version_of(name) for name in (*checks.CORE, *checks.ESD)})


def _torch(version: str | None, machine: Machine, *, simulated: bool) -> CheckResult:
    answer = Answer()
    if version is not None:
        # All GPUs: another check is about what hides some of them.
        environment = dict.fromkeys(VARIABLES)
        answer = ask("gpuherd.doctor.child", ["build"], environment=environment, timeout_s=_TORCH_TIMEOUT_S)
    return checks.torch_build(version, answer, machine, simulated=simulated)


def _usage(gpus: tuple[Gpu, ...]) -> list[CheckResult]:
    holder = _holder_of()
    return [checks.usage(gpu, holder(gpu.uuid), IdleRule()) for gpu in gpus]


def _holder_of() -> Callable[[str], Holder | None]:
    """The holder of a GPU by its UUID. A lease folder that can't be used has a check of its own."""
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
    return checks.config_round_trip(replace(usual, gpu_list=("2,0", 3), max_gpus=8, limit=5, check_interval=0.25))


def _disks() -> list[CheckResult]:
    results = []
    for what, place in (("results", Path.cwd()), ("models", checks.hub_cache())):
        folder, free_gb = checks.find_free_gb(place)
        results.append(checks.disk(what, folder, free_gb, writable=os.access(folder, os.W_OK)))
    return results
