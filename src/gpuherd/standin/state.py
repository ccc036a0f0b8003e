"""The state file of a simulated machine: its layout, its first content, and which of its processes are alive."""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from ctypes import Array, Structure, c_char, c_int64, c_uint8, c_uint32, c_uint64
from pathlib import Path
from typing import Annotated, TypeVar, get_args, get_type_hints

from gpuherd.gpus.state import SIMULATED, Maker

# The fields mirror those of ``state.h``. The file is exactly one ``State``. A writer holds an exclusive flock on it;
# the libraries read under a shared one (``state.h`` says why). A change of the layout raises ``LAYOUT_VERSION`` here
# and in ``state.h``; a test compares both.

LAYOUT_VERSION = 4
MAGIC = b"gpuherd standin"
MAX_GPUS = 32
MAX_DEVICES = 128
MAX_PROCESSES = 512
MAX_LINKS = 18
MAX_MIG_INSTANCES = 7
MAKERS = (Maker.NVIDIA, Maker.AMD)
FOLLOWS_USE = 0xFFFFFFFF  # in place of a figure: low when the GPU is idle, high when something runs on it

U32 = Annotated[int, c_uint32]
U64 = Annotated[int, c_uint64]
_Layout = TypeVar("_Layout", bound=type[Structure])


def _laid_out(structure: _Layout) -> _Layout:
    """Lays the structure out by the ctypes of its annotations."""
    hints = get_type_hints(structure, include_extras=True)
    structure._fields_ = [(name, get_args(hint)[1]) for name, hint in hints.items() if not name.startswith("_")]
    return structure


@_laid_out
class Device(Structure):
    """A GPU or a MIG instance."""

    uuid: Annotated[bytes, c_char * 64]
    name: Annotated[bytes, c_char * 64]
    serial: Annotated[bytes, c_char * 32]
    total: U64  # bytes
    ghost: U64  # bytes in use that no listed process owns
    parent: U32  # 1 + the GPU that this MIG instance is cut from; 0 for a whole GPU
    position: U32  # number of the MIG instance on its GPU
    pci_bus: U32
    numa_node: U32
    lost: U32  # 1: fallen off the bus
    mig_mode: U32  # 1: split into instances
    utilisation: U32  # percent, or FOLLOWS_USE
    temperature: U32  # degrees Celsius, or FOLLOWS_USE
    power: U32  # milliwatts, or FOLLOWS_USE
    power_limit: U32  # milliwatts
    capability_major: U32
    capability_minor: U32
    multiprocessors: U32
    compute_mode: U32
    ecc_errors: U64  # uncorrectable ones since the driver was loaded
    xid: U32  # the last critical Xid error
    xids: U32  # how many there have been


@_laid_out
class Process(Structure):
    """Memory that a process holds on a device. It counts while the process lives and ``until`` has not come."""

    counts: U32  # 1: this entry is in use; written last
    device: U32
    pid: U32
    phantom: U32  # 1: no such process need exist
    graphics: U32  # 1: a display process
    ticket: U32  # tells entries apart that have used the same place
    start: U64  # clock ticks since boot: a pid that is used again is another process
    bytes: U64
    until: Annotated[int, c_int64]  # CLOCK_MONOTONIC nanoseconds; 0: for good


@_laid_out
class State(Structure):
    """The whole file."""

    magic: Annotated[bytes, c_char * 16]
    version: U32
    size: U32
    seed: Annotated[Array[c_uint8], c_uint8 * 16]  # makes the UUIDs unique
    creator_start: U64
    creator_pid: U32
    gpus: U32  # whole GPUs: the first entries of ``device``
    attribute: U32  # 1: tagged jobs show with their own memory
    hide_pids: U32  # 1: as in a container: memory is in use, but no process is listed
    hide_memory: U32  # 1: processes are listed without their memory
    fail_name: Annotated[bytes, c_char * 60]  # the only function that fails; empty: all do
    fail_device: U32  # 1 + the only device whose calls fail; 0: calls about any, and those about none
    fail_code: U32  # the library's code that these calls answer, if not 0
    fail_calls: U32  # how many calls more; 0: until it is changed
    latency: U32  # microseconds that every call takes
    cuda_version: U32
    devices: U32  # whole GPUs and MIG instances
    calls: U64  # calls answered so far
    maker: U32  # position in MAKERS: only that maker's library finds the machine
    smi_version: U32  # of AMD's library: 1000 times the first number, and the second
    driver_version: Annotated[bytes, c_char * 80]
    nvlinks: Annotated[Array[Array[c_uint8]], c_uint8 * MAX_GPUS * MAX_GPUS]  # number of links between two GPUs
    proximity: Annotated[Array[Array[c_uint8]], c_uint8 * MAX_GPUS * MAX_GPUS]  # nvmlGpuTopologyLevel_t of two GPUs
    device: Annotated[Array[Device], Device * MAX_DEVICES]
    process: Annotated[Array[Process], Process * MAX_PROCESSES]


