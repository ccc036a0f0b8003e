"""What a simulated machine is like at first: names, UUIDs, buses, nearness and the figures of its idle GPUs.

Fills the structures of the state file; knows no file and no process.
"""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import uuid
from collections.abc import Sequence

from gpuherd.gpus.state import SIMULATED
from gpuherd.standin.layout import FOLLOWS_USE, LAYOUT_VERSION, MAGIC, Device, State

_MB = 1 << 20


def initial_state(memory_mb: Sequence[int], attribute: bool, creator: tuple[int, int]) -> bytes:
    """The bytes of a state file: one idle GPU for each entry of ``memory_mb``; ``creator``: pid and start time."""
    state = State()
    state.magic = MAGIC
    state.version = LAYOUT_VERSION
    state.size = ctypes.sizeof(State)
    seed = secrets.token_bytes(16)
    state.seed[:] = list(seed)
    state.creator_pid, state.creator_start = creator
    state.gpus = state.devices = len(memory_mb)
    state.attribute = attribute
    state.cuda_version = 13000
    state.driver_version = b"580.00.00"
    for index, size in enumerate(memory_mb):
        _fill_gpu(state.device[index], seed, index, size, len(memory_mb))
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
