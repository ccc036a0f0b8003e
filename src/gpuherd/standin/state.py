"""The state file of a simulated machine: its layout, the words that describe its first content, and which of its
processes are alive."""

from __future__ import annotations

import ctypes
import hashlib
import re
import secrets
import time
import uuid
from contextlib import suppress
from ctypes import Array, Structure, c_char, c_int64, c_uint8, c_uint32, c_uint64
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar, get_args, get_type_hints

from gpuherd.errors import UsageError
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


def initial_state(spec: Spec, attribute: bool, creator: tuple[int, int]) -> bytes:
    """The bytes of a state file with idle GPUs as ``spec`` describes them; ``creator``: pid and start time."""
    count = len(spec.memory_mb)
    state = State()
    state.magic = MAGIC
    state.version = LAYOUT_VERSION
    state.size = ctypes.sizeof(State)
    seed = secrets.token_bytes(16)
    state.seed[:] = list(seed)
    state.creator_pid, state.creator_start = creator
    state.gpus = state.devices = count
    state.attribute = attribute
    state.maker = MAKERS.index(spec.maker)
    state.cuda_version, state.smi_version = 13000, 26002
    state.driver_version = b"580.00.00" if spec.maker is Maker.NVIDIA else b"6.14.14"
    for index, size in enumerate(spec.memory_mb):
        _fill_gpu(state.device[index], seed, index, size, count)
        if spec.names:
            state.device[index].name = spec.names[index].encode()[:63]
        if spec.maker is Maker.AMD:
            _make_amd(state.device[index], seed, index)
        for other in range(count):
            state.proximity[index][other] = _proximity(index, other, count)
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


# --- the words of --simulate -----------------------------------------------------------------------------------------

# ``8x40GB``, ``4x24GB+2x80GB,busy=2@20s,nvlink=4,mig=gpu1:20GB+20GB``, ``4xMI300X``.

GRAMMAR = "write for example 8x40GB, 4x24GB+2x80GB, 4xMI300X or 4x40GB,busy=2@20s"

