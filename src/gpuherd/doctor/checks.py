"""Checks of the driver, GPUs, software and storage."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd import __version__
from gpuherd.checks import Answer, CheckResult, Status
from gpuherd.errors import CannotWrite, GpuherdError, UsageError
from gpuherd.gpus.idle import IdleRule, check
from gpuherd.gpus.leases import Holder, LeaseFolder
from gpuherd.gpus.state import Gpu, Machine, Maker, Peer, Proximity
from gpuherd.gpus.visible import variable_of
from gpuherd.jobs.settings import load

if TYPE_CHECKING:
    from gpuherd.esd.config import ExperimentConfig


# The driver, which GPUs are visible, who uses them, and how they are connected. Pure but for ``nvidia_cards``.

_WAYS = {
    Proximity.SAME_BOARD: "same board",
    Proximity.ONE_SWITCH: "same PCIe switch",
    Proximity.SEVERAL_SWITCHES: "joined PCIe switches",
    Proximity.HOST_BRIDGE: "same PCIe host bridge",
}


def nvidia_cards() -> int:
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


# Python, gpuherd, its libraries, and the build of torch. Pure.

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
        answer: of ``gpuherd.doctor.child build``, run with all GPUs visible.
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


# What gpuherd reads and writes: options as JSON and back, the settings files, disk space, the folder of leases, the
# simulation's compiler. Pure but for the ``find_`` functions.

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


def compiler(words: list[str] | None) -> CheckResult:
    """The C compiler, which only ``--simulate`` needs."""
    name = "simulation"
    if words is None:
        remedy = "pip install 'gpuherd[simulate]' brings a compiler, if you want to simulate GPUs"
        return CheckResult(name, Status.SKIP, "no C compiler: --simulate does not work", remedy)
    return CheckResult(name, Status.OK, f"--simulate can compile its driver with {' '.join(words)}")
