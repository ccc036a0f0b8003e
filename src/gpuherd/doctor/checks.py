"""All checks of ``gpuherd doctor``: the steps in order, then functions that judge what was found. Only the functions
with ``find`` in their names and the steps look at the machine.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd import __version__
from gpuherd.checks import Answer, CheckResult, Status, ask, version_of
from gpuherd.doctor import models
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.registry import LOCAL, specs
from gpuherd.errors import CannotWrite, GpuherdError, UsageError
from gpuherd.gpus.idle import IdleRule, check
from gpuherd.gpus.leases import Holder, LeaseFolder
from gpuherd.gpus.query import GpuReader
from gpuherd.gpus.state import Gpu, Machine, Maker, Peer, Proximity
from gpuherd.gpus.visible import VARIABLES, value_in, variable_of, visible_in
from gpuherd.jobs.lock import kind_of, may_be_shared
from gpuherd.jobs.settings import load

if TYPE_CHECKING:
    from gpuherd.esd.config import ExperimentConfig


_TORCH_TIMEOUT_S = 120.0

# --- the steps --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckStep:
    """Checks that run together. ``title`` is shown while they run."""

    title: str
    run: Callable[[], list[CheckResult]]


def steps(*, simulated: bool, compiler: list[str] | None, options: EngineOptions | None = None) -> Iterator[CheckStep]:
    """All checks of this machine, in the order in which they explain each other.

    Args:
        simulated: whether the GPUs that this process sees are simulated.
        compiler: the compile command that ``--simulate`` would use, None if there is none.
        options: of an engine that is to be checked too; None for a line on what is installed.
    """
    machine = GpuReader().snapshot(topology=True)
    inherited, shown = value_in(os.environ, machine.maker), visible_in(machine.gpus, os.environ)
    torch = version_of("torch")
    yield CheckStep("versions", lambda: [python(), _libraries()])
    cards = find_nvidia_cards()
    yield CheckStep(f"the {machine.maker} driver", lambda: [driver(machine, cards, simulated=simulated)])
    yield CheckStep("torch", lambda: [_torch(torch, machine, simulated=simulated)])
    yield CheckStep("visible GPUs", lambda: [visibility(inherited, machine, shown)])
    yield CheckStep("who uses the GPUs", lambda: _usage(shown))
    yield CheckStep("the interconnect", lambda: [interconnect(shown)] if machine.gpus else [])
    if torch is not None:
        yield CheckStep("a small model on each device", lambda: _models(shown, simulated=simulated))
    yield CheckStep("options", lambda: [_config(), find_settings()])
    yield CheckStep("disk and leases", lambda: [*_disks(), find_leases(), simulation(compiler)])
    yield CheckStep("clusters", lambda: _clusters(options))


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
    return libraries({name: version_of(name) for name in (*CORE, *ESD)})


def _torch(version: str | None, machine: Machine, *, simulated: bool) -> CheckResult:
    answer = Answer()
    if version is not None:
        # All GPUs: another check is about what hides some of them.
        environment = dict.fromkeys(VARIABLES)
        answer = ask("gpuherd.doctor.models", ["build"], environment=environment, timeout_s=_TORCH_TIMEOUT_S)
    return torch_build(version, answer, machine, simulated=simulated)


def _usage(gpus: tuple[Gpu, ...]) -> list[CheckResult]:
    holder = _holder_of()
    return [usage(gpu, holder(gpu.uuid), IdleRule()) for gpu in gpus]


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
    return config_round_trip(replace(usual, gpu_list=("2,0", 3), max_gpus=8, limit=5, check_interval=0.25))


def _disks() -> list[CheckResult]:
    results = []
    for what, place in (("results", Path.cwd()), ("models", hub_cache())):
        folder, free_gb = find_free_gb(place)
        results.append(disk(what, folder, free_gb, writable=os.access(folder, os.W_OK)))
    return results


# --- the driver, which GPUs are visible, who uses them, and how they are connected ------------------------------------

_WAYS = {
    Proximity.SAME_BOARD: "same board",
    Proximity.ONE_SWITCH: "same PCIe switch",
    Proximity.SEVERAL_SWITCHES: "joined PCIe switches",
    Proximity.HOST_BRIDGE: "same PCIe host bridge",
}


def find_nvidia_cards() -> int:
    """Number of NVIDIA display and compute devices on the PCI bus, with or without a driver."""
    cards = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
            cards += vendor == "0x10de" and kind.startswith("0x03")
    return cards


def driver(machine: Machine, cards: int, *, simulated: bool) -> CheckResult:
    """The driver. A machine without NVIDIA GPUs needs none: gpuherd then runs on the CPU."""
    if machine.problem is None:
        count = len([gpu for gpu in machine.gpus if gpu.mig_parent is None])
        gpus = "1 GPU" if count == 1 else f"{count} GPUs"
        cuda = "" if machine.cuda_version is None else f"CUDA {machine.cuda_version}, "
        detail = f"{machine.maker} driver {machine.driver_version}, {cuda}{gpus}"
        return CheckResult("driver", Status.OK, f"{detail}, SIMULATED: jobs run on the CPU" if simulated else detail)
    if simulated:
        detail = f"the simulated driver fails: {machine.problem}"
        return CheckResult("driver", Status.FAIL, detail, "look at the state file that --simulate was given")
    if machine.maker is Maker.AMD:
        remedy = "install or repair AMD's driver (amdgpu); in a container, start it with /dev/kfd and /dev/dri"
        return CheckResult("driver", Status.FAIL, f"no GPU to use: {machine.problem}", remedy)
    if cards == 0:
        detail = f"no GPU to use: {machine.problem}; there is no NVIDIA card here, so everything runs on the CPU"
        return CheckResult("driver", Status.OK, detail)
    remedy = "install or repair NVIDIA's driver; in a container, start it with the GPUs passed through"
    return CheckResult("driver", Status.FAIL, f"{cards} NVIDIA cards, but {machine.problem}", remedy)


def visibility(value: str | None, machine: Machine, shown: Sequence[Gpu]) -> CheckResult:
    """An inherited list of GPUs (``value``), which shows the GPUs ``shown``."""
    name, of_nvidia = variable_of(machine.maker), machine.maker is Maker.NVIDIA
    if value is None:
        return CheckResult(name, Status.OK, "not set: gpuherd may use every GPU that is free")
    if not machine.gpus:
        return CheckResult(name, Status.OK, f"is {value!r}, which means nothing without GPUs")
    remedy = f"unset {name} to let gpuherd use all GPUs, or correct it"
    if not shown:
        return CheckResult(name, Status.WARN, f"is {value!r}, which hides every GPU: jobs run on the CPU", remedy)
    labels = ", ".join(gpu.label for gpu in shown)
    detail = f"is {value!r}: gpuherd uses only GPU {labels}" + (" (numbers in PCI order)" if of_nvidia else "")
    entries = value.split(",")
    if len(shown) < len(entries):
        detail += f"; {'CUDA' if of_nvidia else 'ROCm'} stops reading at {entries[len(shown)]!r}, which names no GPU"
        return CheckResult(name, Status.WARN, detail, remedy)
    return CheckResult(name, Status.OK, detail)


def usage(gpu: Gpu, holder: Holder | None, rule: IdleRule) -> CheckResult:
    """Whether a GPU is free at this moment, or why not."""
    name = f"GPU {gpu.label}"
    if gpu.problem is not None:
        tools = {Maker.NVIDIA: "nvidia-smi -q and the kernel's log (Xid)", Maker.AMD: "amd-smi and the kernel's log"}
        remedy = f"ask the machine's administrator: {tools[gpu.maker]} say more"
        return CheckResult(name, Status.FAIL, f"{gpu.name}: {gpu.problem}", remedy)
    size = f"{gpu.name}, {gpu.used_mb} of {gpu.total_mb} MB used"
    if holder is not None:
        return CheckResult(name, Status.WARN, f"{size}; {holder.sentence()}", "nothing to do: jobs wait for it")
    found = check(gpu, rule)
    if found.free:
        return CheckResult(name, Status.OK, f"{size}; free")
    remedy = "nothing to do: jobs wait until it is free (if only a display uses it, raise --gpu-mem-threshold)"
    return CheckResult(name, Status.WARN, f"{size}; busy: {found.reason}", remedy)


def interconnect(gpus: Sequence[Gpu]) -> CheckResult:
    """How the GPUs are connected: NVLinks, PCIe switches, NUMA nodes. MIG instances have no links."""
    name = "interconnect"
    whole = [gpu for gpu in gpus if gpu.mig_parent is None and gpu.problem is None]
    if len(whole) < 2:
        return CheckResult(name, Status.OK, "fewer than two GPUs: nothing to join")
    ways = {pair: peer for gpu in whole for pair, peer in _pairs(gpu, whole)}
    if not ways:
        remedy = "nothing to do: gpuherd chooses GPUs by memory and load then"
        return CheckResult(name, Status.SKIP, "the driver does not say how the GPUs are joined", remedy)
    linked: dict[str, list[str]] = {}
    near: dict[str, list[str]] = {}
    for pair, peer in ways.items():
        if peer.nvlinks:
            link = f"NVLink x{peer.nvlinks}" if whole[0].maker is Maker.NVIDIA else "XGMI"
            linked.setdefault(link, []).append(pair)
        if peer.proximity < Proximity.NUMA_NODE:
            near.setdefault(_WAYS[peer.proximity], []).append(pair)
    nodes: dict[str, list[str]] = {}
    for gpu in whole:
        if gpu.numa_node is not None:
            nodes.setdefault(f"NUMA node {gpu.numa_node}", []).append(gpu.label)
    groups = (linked or {"no NVLink" if whole[0].maker is Maker.NVIDIA else "no XGMI": []}) | near | nodes
    return CheckResult(
        name, Status.OK, "; ".join(": ".join(filter(None, (how, ", ".join(who)))) for how, who in groups.items())
    )


def _pairs(gpu: Gpu, gpus: Sequence[Gpu]) -> Iterator[tuple[str, Peer]]:
    """The connections from a GPU to those after it in the list, named ``0-1``: each pair comes once."""
    after = {other.uuid: other for other in gpus[gpus.index(gpu) + 1 :]}
    for peer in gpu.peers:
        if peer.uuid in after:
            yield f"{gpu.label}-{after[peer.uuid].label}", peer


# --- Python, gpuherd, its libraries, and the build of torch -----------------------------------------------------------

CORE = ("nvidia-ml-py", "psutil", "rich", "shtab")
ESD = ("huggingface_hub", "numpy", "scipy")
_ADD_ESD = "pip install 'gpuherd[esd]'"


def python() -> CheckResult:
    """The versions of gpuherd and Python."""
    detail = f"gpuherd {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return CheckResult("gpuherd", Status.OK, detail)


def libraries(versions: Mapping[str, str | None]) -> CheckResult:
    """The libraries that gpuherd needs (``CORE``) and those of the spectral analysis (``ESD``)."""
    detail = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = [name for name, version in versions.items() if version is None]
    if not missing:
        return CheckResult("libraries", Status.OK, detail)
    detail = f"not installed: {', '.join(missing)}" + (f" (there are {detail})" if detail else "")
    if any(name in CORE for name in missing):
        return CheckResult("libraries", Status.FAIL, detail, f"pip install {' '.join(missing)}")
    return CheckResult("libraries", Status.WARN, f"{detail}; gpuherd esd needs them", _ADD_ESD)


def torch_build(version: str | None, answer: Answer, machine: Machine, *, simulated: bool) -> CheckResult:
    """torch: is it installed, does it start, and does its build fit this machine?

    Args:
        version: of the installed distribution, None if there is none.
        answer: of ``gpuherd.doctor.models build``, run with all GPUs visible.
    """
    if version is None:
        return CheckResult("torch", Status.WARN, "torch is not installed; gpuherd esd needs it", _ADD_ESD)
    reinstall = f"pip install --force-reinstall torch=={version.partition('+')[0]}"
    if answer.error is not None:
        return CheckResult("torch", Status.FAIL, f"torch {version} does not start: {answer.error}", reinstall)
    build: Mapping[str, Any] = answer.values
    cuda: str | None = build["cuda"]
    rocm: str | None = build.get("rocm")
    runtime = f"built for CUDA {cuda}" if cuda else f"built for ROCm {rocm}" if rocm else "CPU-only build"
    kind = f"torch {build['version']}, {runtime}"
    if simulated:
        return CheckResult("torch", Status.OK, f"{kind}; on simulated GPUs it runs on the CPU")
    if not machine.gpus:
        return CheckResult("torch", Status.OK, f"{kind}; runs on the CPU here")
    if (cuda if machine.maker is Maker.NVIDIA else rocm) is None:
        detail = f"{kind}, though this machine has an {machine.maker} driver: models would run on the CPU"
        return CheckResult("torch", Status.FAIL, detail, reinstall)
    if build["available"]:
        return CheckResult("torch", Status.OK, f"{kind}, sees {build['devices']} GPUs")
    if cuda is not None and machine.cuda_version is not None and _major(cuda) > _major(machine.cuda_version):
        detail = f"{kind}, but the driver supports CUDA only up to {machine.cuda_version}"
        return CheckResult("torch", Status.FAIL, detail, f"install an NVIDIA driver for CUDA {cuda} or later")
    detail = f"{kind}, but it finds no GPU though the driver lists {len(machine.gpus)}"
    modules = "nvidia and nvidia_uvm modules" if machine.maker is Maker.NVIDIA else "amdgpu module"
    remedy = f"in a container start it with all GPU devices; else reboot, or reload the {modules}"
    return CheckResult("torch", Status.FAIL, detail, remedy)


def _major(version: str) -> int:
    return int(version.partition(".")[0])


# --- options as JSON and back, settings files, disk space, leases, the simulation's compiler --------------------------

LEAST_GB = 10.0


def config_round_trip(config: ExperimentConfig) -> CheckResult:
    """Whether a configuration comes back equal from JSON, in which workers and a run's record get it."""
    name = "config"
    remedy = "report this: options would reach workers changed; a fresh installation may mend it"
    try:
        back = type(config).from_dict(json.loads(json.dumps(config.to_dict())))
    except (TypeError, ValueError, GpuherdError) as problem:
        return CheckResult(name, Status.FAIL, f"options do not survive JSON: {problem}", remedy)
    if back != config:
        return CheckResult(name, Status.FAIL, f"options come back changed from JSON: {back} for {config}", remedy)
    return CheckResult(name, Status.OK, "options come back unchanged from JSON")


