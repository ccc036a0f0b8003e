"""Judges the driver, which GPUs are visible, who uses them, and how they are joined. Pure but for ``nvidia_cards``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gpuherd.doctor.result import CheckResult, Status
from gpuherd.gpus.idle import IdleRule, check
from gpuherd.gpus.lease import Holder
from gpuherd.gpus.state import Gpu, Machine, Proximity

_WAYS = {
    Proximity.SAME_BOARD: "on one board",
    Proximity.ONE_SWITCH: "on one PCIe switch",
    Proximity.SEVERAL_SWITCHES: "over several PCIe switches",
    Proximity.HOST_BRIDGE: "over one PCIe host bridge",
    Proximity.NUMA_NODE: "on one NUMA node",
    Proximity.SYSTEM: "across NUMA nodes",
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
    """Sums up how the GPUs are joined: NVLinks, then PCIe nearness, pairs by pairs. MIG instances have no links."""
    name = "interconnect"
    whole = [gpu for gpu in gpus if gpu.mig_parent is None and gpu.problem is None]
    if len(whole) < 2:
        return CheckResult(name, Status.OK, "fewer than two GPUs: nothing to join")
    labels = {gpu.uuid: gpu.label for gpu in whole}
    linked: dict[str, list[str]] = {}
    near: dict[Proximity, list[str]] = {}
    for gpu in whole:
        for peer in gpu.peers:
            # Each pair once, from its lower side.
            if peer.uuid in labels and whole.index(gpu) < list(labels).index(peer.uuid):
                pair = f"{gpu.label}-{labels[peer.uuid]}"
                near.setdefault(peer.proximity, []).append(pair)
                if peer.nvlinks:
                    linked.setdefault(f"{peer.nvlinks} links", []).append(pair)
    if not near:
        remedy = "nothing to do: gpuherd chooses GPUs by memory and load then"
        return CheckResult(name, Status.SKIP, "the driver does not say how the GPUs are joined", remedy)
    nvlink = "NVLink " + _pairs(linked) if linked else "no NVLink"
    return CheckResult(name, Status.OK, f"{nvlink}; {_pairs({_WAYS[way]: near[way] for way in sorted(near)})}")


def _pairs(groups: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{', '.join(pairs)} {how}" for how, pairs in groups.items())
