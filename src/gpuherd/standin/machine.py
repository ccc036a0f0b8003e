"""A simulated machine: makes and changes the state file that the stand-in driver library answers from.

Every change is made under an exclusive lock on the file, so that programs which read or change it at the same time
see it whole. ``driver`` makes a process see the machine.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gpuherd.atomic import put_first
from gpuherd.errors import CannotWrite, GpuherdError, UsageError
from gpuherd.gpus.state import Maker
from gpuherd.gpus.visible import hide_makers_but
from gpuherd.standin import driver
from gpuherd.standin.state import (
    FOLLOWS_USE,
    LAYOUT_VERSION,
    MAGIC,
    MAKERS,
    MAX_DEVICES,
    MAX_LINKS,
    MAX_MIG_INSTANCES,
    MAX_PROCESSES,
    Device,
    Process,
    State,
    counts,
    fill_instance,
    initial_state,
    parse,
    start_of,
)

_MB = 1 << 20
_PHANTOM_PID = 5_000_000  # above the kernel's largest pid: such a process never exists

GpuId = int | str  # 3 or "3" for a GPU, "3:1" for MIG instance 1 on it


class OutOfMemory(GpuherdError):
    """A simulated GPU has less memory free than was requested."""


class Occupation:
    """Memory held on one GPU. ``release`` gives it back; else it ends with its process or its time."""

    def __init__(self, machine: SimulatedMachine, slot: int, entry: Process) -> None:
        self._machine = machine
        self._slot = slot
        self._ticket = entry.ticket
        self.pid = entry.pid

    def release(self) -> None:
        """Frees the memory. A second call does nothing."""
        with self._machine.change() as state:
            entry = state.process[self._slot]
            if entry.ticket == self._ticket:
                entry.counts = 0


class SimulatedMachine:
    """A simulated machine, as the stand-in driver library shows it. GPUs are numbered in PCI order from 0."""

    def __init__(self, path: Path) -> None:
        """Use ``create`` or ``open``."""
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._state = State.from_buffer(mmap.mmap(self._file, ctypes.sizeof(State)))

    # ---- making, finding and using one ----

    @classmethod
    def create(cls, path: str | os.PathLike[str], spec: str = "4x40GB", *, attribute: bool = False) -> SimulatedMachine:
        """Makes the state file at ``path`` (which must not exist) for the machine that ``spec`` describes.

        ``attribute``: processes started by gpuherd on these GPUs show there with their own memory.
        """
        wanted = parse(spec)
        target = Path(path).resolve()
        temporary = target.with_name(f"{target.name}.{os.getpid()}.new")
        creator = (os.getpid(), start_of(os.getpid()))
        temporary.write_bytes(initial_state(wanted, attribute, creator))
        machine = cls(temporary)
        try:
            for gpu in range(0, len(wanted.memory_mb) - 1, 2):
                machine.link(gpu, gpu + 1, wanted.nvlinks)
            for gpu, sizes in wanted.mig:
                machine.split_mig(gpu, sizes)
            for busy in wanted.busy:
                for gpu in busy.gpus:
                    machine.occupy(gpu, wanted.memory_mb[gpu] // 2, until_s=busy.seconds)
            if not put_first(temporary, target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        finally:
            temporary.unlink(missing_ok=True)
        machine.path = target
        return machine

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> SimulatedMachine:
        """The machine whose state file is at ``path``. Raises UsageError when that is no such file."""
        target = Path(path).resolve()
        try:
            if not target.is_file() or target.stat().st_size != ctypes.sizeof(State):
                raise UsageError(f"{target} is no state file of a simulated machine (of this version of gpuherd)")
            machine = cls(target)
        except OSError as problem:
            raise UsageError(f"the state file {target} can't be opened: {problem.strerror}") from problem
        if machine._state.magic != MAGIC or machine._state.version != LAYOUT_VERSION:
            raise UsageError(f"{target} is no state file of a simulated machine (of this version of gpuherd)")
        return machine

    def environment(self) -> dict[str, str]:
        """What a child process needs in its environment to see this machine and no real GPU."""
        return driver.environment(self.path)

    def activate(self) -> None:
        """Makes this process and its future children see this machine in place of a real driver.

        Raises GpuherdError when this process has loaded a maker's own library before.
        """
        driver.load()
        os.environ.update(self.environment())

    def deactivate(self) -> None:
        """Makes this process see no driver again (its library stays loaded and reports none)."""
        driver.forget()

    @contextmanager
    def change(self) -> Iterator[State]:
        """The state, locked against all other readers and writers."""
        # A lock belongs to an open file, which threads and forked processes share: each change opens its own. By way
        # of /proc, because the name may be gone.
        with Path(f"/proc/self/fd/{self._file}").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield self._state

    # ---- reading ----

    @property
    def maker(self) -> Maker:
        """Whose driver shows this machine."""
        return MAKERS[self._state.maker]

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUIDs of the whole GPUs, in PCI order."""
        return tuple(self._state.device[i].uuid.decode() for i in range(self._state.gpus))

    def uuid(self, gpu: GpuId) -> str:
        """UUID of a GPU or a MIG instance."""
        return self._device(self.number(gpu)).uuid.decode()

    def creator_alive(self) -> bool:
        """Whether the process that made this machine still lives."""
        return start_of(self._state.creator_pid) == self._state.creator_start

    @property
    def calls(self) -> int:
        """How many driver calls have been answered, by all processes together."""
        return int(self._state.calls)

    def used_mb(self, gpu: GpuId) -> int:
        """Memory in use on a GPU in MB, without what attributed jobs show."""
        with self.change():
            return self._used(self.number(gpu)) // _MB

    def number(self, gpu: GpuId) -> int:
        """Position of a GPU or MIG instance in the state. Raises UsageError when there is no such."""
        index, _, position = str(gpu).partition(":")
        for number in range(self._state.devices):
            device = self._state.device[number]
            if not position and index == str(number) and not device.parent:
                return number
            if position and device.parent and index == str(device.parent - 1) and position == str(device.position):
                return number
        raise UsageError(f"the simulated machine has no GPU {gpu}")

    def visible(self, names: str, *, pci_order: bool = True) -> tuple[str, ...]:
        """The devices (``3``, or ``3:1`` for a MIG instance) that a list of GPUs names, as CUDA reads it: it stops at
        the first bad name, and gives none when one is named twice. Without ``pci_order`` CUDA counts from the fastest
        GPU, here the one with the most memory.
        """
        order = sorted(range(self._state.gpus), key=lambda n: 0 if pci_order else -self._state.device[n].total)
        found: list[int] = []
        for name in names.split(","):
            if name.isdigit() and int(name) < len(order):
                found.append(self._first_usable(order[int(name)]))
                continue
            matches = [n for n in range(self._state.devices) if self._device(n).uuid.decode().startswith(name)]
            if len(name) <= 4 or len(matches) != 1:
                break
            found.append(matches[0])
        return tuple(self._label(number) for number in found) if len(set(found)) == len(found) else ()

    # ---- changes by a test or a fake job ----

    def occupy(
        self,
        gpu: GpuId,
        memory_mb: int,
        *,
        pid: int | None = None,
        until_s: float | None = None,
        graphics: bool = False,
    ) -> Occupation:
        """Takes memory on a GPU, all or nothing.

        Args:
            pid: the process that holds it: the memory is free when that dies. None: a phantom, a process that
                stays for good but can't be looked up.
            until_s: seconds from now after which it is free in any case.
            graphics: a display process in place of a computing one.

        Raises OutOfMemory when it does not fit.
        """
        number = self.number(gpu)
        start = 0
        if pid is not None:
            start = start_of(pid)
            if not start:
                raise UsageError(f"there is no process {pid}")
        with self.change() as state:
            device = state.device[number]
            free = device.total - self._used(number)
            if memory_mb * _MB > free:
                raise OutOfMemory(f"GPU {gpu} has {free // _MB} MB free; {memory_mb} MB were asked for")
            slot = self._free_slot()
            entry = state.process[slot]
            entry.device = number
            entry.pid = _PHANTOM_PID + slot if pid is None else pid
            entry.phantom = pid is None
            entry.graphics = graphics
            entry.start = start
            entry.bytes = memory_mb * _MB
            entry.until = 0 if until_s is None else time.monotonic_ns() + round(until_s * 1e9)
            entry.ticket = int.from_bytes(os.urandom(4))
            entry.counts = 1
            return Occupation(self, slot, entry)

    def set_ghost_memory(self, gpu: GpuId, memory_mb: int) -> None:
        """Memory that is in use though no process is listed."""
        self._set(gpu, ghost=memory_mb * _MB)

    def set_utilisation(self, gpu: GpuId, percent: int | None) -> None:
        """What the driver reports; None: 0 when idle, 90 when used."""
        self._set(gpu, utilisation=FOLLOWS_USE if percent is None else percent)

    def set_temperature(self, gpu: GpuId, celsius: int | None) -> None:
        """What the driver reports; None: 34 when idle, 61 when used."""
        self._set(gpu, temperature=FOLLOWS_USE if celsius is None else celsius)

    def set_power(self, gpu: GpuId, watts: float | None) -> None:
        """What the driver reports; None: 55 when idle, 240 when used."""
        self._set(gpu, power=FOLLOWS_USE if watts is None else round(watts * 1000))

    def set_name(self, gpu: GpuId, name: str) -> None:
        """The product name, at most 63 bytes."""
        self._set(gpu, name=name.encode()[:63])

    def set_numa_node(self, gpu: GpuId, node: int) -> None:
        """The NUMA node that a GPU is attached to."""
        self._set(gpu, numa_node=node)

    def set_ecc_errors(self, gpu: GpuId, uncorrectable: int) -> None:
        """How many uncorrectable memory errors there have been."""
        self._set(gpu, ecc_errors=uncorrectable)

    def xid(self, gpu: GpuId, number: int) -> None:
        """The driver reports a critical Xid error now, to every process that subscribed to such events."""
        with self.change() as state:
            device = state.device[self.number(gpu)]
            device.xid = number
            device.xids += 1

    def lose(self, gpu: GpuId) -> None:
        """The GPU falls off the bus: every call about it answers "GPU is lost"."""
        self._set(gpu, lost=1)

    def restore(self, gpu: GpuId) -> None:
        """The GPU is back."""
        self._set(gpu, lost=0)

    def fail(
        self, code: int | None, *, function: str | None = None, gpu: GpuId | None = None, calls: int | None = None
    ) -> None:
        """Driver calls answer this code of the maker's library from now on; None ends it. A new call replaces the one
        before.

        Args:
            function: only this entry point fails, one of ``driver.entry_points``; None: all do.
            gpu: only calls about this GPU or MIG instance fail; None: calls about any of them, and about none.
            calls: so many calls fail; None: until the order is changed.

        Raises UsageError for an entry point that the library does not have.
        """
        if function is not None and function not in driver.entry_points(self.maker):
            raise UsageError(f"the simulated driver has no entry point {function!r}")
        number = None if gpu is None else self.number(gpu)
        with self.change() as state:
            state.fail_code = 0
            state.fail_name = (function or "").encode()
            state.fail_device = 0 if number is None else number + 1
            state.fail_calls = calls or 0
            state.fail_code = code or 0

    def set_library_version(self, major: int, minor: int) -> None:
        """The version that AMD's library has."""
        with self.change() as state:
            state.smi_version = 1000 * major + minor

    def set_latency(self, seconds: float) -> None:
        """How long every driver call takes."""
        with self.change() as state:
            state.latency = round(seconds * 1e6)

    def hide_pids(self, hidden: bool = True) -> None:
        """As in a container: memory is in use, but no process is listed."""
        with self.change() as state:
            state.hide_pids = hidden

    def hide_process_memory(self, hidden: bool = True) -> None:
        """Processes are listed without their memory."""
        with self.change() as state:
            state.hide_memory = hidden

    def link(self, one: int, other: int, nvlinks: int) -> None:
        """Joins two GPUs by this many NVLinks in place of those they have."""
        first, second = self.number(one), self.number(other)
        with self.change() as state:
            for a, b in ((first, second), (second, first)):
                if sum(state.nvlinks[a]) - state.nvlinks[a][b] + nvlinks > MAX_LINKS:
                    raise UsageError(f"GPU {a} would have more than {MAX_LINKS} NVLinks")
            state.nvlinks[first][second] = state.nvlinks[second][first] = nvlinks

    def set_proximity(self, one: int, other: int, level: int) -> None:
        """How far apart two GPUs are on PCIe: an nvmlGpuTopologyLevel_t value (gpuherd.gpus.state.Proximity)."""
        first, second = self.number(one), self.number(other)
        with self.change() as state:
            state.proximity[first][second] = state.proximity[second][first] = level

    def split_mig(self, gpu: int, sizes_mb: Sequence[int]) -> tuple[str, ...]:
        """Splits a GPU that is not split yet into MIG instances of these sizes. Returns their UUIDs."""
        number = self.number(gpu)
        with self.change() as state:
            parent = state.device[number]
            first = state.devices
            if parent.mig_mode or parent.parent:
                raise UsageError(f"GPU {gpu} is split already")
            if len(sizes_mb) > MAX_MIG_INSTANCES or first + len(sizes_mb) > MAX_DEVICES:
                raise UsageError(f"a GPU has at most {MAX_MIG_INSTANCES} MIG instances")
            if sum(sizes_mb) * _MB > parent.total:
                raise UsageError(f"GPU {gpu} has less than {sum(sizes_mb)} MB")
            for position, size in enumerate(sizes_mb):
                fill_instance(state, first + position, number, position, size)
            state.devices = first + len(sizes_mb)
            parent.mig_mode = 1
        return tuple(self.uuid(f"{gpu}:{position}") for position in range(len(sizes_mb)))

    # ---- inside ----

    def _device(self, number: int) -> Device:
        device: Device = self._state.device[number]
        return device

    def _first_usable(self, number: int) -> int:
        """The device that CUDA uses for this GPU: of a split one the first instance."""
        return next((n for n in range(self._state.devices) if self._device(n).parent == number + 1), number)

    def _label(self, number: int) -> str:
        device = self._device(number)
        return f"{device.parent - 1}:{device.position}" if device.parent else str(number)

    def _set(self, gpu: GpuId, **fields: int | bytes) -> None:
        with self.change() as state:
            for name, value in fields.items():
                setattr(state.device[self.number(gpu)], name, value)

    def _used(self, number: int) -> int:
        device = self._device(number)
        on = {number} | {n for n in range(self._state.devices) if self._device(n).parent == number + 1}
        entries: Iterator[Process] = iter(self._state.process)
        return device.ghost + sum(entry.bytes for entry in entries if entry.device in on and counts(entry))

    def _free_slot(self) -> int:
        for slot in range(MAX_PROCESSES):
            if not counts(self._state.process[slot]):
                self._state.process[slot].counts = 0
                return slot
        raise GpuherdError(f"a simulated machine holds at most {MAX_PROCESSES} processes")