_GROUP = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)(GB|MB)", re.ASCII | re.IGNORECASE)
_KIND = re.compile(r"(?:(\d+)x)?(.+)", re.ASCII | re.IGNORECASE)
_BUSY = re.compile(r"(?:(\d+)|(gpu\d+(?:\+gpu\d+)*))(?:@(\d+(?:\.\d+)?)s?)?", re.ASCII | re.IGNORECASE)
_MIG = re.compile(r"gpu(\d+):(.+)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Busy:
    """GPUs that another user occupies from the start: for ``seconds``, or for good (None)."""

    gpus: tuple[int, ...]
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Spec:
    """A machine to simulate. ``memory_mb`` has one entry a GPU, in PCI order (MB = 2^20 bytes; 1 GB = 1024 MB)."""

    memory_mb: tuple[int, ...]
    busy: tuple[Busy, ...] = ()
    nvlinks: int = 0  # links within each pair of neighbours (0-1, 2-3, ...)
    mig: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (GPU, MB of each of its instances)
    maker: Maker = Maker.NVIDIA
    names: tuple[str, ...] = ()  # of the kind of each GPU, where kinds are given in place of sizes


def parse(text: str) -> Spec:
    """The machine that ``text`` describes. Raises UsageError with the word that is wrong and an example.

    >>> parse("2x24GB+80GB,busy=1@20s")
    Spec(memory_mb=(24576, 24576, 81920), busy=(Busy(gpus=(0,), seconds=20.0),), nvlinks=0, mig=())
    """
    groups, *options = text.strip().split(",")
    gpus = [gpu for group in groups.split("+") for gpu in _gpus(group)]
    memory = tuple(gpu.memory_mb for gpu in gpus)
    if not 1 <= len(memory) <= MAX_GPUS:
        raise UsageError(f"--simulate {text!r} asks for {len(memory)} GPUs; 1 to {MAX_GPUS} can be simulated")
    busy: list[Busy] = []
    mig: list[tuple[int, tuple[int, ...]]] = []
    nvlinks = 0
    for option in options:
        name, _, value = option.partition("=")
        if name == "busy":
            busy.append(_busy(value, len(memory)))
        elif name == "nvlink":
            nvlinks = _nvlinks(value)
        elif name == "mig":
            mig.append(_mig(value, memory))
        else:
            raise UsageError(f"--simulate: unknown option {option!r}; there are busy=, nvlink= and mig=")
    makers = {gpu.maker for gpu in gpus}
    if len(makers) > 1:
        raise UsageError(f"--simulate {text!r}: GPUs of one maker can be simulated at a time, not of NVIDIA and AMD")
    names = tuple(gpu.name for gpu in gpus) if all(gpu.name for gpu in gpus) else ()
    return Spec(memory, tuple(busy), nvlinks, tuple(mig), makers.pop(), names)


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A GPU of a group: by its size, or by the name of its kind."""

    memory_mb: int
    maker: Maker = Maker.NVIDIA
    name: str = ""


def _gpus(word: str) -> tuple[_Simulated, ...]:
    match = _KIND.fullmatch(word.strip())
    if match is not None and _GROUP.fullmatch(word.strip()) is None:
        from gpuherd.models.place.gpus import find_kind

        kind = find_kind(match[2])
        if kind is not None:
            gpu = _Simulated(kind.memory // (1 << 20), kind.maker, f"{kind.maker} Simulated {kind.name}")
            return (gpu,) * min(int(match[1] or 1), MAX_GPUS + 1)
    return tuple(map(_Simulated, _sizes(word)))


def _sizes(word: str) -> tuple[int, ...]:
    match = _GROUP.fullmatch(word.strip())
    if match is None:
        raise UsageError(f"--simulate: {word!r} describes no GPUs; {GRAMMAR}")
    count, size, unit = match.groups()
    mb = round(float(size) * (1024 if unit.upper() == "GB" else 1))
    if not 1 <= mb <= 1 << 24:
        raise UsageError(f"--simulate: {word!r}: a GPU has 1 MB to 16384 GB")
    # One GPU too many is enough for the caller to refuse; a huge count must not fill the memory first.
    return (mb,) * min(int(count or 1), MAX_GPUS + 1)


def _busy(value: str, gpus: int) -> Busy:
    match = _BUSY.fullmatch(value)
    if match is None:
        raise UsageError(f"--simulate: busy={value!r} is wrong; write busy=2 (two GPUs), busy=gpu0+gpu3 or busy=2@20s")
    count, names, seconds = match.groups()
    which = tuple(range(int(count))) if count else tuple(int(name[3:]) for name in names.split("+"))
    if len(which) > gpus or any(gpu >= gpus for gpu in which):
        raise UsageError(f"--simulate: busy={value!r}: there are {gpus} GPUs, gpu0 to gpu{gpus - 1}")
    return Busy(which, None if seconds is None else float(seconds))


def _nvlinks(value: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value) <= MAX_LINKS):
        raise UsageError(f"--simulate: nvlink={value!r} is no number of links from 0 to {MAX_LINKS}")
    return int(value)


def _mig(value: str, memory: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    match = _MIG.fullmatch(value)
    if match is None:
        raise UsageError(f"--simulate: mig={value!r} is wrong; write mig=gpu1:20GB+20GB")
    gpu = int(match[1])
    sizes = tuple(mb for group in match[2].split("+") for mb in _sizes(group))
    if gpu >= len(memory):
        raise UsageError(f"--simulate: mig={value!r}: there are {len(memory)} GPUs, gpu0 to gpu{len(memory) - 1}")
    if len(sizes) > MAX_MIG_INSTANCES or sum(sizes) > memory[gpu]:
        raise UsageError(
            f"--simulate: mig={value!r}: a GPU has at most {MAX_MIG_INSTANCES} instances, together {memory[gpu]} MB"
        )
    return gpu, sizes