# --- the first content: names, UUIDs, buses, distances and the figures of idle GPUs ----------------------------------

_MB = 1 << 20


def initial_state(
    memory_mb: Sequence[int], attribute: bool, creator: tuple[int, int], maker: Maker, names: Sequence[str] = ()
) -> bytes:
    """The bytes of a state file: one idle GPU for each entry of ``memory_mb``; ``creator``: pid and start time.
    ``names``: of the kinds of GPU, where they were given."""
    state = State()
    state.magic = MAGIC
    state.version = LAYOUT_VERSION
    state.size = ctypes.sizeof(State)
    seed = secrets.token_bytes(16)
    state.seed[:] = list(seed)
    state.creator_pid, state.creator_start = creator
    state.gpus = state.devices = len(memory_mb)
    state.attribute = attribute
    state.maker = MAKERS.index(maker)
    state.cuda_version, state.smi_version = 13000, 26002
    state.driver_version = b"580.00.00" if maker is Maker.NVIDIA else b"6.14.14"
    for index, size in enumerate(memory_mb):
        _fill_gpu(state.device[index], seed, index, size, len(memory_mb))
        if names:
            state.device[index].name = names[index].encode()[:63]
        if maker is Maker.AMD:
            _make_amd(state.device[index], seed, index)
        for other in range(len(memory_mb)):
            state.proximity[index][other] = _proximity(index, other, len(memory_mb))
    return bytes(state)


def _identity(seed: bytes, *numbers: int) -> str:
    """A UUID that no other simulated machine has (leases on GPUs go by it), and no GPU that is none."""
    digest = hashlib.sha256(seed + repr(numbers).encode()).digest()
    return str(uuid.UUID(bytes=digest[:10] + bytes.fromhex(SIMULATED), version=4))


def _node(index: int, count: int) -> int:
    """Two processor sockets, half of the GPUs on each; up to three GPUs sit on one."""
    return 0 if count < 4 else index * 2 // count


def _proximity(one: int, other: int, count: int) -> int:
    """Neighbours (0-1, 2-3, ...) share a PCIe switch; the rest of a socket's GPUs its host bridges."""
    if one == other:
        return 0
    if one // 2 == other // 2:
        return 10
    return 40 if _node(one, count) == _node(other, count) else 50


def _size_name(memory_mb: int) -> str:
    return f"{memory_mb // 1024}GB" if memory_mb % 1024 == 0 else f"{memory_mb}MB"


def _fill_gpu(device: Device, seed: bytes, index: int, memory_mb: int, count: int) -> None:
    device.uuid = f"GPU-{_identity(seed, index)}".encode()
    device.name = f"Simulated {_size_name(memory_mb)} GPU".encode()
    device.serial = f"{int.from_bytes(seed[:4], 'big'):010d}{index:02d}".encode()
    device.total = memory_mb * _MB
    device.pci_bus = 0x10 + index
    device.numa_node = _node(index, count)
    device.utilisation = device.temperature = device.power = FOLLOWS_USE
    device.power_limit = 400_000
    device.capability_major, device.capability_minor = 8, 0
    device.multiprocessors = 108


def _make_amd(device: Device, seed: bytes, index: int) -> None:
    """UUIDs of ROCm have 16 digits, and the order of PCI buses is not that by which ROCm counts."""
    number = (int.from_bytes(seed[:2], "big") + index) % (1 << 16)
    device.serial = f"{number:04x}{SIMULATED}".encode()
    device.uuid = b"GPU-" + device.serial
    device.pci_bus = 0x10 + (index ^ 1)
    device.multiprocessors = 304


def fill_instance(state: State, number: int, parent: int, position: int, memory_mb: int) -> None:
    """Writes MIG instance ``position`` of GPU ``parent`` to entry ``number``."""
    device, whole = state.device[number], state.device[parent]
    device.uuid = f"MIG-{_identity(bytes(state.seed), parent, position)}".encode()
    device.name = f"{whole.name.decode()} MIG {_size_name(memory_mb)}".encode()
    device.total = memory_mb * _MB
    device.ghost = 0
    device.parent = parent + 1
    device.position = position
    device.utilisation = device.temperature = device.power = FOLLOWS_USE
    device.multiprocessors = max(1, whole.multiprocessors * device.total // whole.total)


# --- which processes are alive, so that their memory counts: the rule of is_alive in state.h -------------------------


def start_of(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 when it is not there, or a zombie (which holds nothing)."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if fields[0] not in (b"Z", b"X"):
            return int(fields[19])
    return 0


def counts(entry: Process) -> bool:
    """Whether the memory of this entry is in use now."""
    if not entry.counts or (entry.until and time.monotonic_ns() >= entry.until):
        return False
    return bool(entry.phantom) or start_of(entry.pid) == entry.start