# --- gpuherd --simulate ----------------------------------------------------------------------------------------------

# The machine lives in a folder of its own under XDG_RUNTIME_DIR (or the folder for temporary files), with its own
# folders of leases and of what is shared, so that simulated GPUs leave nothing behind on the real machine. The process
# that made it removes it when it ends, unless a job outlives it and still needs it. Such a folder, and that of a killed
# command, is removed by the next simulation, once no process uses it. A machine that is to last is a state file which
# the user names.

_PREFIX = "gpuherd-simulated-"
_STATE = "machine"
_LEASES = "GPUHERD_LEASE_DIR"
_SHARED = "GPUHERD_MACHINE_DIR"
_EXEC_WITHIN_S = 0.5


def start(spec: str) -> SimulatedMachine:
    """See ``gpuherd.standin.activate``."""
    driver.library_folder()  # first what can fail, before anything is made
    machine = SimulatedMachine.open(spec) if _is_path(spec) else _make(spec)
    if machine.path.name != _STATE or not machine.path.parent.name.startswith(_PREFIX):
        leases, shared = (machine.path.with_name(machine.path.name + end) for end in (".leases", ".shared"))
    else:
        leases, shared = machine.path.with_name("leases"), machine.path.with_name("shared")
    machine.activate()
    os.environ |= {_LEASES: str(leases), _SHARED: str(shared)}
    os.environ.update(hide_makers_but(machine.maker))
    # torch can be set to count GPUs by NVML in place of CUDA; it would then find simulated ones.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
    # This process too must keep off real GPUs, should it come to load torch.
    ctypes.CDLL(str(driver.library_folder() / driver.CUDA), ctypes.RTLD_GLOBAL)
    _announce(machine)
    return machine


