"""What is known of a GPU at one moment, as plain frozen data; and whose its processes are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


# What is known of a GPU at one moment: plain frozen data, no driver, no decisions.
#
# A figure that the driver can't give is None, never 0 or −1. MB is 2^20 bytes everywhere.

# The end of the UUIDs of simulated GPUs, "SIMGPU" in ASCII: what was recorded of them is known for what it is.
SIMULATED = "53494d475055"


class Proximity(IntEnum):
    """How far apart two GPUs are on PCIe, nearest first (NVML's nvmlGpuTopologyLevel_t values)."""

    SAME_BOARD = 0
    ONE_SWITCH = 10
    SEVERAL_SWITCHES = 20
    HOST_BRIDGE = 30
    NUMA_NODE = 40
    SYSTEM = 50


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that the driver lists on a GPU.

    ``user`` and ``command`` are None where the pid can't be looked up (another container, or already gone);
    ``memory_mb`` is None where the driver does not say (WSL, MIG without rights).
    """

    pid: int
    user: str | None
    command: str | None
    memory_mb: int | None
    compute: bool = True


@dataclass(frozen=True, slots=True)
class Peer:
    """The way from one GPU to another: number of active NVLinks (0 for none) and nearness on PCIe."""

    uuid: str
    nvlinks: int
    proximity: Proximity


UNREAD = "GPU-unreadable-"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG instance, as the driver saw it at one moment.

    Attributes:
        index: position in PCI-bus order, from 0: the number that people use, and CUDA with
            CUDA_DEVICE_ORDER=PCI_BUS_ID. A MIG instance has the index of its parent.
        uuid: ``GPU-…`` or ``MIG-…``: the name that gpuherd uses inside.
        mig_parent: UUID of the whole GPU when this is a MIG instance.
        mig_instances: UUIDs of the instances when this is a GPU in MIG mode (work then runs on those, not on it).
        mig_position: number of the instance on its parent, None for a whole GPU.
        problem: a sentence when the GPU can't be used (fallen off the bus, driver error), else None.
        index_unsure: a GPU before it in PCI order has a problem, so that CUDA may leave that one out and count this one
            differently.
        uncorrected_errors: memory errors that could not be corrected, since the driver was loaded; None where the
            driver does not tell, or was not asked.
        last_xid: the last critical Xid error since we first looked, and ``xids`` how many there have been.
    """

    index: int
    uuid: str
    name: str
    total_mb: int
    used_mb: int
    free_mb: int
    pci_bus_id: str | None = None
    numa_node: int | None = None
    utilisation_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    compute_capability: tuple[int, int] | None = None
    multi_processor_count: int | None = None
    mig_parent: str | None = None
    mig_position: int | None = None
    mig_instances: tuple[str, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    peers: tuple[Peer, ...] = ()
    problem: str | None = None
    index_unsure: bool = False
    uncorrected_errors: int | None = None
    last_xid: int | None = None
    xids: int = 0

    @property
    def label(self) -> str:
        """The short name for people: ``3`` for a GPU, ``3:1`` for MIG instance 1 on it."""
        return str(self.index) if self.mig_position is None else f"{self.index}:{self.mig_position}"

    @property
    def is_unread(self) -> bool:
        """Whether the driver has never told which GPU this is; the UUID is then only ``UNREAD`` and a number."""
        return self.uuid.startswith(UNREAD)

    @property
    def cuda_name(self) -> str:
        """What names this GPU in CUDA_VISIBLE_DEVICES: its index under PCI_BUS_ID order; its UUID where CUDA may count
        differently, and for a MIG instance."""
        return self.uuid if self.mig_parent is not None or self.index_unsure else str(self.index)


@dataclass(frozen=True, slots=True)
class Machine:
    """All GPUs of the machine at one moment, whole GPUs and MIG instances, in PCI order.

    ``problem`` is one plain sentence when there are no GPUs (no driver, or it fails or finds none), else None;
    ``may_pass``: a driver library is installed, so that GPUs may appear once its kernel module works.
    """

    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    problem: str | None = None
    may_pass: bool = False


# Whose process is this pid, and what is it called: the one place of this room that asks the operating system.
#
# Knows psutil and nothing of GPUs. It gives the program's short name, never its arguments, which may hold secrets. A
# pid that can't be looked up (another container's, or already gone) has neither user nor name: both are None.


@dataclass(frozen=True, slots=True)
class Identity:
    """Owner and short program name of a process; None for what the system does not tell."""

    user: str | None
    command: str | None


UNKNOWN = Identity(None, None)


class ProcessTable:
    """Remembers who a pid is, so that looking at the same GPUs ten times a second stays cheap.

    An entry is used only while the process is the one that was looked up: a pid that was given to another process
    meanwhile (other start time) is looked up anew.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[psutil.Process, Identity]] = {}

    def identify(self, pid: int) -> Identity:
        """Owner and name of the process with this pid, both None when it is not (or no longer) visible to us."""
        known = self._known.get(pid)
        if known is not None and known[0].is_running():
            return known[1]
        self._known.pop(pid, None)
        import psutil  # commands that only plan need none

        try:
            process = psutil.Process(pid)
            identity = Identity(process.username(), _printable(process.name()))
        except (psutil.Error, ValueError, OverflowError):
            return UNKNOWN
        self._known[pid] = (process, identity)
        return identity

    def keep_only(self, pids: set[int]) -> None:
        """Forgets all other pids, so that the table does not grow for as long as we run."""
        for pid in self._known.keys() - pids:
            del self._known[pid]


def _printable(name: str) -> str:
    """A process may call itself anything, also what moves a terminal's cursor."""
    return "".join(character if character.isprintable() else "?" for character in name)
