"""The GPUs of a machine at one moment, as plain frozen data: no driver, no decisions.

A figure that the driver can't give is None, never 0 or −1. MB is 2^20 bytes everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

# The end of the UUIDs of simulated GPUs, "SIMGPU" in ASCII: records of them differ from those of real ones.
SIMULATED = "53494d475055"
# The beginning of the stand-in for a UUID that the driver has never been able to read.
UNREAD = "GPU-unreadable-"


class Maker(StrEnum):
    """Who makes a GPU: decides which driver reads it and which environment variables show it to a process."""

    NVIDIA = "NVIDIA"
    AMD = "AMD"


class Proximity(IntEnum):
    """Distance between two GPUs on PCIe, nearest first (the values of NVML's nvmlGpuTopologyLevel_t)."""

    SAME_BOARD = 0
    ONE_SWITCH = 10
    SEVERAL_SWITCHES = 20
    HOST_BRIDGE = 30
    NUMA_NODE = 40
    SYSTEM = 50


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that the driver lists on a GPU.

    ``user`` and ``command`` are None where the pid can't be looked up (another container, or the process has ended);
    ``memory_mb`` is None where the driver doesn't report it (WSL, MIG without rights).
    """

    pid: int
    user: str | None
    command: str | None
    memory_mb: int | None
    compute: bool = True


@dataclass(frozen=True, slots=True)
class Peer:
    """The path from one GPU to another: number of active direct links (NVLink; 1 for XGMI) and distance on PCIe."""

    uuid: str
    nvlinks: int
    proximity: Proximity


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG instance, as the driver described it at one moment.

    Attributes:
        index: the number that people and the maker's runtime use, from 0. NVIDIA: position in PCI-bus order, as CUDA
            counts with CUDA_DEVICE_ORDER=PCI_BUS_ID. AMD: position among the kernel driver's nodes, as
            ROCR_VISIBLE_DEVICES counts. A MIG instance has the index of its parent.
        uuid: ``GPU-…`` or ``MIG-…``: the name that gpuherd uses in leases, records and queues.
        mig_parent: UUID of the whole GPU when this is a MIG instance.
        mig_instances: UUIDs of the instances when this is a GPU in MIG mode (work then runs on those, not on it).
        mig_position: number of the instance on its parent, None for a whole GPU.
        problem: a sentence when the GPU can't be used (fallen off the bus, driver error), else None.
        index_unsure: a GPU with a lower index has a problem, so that the runtime may skip that one and count this one
            differently.
        uncorrected_errors: memory errors that could not be corrected, since the driver was loaded; None where the
            driver doesn't report them, or was not queried for them.
        last_xid: the last critical Xid error since the first query, and ``xids`` how many there have been.
        fault: a sentence about that Xid if it is the GPU's own fault; None for one that a program can cause.
    """

    index: int
    uuid: str
    name: str
    total_mb: int = 0
    used_mb: int = 0
    free_mb: int = 0
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
    fault: str | None = None
    maker: Maker = Maker.NVIDIA

    @property
    def label(self) -> str:
        """The short name for people: ``3`` for a GPU, ``3:1`` for MIG instance 1 on it."""
        return str(self.index) if self.mig_position is None else f"{self.index}:{self.mig_position}"

    @property
    def is_unread(self) -> bool:
        """Whether the driver has never been able to read the UUID; ``uuid`` is then only ``UNREAD`` and a number."""
        return self.uuid.startswith(UNREAD)

    @property
    def visible_name(self) -> str:
        """Its name in the variable that shows GPUs to a process: the index; the UUID where the runtime may count
        differently, for a MIG instance, and for a simulated AMD GPU (no UUID of a real one: ROCm then finds none)."""
        by_uuid = self.mig_parent is not None or self.index_unsure
        if by_uuid or (self.maker is Maker.AMD and self.uuid.endswith(SIMULATED)):
            return self.uuid
        return str(self.index)


@dataclass(frozen=True, slots=True)
class Machine:
    """All GPUs of the machine at one moment, whole GPUs and MIG instances, in the order of their indices.

    ``problem`` is a sentence when there are no GPUs (no driver, or it fails or finds none), else None; ``may_pass``: a
    driver library is installed, so that GPUs may appear once its kernel module works. ``cuda_version``: the newest
    CUDA that an NVIDIA driver supports, None for AMD.
    """

    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    problem: str | None = None
    may_pass: bool = False
    maker: Maker = Maker.NVIDIA