def _is_path(spec: str) -> bool:
    if Path(spec).exists():
        return True
    if "/" in spec:
        raise UsageError(f"--simulate: there is no state file {spec}; make one with gpuherd.standin.machine")
    return False


def _make(spec: str) -> SimulatedMachine:
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.access(base, os.W_OK | os.X_OK):
        base = Path(tempfile.gettempdir())
    _sweep(base)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    except OSError as problem:
        raise CannotWrite(f"can't make a folder for simulated GPUs in {base}: {problem.strerror}") from problem
    try:
        machine = SimulatedMachine.create(folder / _STATE, spec, attribute=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    atexit.register(_remove_if_unused, folder, os.getpid())
    return machine


def _announce(machine: SimulatedMachine) -> None:
    count = len(machine.uuids)
    gpus = "1 GPU is" if count == 1 else f"{count} GPUs are"
    sys.stderr.write(f"gpuherd: {gpus} simulated; jobs run on the CPU.\n")
    sys.stderr.flush()


def _remove_if_unused(folder: Path, creator: int) -> None:
    # A forked child runs this too; the machine is its parent's.
    if os.getpid() == creator and not _used_by_others(folder / _STATE):
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path) -> None:
    """Removes what killed simulations of this user have left in ``base``."""
    for folder in base.glob(_PREFIX + "*"):
        state = folder / _STATE
        with suppress(OSError, UsageError):
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                continue
            if not SimulatedMachine.open(state).creator_alive() and not _used_by_others(state):
                shutil.rmtree(folder, ignore_errors=True)


def _used_by_others(state: Path) -> bool:
    """Whether another process of this user has the machine in its environment."""
    word, until = f"{driver.STATE_VARIABLE}={state}".encode(), time.monotonic() + _EXEC_WITHIN_S
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with suppress(OSError):
            if word in _environment(process, until).split(b"\0") and start_of(int(process.name)):
                return True
    return False


def _environment(process: Path, until: float) -> bytes:
    """The environment of a process, from its folder in /proc. For a moment after exec it is empty there, though the
    parent has been notified already: that is waited for, ``until`` this second at most. Kernel threads and zombies,
    which have none, have no ``exe`` either. Raises OSError."""
    while not (found := (process / "environ").read_bytes()) and time.monotonic() < until:
        (process / "exe").readlink()
        time.sleep(0.001)
    return found
