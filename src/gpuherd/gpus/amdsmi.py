"""AMD's driver, through libamd_smi: the second ``Driver``.

Called with ctypes, so that nothing of ROCm has to be installed with gpuherd. Versions 24.7 to 27 of the library are
supported (ROCm 6.3 to 10): their structures differ only in the lengths of strings, and in fields behind those that are
read here. Any other version is refused by its number, since wrong figures would be worse than none.

A GPU is a socket of the library, and its handle all processors of that socket: more than one where the GPU is split
into compute partitions (DPX, QPX, CPX), which gpuherd does not give to jobs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from ctypes import byref, c_char_p, c_int64, c_uint32, c_uint64, c_void_p, create_string_buffer
from dataclasses import dataclass
from itertools import combinations
from struct import unpack_from
from typing import Any

from gpuherd.gpus.driver import MB, DriverFailure, Memory, Sensors
from gpuherd.gpus.state import Gpu, GpuProcess, Maker, Peer, Proximity

_LIBRARY = "libamd_smi.so"
_OLDEST, _NEWEST = (24, 7), 27
_PLACES = ("", *(f".{major}" for major in range(_NEWEST, _OLDEST[0] - 1, -1)))

# Of amdsmi.h: amdsmi_status_t, amdsmi_init_flags_t, processor_type_t, amdsmi_memory_type_t, amdsmi_temperature_type_t,
# amdsmi_io_link_type_t (amdsmi_link_type_t from 26 on).
_NOT_SUPPORTED, _NOT_YET_IMPLEMENTED, _FAIL_LOAD_MODULE, _FAIL_LOAD_SYMBOL, _NO_PERM, _IO = 2, 3, 4, 5, 10, 12
_OUT_OF_RESOURCES, _INIT_ERROR, _NOT_FOUND, _DRIVER_NOT_LOADED, _NO_DATA = 15, 18, 31, 34, 40
_INIT_AMD_GPUS, _AMD_GPU, _VRAM = 2, 1, 0
_EDGE, _HOTSPOT, _CURRENT = 0, 1, 0
_XGMI = 2
_NO_FIGURE = 0xFFFF  # in place of a figure of 16 bits or more: not supported

# Errors that mean "not on this GPU", "not for this user" or "not in this library" of a single query.
_NO_ANSWER = frozenset({_NOT_SUPPORTED, _NOT_YET_IMPLEMENTED, _FAIL_LOAD_SYMBOL, _NO_PERM, _NO_DATA})
# Errors of the whole driver that no second try at once mends, as long as it has never answered.
_MISSING = f"no AMD driver is installed ({_LIBRARY} was not found)"
_NOT_LOADED = "the AMD driver is installed but not loaded; try: sudo modprobe amdgpu"
_DRIVER_SENTENCES = {
    _FAIL_LOAD_MODULE: _MISSING,
    _INIT_ERROR: _NOT_LOADED,
    _DRIVER_NOT_LOADED: _NOT_LOADED,
    _NO_PERM: "this user may not use the AMD driver; join the groups render and video, or check the rights of /dev/kfd",
}
# Errors of one GPU that no second try mends.
_GPU_SENTENCES = {
    _NOT_FOUND: "it has fallen off the bus; only a reboot or a driver reload brings it back",
    _IO: "the kernel driver does not reach it; it may need a reset (sudo amd-smi reset --gpureset)",
    _NO_PERM: "this user may not use it",
}
# Processes that may start between counting and listing them, and tries to list them.
_MORE_PROCESSES, _TRIES = 16, 4

# Large enough for every structure read here but a list of processes; the library writes at most 1.5 kB.
_BUFFER_BYTES = 4096


class AmdSmiError(Exception):
    """A call that failed: ``value`` is its amdsmi_status_t."""

    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


class WrongVersion(AmdSmiError):
    """The library is there and is of a version whose structures are not known."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Offsets in the library's structures, in bytes. The names in the header are those of amdsmi_asic_info_t,
    amdsmi_power_info_t and amdsmi_proc_info_t."""

    asic_serial: int
    num_of_compute_units: int
    current_socket_power: int
    pid: int
    vram_mem: int
    process: int

    @staticmethod
    def of(major: int) -> _Layout:
        """Strings have 32 and 64 bytes in version 24, and 256 since; power has had a sum in front since then."""
        if major == 24:
            return _Layout(340, 376, 0, 32, 128, 224)
        return _Layout(532, 792, 8, 256, 352, 704)


Handle = tuple[c_void_p, ...]


class AmdSmi:
    """See ``Driver``."""

    maker = Maker.AMD
    error: type[Exception] = AmdSmiError
    numbers_in_order = False  # by PCI bus, where ROCm counts the kernel driver's nodes

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._layout = _Layout.of(_NEWEST)

    def open(self) -> None:
        """See ``Driver``."""
        if self._library is None:
            self._library = _load()
        self._call("amdsmi_init", c_uint64(_INIT_AMD_GPUS))
        try:
            self._check_version()
        except AmdSmiError:
            self.close()
            raise

    def _check_version(self) -> None:
        buffer = create_string_buffer(_BUFFER_BYTES)
        self._call("amdsmi_get_lib_version", buffer)
        # Up to 25 there is a year in front, which is the library's major version in its file name.
        version = unpack_from("=3I", buffer)
        if version[:2] < _OLDEST or version[0] > _NEWEST:
            known = f"{_OLDEST[0]}.{_OLDEST[1]} to {_NEWEST}"
            raise WrongVersion(0, f"{_LIBRARY} {'.'.join(map(str, version))} is not supported, only {known} are")
        self._layout = _Layout.of(version[0])

    def close(self) -> None:
        """See ``Driver``."""
        self._figure("amdsmi_shut_down")

    def count(self) -> int:
        """See ``Driver``."""
        found = c_uint32(0)
        self._call("amdsmi_get_socket_handles", byref(found), None)
        return found.value

    def versions(self) -> tuple[str | None, str | None]:
        """See ``Driver``."""
        try:
            buffer = self._structure("amdsmi_get_gpu_driver_info", self.device(0)[0])
        except AmdSmiError:
            return None, None
        return _text(buffer.raw) or None, None

    def device(self, number: int) -> Handle:
        """See ``Driver``."""
        sockets = self._handles("amdsmi_get_socket_handles")
        if number >= len(sockets):
            raise AmdSmiError(_NOT_FOUND, f"there is no socket {number}")
        processors = self._handles("amdsmi_get_processor_handles", sockets[number])
        gpus = tuple(each for each in processors if self._number("amdsmi_get_processor_type", each) == _AMD_GPU)
        if not gpus:
            raise AmdSmiError(_NOT_FOUND, f"socket {number} has no GPU")
        return gpus

    def identity(self, handle: Handle) -> Gpu:
        """See ``Driver``."""
        (first, *_), layout = handle, self._layout
        bdf = c_uint64()
        self._call("amdsmi_get_gpu_bdf_id", first, byref(bdf))
        bus_id = _bus_id(bdf.value)
        asic = self._structure("amdsmi_get_gpu_asic_info", first).raw
        units: int = unpack_from("=I", asic, layout.num_of_compute_units)[0]
        numa = self._figure_of("amdsmi_topo_get_numa_node_number", first)
        return Gpu(
            index=0,
            uuid=_uuid(_text(asic[layout.asic_serial :]), bus_id),
            name=_text(asic) or "AMD GPU",
            pci_bus_id=bus_id,
            numa_node=numa,
            multi_processor_count=units if 0 < units < _NO_FIGURE else None,
            maker=Maker.AMD,
        )

    def place(self, handle: Handle) -> tuple[int, ...]:
        """ROCR_VISIBLE_DEVICES counts the kernel driver's nodes, whatever the order of PCI buses. See ``Driver``."""
        return (unpack_from("=QI", self._structure("amdsmi_get_gpu_kfd_info", handle[0]))[1],)

    def partitions(self, handle: Handle, whole: Gpu) -> Sequence[tuple[Handle, Gpu]] | DriverFailure | None:
        """None for a GPU in SPX mode; compute partitions are not given to jobs. See ``Driver``."""
        del whole
        if len(handle) == 1:
            return None
        mode = create_string_buffer(_BUFFER_BYTES)
        known = self._figure("amdsmi_get_gpu_compute_partition", handle[0], mode, c_uint32(_BUFFER_BYTES))
        name = f" ({_text(mode.raw)})" if known else ""
        return DriverFailure(
            f"it is split into {len(handle)} compute partitions{name}, which gpuherd does not give to jobs; "
            "sudo amd-smi set --compute-partition SPX joins them"
        )

    def memory(self, handle: Handle) -> Memory | None:
        """See ``Driver``."""
        found = [c_uint64(), c_uint64()]
        try:
            for name, bytes_ in zip(("total", "usage"), found, strict=True):
                self._call(f"amdsmi_get_gpu_memory_{name}", handle[0], c_uint32(_VRAM), byref(bytes_))
        except AmdSmiError as error:
            if error.value in _NO_ANSWER:
                return None
            raise
        total, used = (each.value for each in found)
        return Memory(total // MB, used // MB, max(0, total - used) // MB)

    def processes(self, handle: Handle) -> Iterator[GpuProcess]:
        """Those that hold memory of this GPU: before version 27 the library lists a process on every GPU that it could
        use. See ``Driver``."""
        layout = self._layout
        try:
            count, listed = self._list_processes(handle[0])
        except AmdSmiError as error:
            if error.value in _NO_ANSWER:
                return
            raise
        for place in range(0, count * layout.process, layout.process):
            pid: int = unpack_from("=I", listed, place + layout.pid)[0]
            used: int = unpack_from("=Q", listed, place + layout.vram_mem)[0]
            if used:
                yield GpuProcess(pid, None, None, used // MB)

    def _list_processes(self, processor: c_void_p) -> tuple[int, ctypes.Array[Any]]:
        name = "amdsmi_get_gpu_process_list"
        for left in reversed(range(_TRIES)):
            count = c_uint32(0)
            self._call(name, processor, byref(count), None)
            if count.value == 0:
                break
            count.value += _MORE_PROCESSES
            listed = create_string_buffer(count.value * self._layout.process)
            try:
                self._call(name, processor, byref(count), listed)
            except AmdSmiError as error:
                if error.value != _OUT_OF_RESOURCES or left == 0:
                    raise
                continue  # more processes have started meanwhile than fit
            return min(count.value, len(listed) // self._layout.process), listed
        return 0, create_string_buffer(0)

    def sensors(self, handle: Handle) -> Sensors:
        """See ``Driver``."""
        return Sensors(self._utilisation(handle[0]), self._temperature(handle[0]), self._power(handle[0]))

    def _utilisation(self, processor: c_void_p) -> int | None:
        try:
            (percent,) = unpack_from("=I", self._structure("amdsmi_get_gpu_activity", processor))
        except AmdSmiError:
            return None
        return percent if percent <= 100 else None

    def _temperature(self, processor: c_void_p) -> int | None:
        """Of the edge of the die, or of its hottest place: Instinct GPUs since MI300 have only that."""
        for sensor in (_EDGE, _HOTSPOT):
            celsius = c_int64()
            arguments = (processor, c_uint32(sensor), c_uint32(_CURRENT), byref(celsius))
            if self._figure("amdsmi_get_temp_metric", *arguments) and 0 < celsius.value < _NO_FIGURE:
                return celsius.value
        return None

    def _power(self, processor: c_void_p) -> float | None:
        """Now, or on average: a GPU has one of both."""
        try:
            buffer = self._structure("amdsmi_get_power_info", processor)
        except AmdSmiError:
            return None
        watts = unpack_from("=2I", buffer, self._layout.current_socket_power)
        return next((float(each) for each in watts if 0 < each < _NO_FIGURE), None)

    def uncorrected_errors(self, handle: Handle) -> int | None:
        """None for a GPU without ECC. See ``Driver``."""
        try:
            return int(unpack_from("=2Q", self._structure("amdsmi_get_gpu_total_ecc_count", handle[0]))[1])
        except AmdSmiError:
            return None

    def events(self, handles: Mapping[str, Handle]) -> None:
        """The library has no events that say which errors are the GPU's own fault. See ``Driver``."""

    def peers(self, handles: Mapping[Gpu, Handle]) -> dict[str, tuple[Peer, ...]]:
        """XGMI, counted as one link, and whether both are at one NUMA node. See ``Driver``."""
        peers: dict[str, list[Peer]] = {each.uuid: [] for each in handles}
        for (one, one_handle), (two, two_handle) in combinations(handles.items(), 2):
            hops, kind = c_uint64(), c_uint32()
            found = self._figure("amdsmi_topo_get_link_type", one_handle[0], two_handle[0], byref(hops), byref(kind))
            links = 1 if found and kind.value == _XGMI else 0
            together = one.numa_node is not None and one.numa_node == two.numa_node
            proximity = Proximity.NUMA_NODE if together else Proximity.SYSTEM
            peers[one.uuid].append(Peer(two.uuid, links, proximity))
            peers[two.uuid].append(Peer(one.uuid, links, proximity))
        return {uuid: tuple(found) for uuid, found in peers.items()}

    def machine_failure(self, error: Exception) -> DriverFailure:
        """See ``Driver``."""
        code = getattr(error, "value", None)
        if isinstance(error, WrongVersion):
            return DriverFailure(str(error), lasting=True)
        if code not in _DRIVER_SENTENCES:
            return DriverFailure(f"the AMD driver fails: {error}")
        return DriverFailure(_DRIVER_SENTENCES[code], lasting=True, installed=code != _FAIL_LOAD_MODULE)

    def gpu_failure(self, error: Exception) -> DriverFailure:
        """See ``Driver``."""
        code = getattr(error, "value", None)
        if code not in _GPU_SENTENCES:
            return DriverFailure(f"the driver fails on it: {error}")
        return DriverFailure(_GPU_SENTENCES[code], lasting=True)

    # --- calls ------------------------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise AmdSmiError(_FAIL_LOAD_SYMBOL, f"{_LIBRARY} has no {name}")
        status = function(*arguments) & 0xFFFFFFFF
        if status != 0:
            text = c_char_p()
            explain = getattr(self._library, "amdsmi_status_code_to_string", None)
            known = explain is not None and explain(c_uint32(status), byref(text)) == 0 and text.value
            raise AmdSmiError(status, text.value.decode() if known and text.value else f"error {status} of {name}")

    def _figure(self, name: str, *arguments: Any) -> bool:
        """Whether a call that a GPU can do without has succeeded."""
        try:
            self._call(name, *arguments)
        except AmdSmiError:
            return False
        return True

    def _structure(self, name: str, processor: c_void_p) -> ctypes.Array[Any]:
        """The bytes of the structure that a call fills."""
        buffer = create_string_buffer(_BUFFER_BYTES)
        self._call(name, processor, buffer)
        return buffer

    def _number(self, name: str, processor: c_void_p) -> int:
        found = c_uint32()
        self._call(name, processor, byref(found))
        return found.value

    def _figure_of(self, name: str, processor: c_void_p) -> int | None:
        try:
            found = self._number(name, processor)
        except AmdSmiError:
            return None
        return found if found < _NO_FIGURE else None

    def _handles(self, name: str, *arguments: Any) -> list[c_void_p]:
        count = c_uint32(0)
        self._call(name, *arguments, byref(count), None)
        handles = (c_void_p * count.value)()
        self._call(name, *arguments, byref(count), handles)
        return [c_void_p(each) for each in handles[: count.value]]


def _load() -> ctypes.CDLL:
    """The library, where the loader finds it or ROCm is installed."""
    homes = [os.environ.get("ROCM_HOME"), os.environ.get("ROCM_PATH"), "/opt/rocm"]
    folders = ["", *(f"{home}/lib/" for home in homes if home)]
    for folder in folders:
        for ending in _PLACES:
            try:
                return ctypes.CDLL(f"{folder}{_LIBRARY}{ending}")
            except OSError:
                continue
    raise AmdSmiError(_FAIL_LOAD_MODULE, _MISSING)


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace").strip()


def _bus_id(bdf: int) -> str:
    """PCI domain, bus, device and function out of the library's number for a GPU.

    >>> _bus_id(0x1_0000_0C00)
    '0001:0c:00.0'
    """
    return f"{bdf >> 32:04x}:{bdf >> 8 & 0xFF:02x}:{bdf >> 3 & 0x1F:02x}.{bdf & 7}"


def _uuid(serial: str, bus_id: str) -> str:
    """The GPU's name for gpuherd: as ROCm writes UUIDs, from its serial number; its place on a GPU without one.

    >>> _uuid("0xDA20E05348498592", "0000:0c:00.0"), _uuid("N/A", "0000:0c:00.0")
    ('GPU-da20e05348498592', 'GPU-0000:0c:00.0')
    """
    try:
        number = int(serial, 16)
    except ValueError:
        number = 0
    return f"GPU-{number:016x}" if 0 < number < 1 << 64 else f"GPU-{bus_id}"