def find_settings() -> CheckResult:
    """Whether the user's settings and the machine's policy can be used."""
    name = "settings"
    try:
        settings = load()
    except UsageError as problem:
        return CheckResult(name, Status.FAIL, str(problem), "correct that file: until then no job can be started")
    if settings.warnings:
        return CheckResult(name, Status.WARN, "; ".join(settings.warnings), "ask who looks after this machine")
    files = [str(path) for path in (settings.path, settings.policy.path) if path is not None]
    return CheckResult(name, Status.OK, f"read from {' and '.join(files)}" if files else "no settings files; defaults")


def hub_cache() -> Path:
    """The folder of huggingface_hub's downloads."""
    home = os.environ.get("HF_HOME")
    base = home or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    # expanduser leaves the ~ for a user without a home, where Path's would raise.
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or f"{base}/hub"))  # noqa: PTH111


def find_free_gb(path: Path) -> tuple[Path, float]:
    """The nearest folder above ``path`` that exists, and the GB (2^30 bytes) that this user may still write there."""
    there = path.absolute()
    while not there.is_dir():
        there = there.parent
    return there, shutil.disk_usage(there).free / (1 << 30)


def disk(what: str, folder: Path, free_gb: float, *, writable: bool) -> CheckResult:
    """Free disk space for ``what`` (models, results)."""
    name = f"disk for {what}"
    if not writable:
        return CheckResult(name, Status.WARN, f"{folder} can't be written", _move(what))
    detail = f"{free_gb:.1f} GB free in {folder}"
    if free_gb < LEAST_GB:
        return CheckResult(name, Status.WARN, f"{detail}, less than {LEAST_GB:.0f} GB", f"make room, or {_move(what)}")
    return CheckResult(name, Status.OK, detail)


def _move(what: str) -> str:
    return "set HF_HOME to another disk" if what == "models" else "give another folder: --output-dir DIR"


def find_leases() -> CheckResult:
    """Whether GPUs can be leased in the machine's folder: takes and frees one of a GPU that does not exist."""
    name = "leases"
    try:
        folder = LeaseFolder.default()
        lease = folder.acquire(f"doctor-{os.getuid()}")
    except (CannotWrite, UsageError) as problem:
        return CheckResult(name, Status.FAIL, str(problem), "repair or remove that folder, or set GPUHERD_LEASE_DIR")
    if lease is not None:
        lease.close()
    return CheckResult(name, Status.OK, f"GPUs are leased in {folder.path}")


def simulation(words: list[str] | None) -> CheckResult:
    """The C compiler, which only ``--simulate`` needs."""
    name = "simulation"
    if words is None:
        remedy = "pip install 'gpuherd[simulate]' brings a compiler, if you want to simulate GPUs"
        return CheckResult(name, Status.SKIP, "no C compiler: --simulate does not work", remedy)
    return CheckResult(name, Status.OK, f"--simulate can compile its driver with {' '.join(words)}")
