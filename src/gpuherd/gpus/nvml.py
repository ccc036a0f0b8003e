"""NVIDIA's driver, through NVML: the first ``Driver``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pynvml

from gpuherd.gpus.driver import MB, DriverEvent, DriverFailure, Memory, Sensors
from gpuherd.gpus.state import Gpu, GpuProcess, Maker, Peer, Proximity

# Errors that mean "not on this GPU", "not for this user" or "not in this driver" of a single query.
_NO_ANSWER = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
        pynvml.NVML_ERROR_NO_DATA,
    }
)
# Errors of the whole driver that no second try at once mends, as long as it has never answered.
_DRIVER_SENTENCES = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver is installed (libnvidia-ml.so.1 was not found)",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed but not loaded; try: sudo modprobe nvidia",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver was updated but the old one still runs; reboot, or reload the nvidia kernel modules"
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "this user may not use the NVIDIA driver; check the rights of /dev/nvidiactl and /dev/nvidia0"
    ),
}
# Errors of one GPU that no second try mends.
_GPU_SENTENCES = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "it has fallen off the bus; only a reboot or a driver reload brings it back",
    pynvml.NVML_ERROR_RESET_REQUIRED: "it needs a reset (sudo nvidia-smi --gpu-reset)",
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not use it",
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: "its power cables are not plugged in right",
    pynvml.NVML_ERROR_IRQ_ISSUE: "the kernel has an interrupt problem with it; see the kernel's log",
}
_NO_INSTANCES = DriverFailure("it is in MIG mode without instances; make some, or end MIG mode (nvidia-smi mig)")

# Compute cores of one multiprocessor, by compute capability (CUDA C++ Programming Guide, "Compute Capabilities").
_CORES_OF_EXACT = {(6, 0): 64, (8, 0): 64}
_CORES_OF_MAJOR = {3: 192, 5: 128, 6: 128, 7: 64, 8: 128, 9: 128, 10: 128, 11: 128, 12: 128}

# Newer drivers drop old queries, older ones lack the new. The second memory structure reports the driver's own reserve
# (600 MB on a large GPU) apart from what programs use.
_MEMORY_QUERIES: tuple[Callable[[Any], Any], ...] = (
    lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2),
    pynvml.nvmlDeviceGetMemoryInfo,
)
_TEMPERATURE_QUERIES = (pynvml.nvmlDeviceGetTemperatureV, pynvml.nvmlDeviceGetTemperature)
_COMPUTE_QUERIES = (pynvml.nvmlDeviceGetComputeRunningProcesses_v3, pynvml.nvmlDeviceGetComputeRunningProcesses_v2)
_GRAPHICS_QUERIES = (pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, pynvml.nvmlDeviceGetGraphicsRunningProcesses_v2)

_LEVELS = frozenset(map(int, Proximity))


def _first_answer(queries: Sequence[Callable[..., Any]], *arguments: Any) -> Any | None:
    """The answer of the first query that has one, None where none has. Raises the first error that says more."""
    unforeseen: pynvml.NVMLError | None = None
    for query in queries:
        try:
            return query(*arguments)
        except pynvml.NVMLError as error:
            if error.value not in _NO_ANSWER:
                unforeseen = unforeseen or error
    if unforeseen is not None:
        raise unforeseen
    return None


def _figure(query: Callable[..., Any], *arguments: Any) -> Any | None:
    """The answer to a query that a GPU can do without; None after any error."""
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class Nvml:
    """See ``Driver``."""

    maker = Maker.NVIDIA
    error: type[Exception] = pynvml.NVMLError
    numbers_in_order = True  # by PCI bus, as CUDA does under CUDA_DEVICE_ORDER=PCI_BUS_ID

    def open(self) -> None:
        """See ``Driver``."""
        pynvml.nvmlInit()

    def close(self) -> None:
        """See ``Driver``."""
        _figure(pynvml.nvmlShutdown)

    def count(self) -> int:
        """See ``Driver``."""
        return int(pynvml.nvmlDeviceGetCount())

    def versions(self) -> tuple[str | None, str | None]:
        """See ``Driver``."""
        cuda = _figure(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        newest = None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}"
        return _figure(pynvml.nvmlSystemGetDriverVersion), newest

    def device(self, number: int) -> Any:
        """See ``Driver``."""
        return pynvml.nvmlDeviceGetHandleByIndex(number)

    def identity(self, handle: Any) -> Gpu:
        """See ``Driver``."""
        answer = _figure(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
        capability = None if answer is None else (int(answer[0]), int(answer[1]))
        return Gpu(
            index=0,
            uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
            name=_text(_figure(pynvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"),
            pci_bus_id=_pci_bus_id(handle),
            numa_node=_numa_node(handle),
            compute_capability=capability,
            multi_processor_count=multiprocessors(_figure(pynvml.nvmlDeviceGetNumGpuCores, handle), capability),
        )

    def place(self, handle: Any) -> tuple[int, ...] | None:
        """PCI domain, bus, device and function: ``00000000:3B:00.0`` in CUDA's PCI_BUS_ID order. See ``Driver``."""
        bus_id = _pci_bus_id(handle)
        return None if bus_id is None else tuple(int(part, 16) for part in bus_id.replace(".", ":").split(":"))

    def partitions(self, handle: Any, whole: Gpu) -> Sequence[tuple[Any, Gpu]] | DriverFailure | None:
        """The MIG instances. See ``Driver``."""
        mode = _first_answer((pynvml.nvmlDeviceGetMigMode,), handle)
        if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        instances = []
        for position in range(_figure(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            instance = _figure(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, position)
            uuid = None if instance is None else _figure(pynvml.nvmlDeviceGetUUID, instance)
            if uuid is None:
                continue  # places without an instance are common, and without a UUID nothing can run on it
            attributes = _figure(pynvml.nvmlDeviceGetAttributes_v2, instance)
            gpu = replace(
                whole,
                uuid=_text(uuid),
                name=_text(_figure(pynvml.nvmlDeviceGetName, instance) or f"{whole.name} MIG"),
                multi_processor_count=None if attributes is None else int(attributes.multiprocessorCount),
                mig_parent=whole.uuid,
                mig_position=position,
            )
            instances.append((instance, gpu))
        return instances or _NO_INSTANCES

    def memory(self, handle: Any) -> Memory | None:
        """See ``Driver``."""
        found = _first_answer(_MEMORY_QUERIES, handle)
        return None if found is None else Memory(found.total // MB, found.used // MB, found.free // MB)

    def processes(self, handle: Any) -> Iterator[GpuProcess]:
        """See ``Driver``."""
        for compute, queries in ((True, _COMPUTE_QUERIES), (False, _GRAPHICS_QUERIES)):
            for entry in _first_answer(queries, handle) or ():
                used = entry.usedGpuMemory
                yield GpuProcess(entry.pid, None, None, None if used is None else used // MB, compute)

    def sensors(self, handle: Any) -> Sensors:
        """See ``Driver``."""
        utilisation = _figure(pynvml.nvmlDeviceGetUtilizationRates, handle)
        power_mw = _figure(pynvml.nvmlDeviceGetPowerUsage, handle)
        return Sensors(
            None if utilisation is None else int(utilisation.gpu),
            _figure(_first_answer, _TEMPERATURE_QUERIES, handle, pynvml.NVML_TEMPERATURE_GPU),
            None if power_mw is None else power_mw / 1000,
        )

    def uncorrected_errors(self, handle: Any) -> int | None:
        """None for a GPU without ECC. See ``Driver``."""
        kind, since = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        found = _figure(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, since)
        return None if found is None else int(found)

    def events(self, handles: Mapping[str, Any]) -> XidEvents:
        """See ``Driver``."""
        return XidEvents(handles)

    def peers(self, handles: Mapping[Gpu, Any]) -> dict[str, tuple[Peer, ...]]:
        """NVLinks, direct or through a switch, and distance on PCIe. See ``Driver``."""
        links = {each.uuid: _active_nvlinks(handle) for each, handle in handles.items()}
        peers: dict[str, list[Peer]] = {each.uuid: [] for each in handles}
        for (one, one_handle), (two, two_handle) in combinations(handles.items(), 2):
            level = _figure(pynvml.nvmlDeviceGetTopologyCommonAncestor, one_handle, two_handle)
            proximity = Proximity(level) if level in _LEVELS else Proximity.SYSTEM
            direct = 0 if two.pci_bus_id is None else links[one.uuid].get(two.pci_bus_id, 0)
            # A switch joins every GPU on it with all the links that both have to it.
            nvlinks = direct + min(links[one.uuid].get(_SWITCH, 0), links[two.uuid].get(_SWITCH, 0))
            peers[one.uuid].append(Peer(two.uuid, nvlinks, proximity))
            peers[two.uuid].append(Peer(one.uuid, nvlinks, proximity))
        return {uuid: tuple(found) for uuid, found in peers.items()}

    def machine_failure(self, error: Exception) -> DriverFailure:
        """See ``Driver``."""
        code = getattr(error, "value", None)
        if code not in _DRIVER_SENTENCES:
            return DriverFailure(f"the NVIDIA driver fails: {error}")
        installed = code != pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return DriverFailure(_DRIVER_SENTENCES[code], lasting=True, installed=installed)

    def gpu_failure(self, error: Exception) -> DriverFailure:
        """See ``Driver``."""
        code = getattr(error, "value", None)
        if code not in _GPU_SENTENCES:
            return DriverFailure(f"the driver fails on it: {error}")
        return DriverFailure(_GPU_SENTENCES[code], lasting=True)


def multiprocessors(cores: int | None, capability: tuple[int, int] | None) -> int | None:
    """Multiprocessors of a GPU: NVML counts compute cores only, and how many make one depends on the architecture.

    >>> multiprocessors(6912, (8, 0))  # an A100
    108
    """
    if not cores or capability is None:
        return None
    each = _CORES_OF_EXACT.get(capability, _CORES_OF_MAJOR.get(capability[0]))
    return None if each is None else cores // each


def _pci_bus_id(handle: Any) -> str | None:
    pci = _figure(pynvml.nvmlDeviceGetPciInfo_v3, handle)
    return None if pci is None else _text(pci.busId)


def _numa_node(handle: Any) -> int | None:
    """The nearest NUMA node of host memory: the lowest bit of the driver's set of 64 nodes."""
    nodes = _figure(pynvml.nvmlDeviceGetMemoryAffinity, handle, 1, pynvml.NVML_AFFINITY_SCOPE_NODE)
    if not nodes or not nodes[0]:
        return None
    return int(nodes[0] & -nodes[0]).bit_length() - 1


_SWITCH = "switch"  # in place of a PCI bus id


def _active_nvlinks(handle: Any) -> dict[str, int]:
    """The number of active NVLinks of one GPU by where they lead: another GPU's PCI bus id, or a switch."""
    found: dict[str, int] = {}
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = _figure(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break  # no NVLink at all, or no more of them
        if state != pynvml.NVML_FEATURE_ENABLED:
            continue
        kind = _figure(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        end: str | None = _SWITCH
        if kind != pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            remote = _figure(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            end = None if remote is None else _text(remote.busId)
        if end is not None:
            found[end] = found.get(end, 0) + 1
    return found


# --- critical errors (Xid): events for those who have subscribed, from then on ----------------------------------------

# So many events are fetched in one go; a GPU in a bad state sends them without end.
_MOST_AT_ONCE = 64


class XidEvents:
    """The Xid events of these GPUs (handles by UUID) since the subscription, within one session of the driver. A driver
    or GPU that has no such events reports none."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        self._uuids = {_number(handle): uuid for uuid, handle in handles.items()}
        self._seen: dict[str, DriverEvent] = {}
        self._set: Any | None = _figure(pynvml.nvmlEventSetCreate)
        if self._set is not None:
            for handle in handles.values():
                _figure(pynvml.nvmlDeviceRegisterEvents, handle, pynvml.nvmlEventTypeXidCriticalError, self._set)

    def seen(self) -> Mapping[str, DriverEvent]:
        """See ``driver.Events``."""
        for _ in range(_MOST_AT_ONCE if self._set is not None else 0):
            event = _figure(pynvml.nvmlEventSetWait_v2, self._set, 0)
            if event is None:
                break  # no more for now, or the driver fails, which the next snapshot reports
            uuid = self._uuids.get(_number(event.device))
            if uuid is not None and event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                number, before = int(event.eventData), self._seen.get(uuid)
                self._seen[uuid] = DriverEvent(number, 1 if before is None else before.count + 1, fault(number))
        return self._seen

    def close(self) -> None:
        """See ``driver.Events``."""
        if self._set is not None:
            _figure(pynvml.nvmlEventSetFree, self._set)
            self._set = None


def _number(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


# Numbers and meanings from NVIDIA's "Xid Errors" reference. Those that a program can cause by itself (13: an exception
# in a kernel, 31: a bad address, 43 and 45: its work was ended) say nothing about the GPU and have no sentence here.
_FAULTS = {
    48: "a double-bit memory error",
    61: "an internal micro-controller has stopped",
    62: "an internal micro-controller has halted",
    63: "a page of memory is to be retired or a row remapped",
    64: "a page of memory could not be retired or a row remapped",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    92: "very many single-bit memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "its system processor does not answer",
    120: "its system processor failed",
    136: "an NVLink could not be trained",
    140: "an unrecovered memory error",
    143: "it could not be initialised",
    154: "it needs a reset, a drain or a reboot",
}


def fault(xid: int) -> str | None:
    """A sentence about an Xid that is the GPU's own fault: ``Xid 79 (it has fallen off the bus)``; None for others.

    >>> fault(79)
    'Xid 79 (it has fallen off the bus)'
    >>> fault(31) is None
    True
    """
    return f"Xid {xid} ({_FAULTS[xid]})" if xid in _FAULTS else None
