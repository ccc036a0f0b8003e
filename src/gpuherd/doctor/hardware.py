"""Judges the driver, which GPUs are visible, who uses them, and how they are joined. Pure but for ``nvidia_cards``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from gpuherd.doctor.result import CheckResult, Status
from gpuherd.gpus.idle import IdleRule, check
from gpuherd.gpus.lease import Holder
from gpuherd.gpus.state import Gpu, Machine, Peer, Proximity

_WAYS = {
    Proximity.SAME_BOARD: "same board",
    Proximity.ONE_SWITCH: "same PCIe switch",
    Proximity.SEVERAL_SWITCHES: "joined PCIe switches",
    Proximity.HOST_BRIDGE: "same PCIe host bridge",
}


def nvidia_cards() -> int:
    """How many NVIDIA display or compute devices are on the PCI bus, whether or not there is a driver for them."""
    cards = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
            cards += vendor == "0x10de" and kind.startswith("0x03")
    return cards


def driver(machine: Machine, cards: int, *, simulated: bool) -> CheckResult:
    """Judges the driver. None at all is well on a machine without NVIDIA GPUs: gpuherd then runs on the CPU."""
    if machine.problem is None:
        count = len([gpu for gpu in machine.gpus if gpu.mig_parent is None])
        gpus = "1 GPU" if count == 1 else f"{count} GPUs"
        detail = f"NVIDIA driver {machine.driver_version}, CUDA {machine.cuda_version}, {gpus}"
        return CheckResult("driver", Status.OK, f"{detail}, SIMULATED: jobs run on the CPU" if simulated else detail)
    if simulated:
        detail = f"the simulated driver fails: {machine.problem}"
        return CheckResult("driver", Status.FAIL, detail, "look at the state file that --simulate was given")
    if cards == 0:
        detail = f"no GPU to use: {machine.problem}; there is no NVIDIA card here, so everything runs on the CPU"
        return CheckResult("driver", Status.OK, detail)
    remedy = "install or repair NVIDIA's driver; in a container, start it with the GPUs passed through"
    return CheckResult("driver", Status.FAIL, f"{cards} NVIDIA cards, but {machine.problem}", remedy)


def visibility(value: str | None, machine: Machine, shown: Sequence[Gpu]) -> CheckResult:
    """Explains an inherited CUDA_VISIBLE_DEVICES (``value``), which shows the GPUs ``shown``."""
    name = "CUDA_VISIBLE_DEVICES"
    if value is None:
        return CheckResult(name, Status.OK, "not set: gpuherd may use every GPU that is free")
    if not machine.gpus:
        return CheckResult(name, Status.OK, f"is {value!r}, which means nothing without GPUs")
    remedy = "unset CUDA_VISIBLE_DEVICES to let gpuherd use all GPUs, or correct it"
    if not shown:
        return CheckResult(name, Status.WARN, f"is {value!r}, which hides every GPU: jobs run on the CPU", remedy)
    labels = ", ".join(gpu.label for gpu in shown)
    detail = f"is {value!r}: gpuherd uses only GPU {labels} (numbers in PCI order)"
    entries = value.split(",")
    if len(shown) < len(entries):
        detail += f"; CUDA stops reading at {entries[len(shown)]!r}, which names no GPU"
        return CheckResult(name, Status.WARN, detail, remedy)
    return CheckResult(name, Status.OK, detail)


def usage(gpu: Gpu, holder: Holder | None, rule: IdleRule) -> CheckResult:
    """Says whether a GPU is free at this moment, or why not."""
    name = f"GPU {gpu.label}"
    if gpu.problem is not None:
        remedy = "ask the machine's administrator: nvidia-smi -q and the kernel's log (Xid) say more"
        return CheckResult(name, Status.FAIL, f"{gpu.name}: {gpu.problem}", remedy)
    size = f"{gpu.name}, {gpu.used_mb} of {gpu.total_mb} MB used"
    if holder is not None:
        who = f" by {holder.user}" if holder.user else ""
        job = f" (job {holder.job})" if holder.job else ""
        return CheckResult(name, Status.WARN, f"{size}; taken by gpuherd{who}{job}", "nothing to do: jobs wait for it")
    found = check(gpu, rule)
    if found.free:
        return CheckResult(name, Status.OK, f"{size}; free")
    remedy = "nothing to do: jobs wait until it is free (if only a display uses it, raise --gpu-mem-threshold)"
    return CheckResult(name, Status.WARN, f"{size}; busy: {found.reason}", remedy)


def interconnect(gpus: Sequence[Gpu]) -> CheckResult:
    """Sums up how the GPUs are joined: NVLinks, PCIe switches, NUMA nodes. MIG instances have no links."""
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
            linked.setdefault(f"NVLink x{peer.nvlinks}", []).append(pair)
        if peer.proximity < Proximity.NUMA_NODE:
            near.setdefault(_WAYS[peer.proximity], []).append(pair)
    nodes: dict[str, list[str]] = {}
    for gpu in whole:
        if gpu.numa_node is not None:
            nodes.setdefault(f"NUMA node {gpu.numa_node}", []).append(gpu.label)
    groups = (linked or {"no NVLink": []}) | near | nodes
    return CheckResult(
        name, Status.OK, "; ".join(": ".join(filter(None, (how, ", ".join(who)))) for how, who in groups.items())
    )


def _pairs(gpu: Gpu, gpus: Sequence[Gpu]) -> Iterator[tuple[str, Peer]]:
    """The ways from a GPU to those after it in the list, named ``0-1``: so each pair comes once."""
    after = {other.uuid: other for other in gpus[gpus.index(gpu) + 1 :]}
    for peer in gpu.peers:
        if peer.uuid in after:
            yield f"{gpu.label}-{after[peer.uuid].label}", peer
