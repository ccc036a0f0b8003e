"""Reads GPUs through NVML: figures, links, processes, Xid errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pynvml

from gpuherd.gpus.state import Gpu, GpuProcess, Identity, Peer, Proximity

# Reads one GPU through NVML, and the links between two.
#
# Few queries decide whether a GPU can be used: its handle and UUID, MIG mode, memory and processes. Their errors are
# raised as pynvml's, but for those that mean "not on this GPU" or "not for this user", which give None. All other
# queries rank GPUs or inform people: any error of theirs gives None, so that one broken sensor, or a lost neighbour
# on NVLink, costs no GPU. Knows nothing of sessions, retries or other GPUs; the caller holds the driver open.

MB = 1 << 20

# The answers that mean "not on this GPU", "not for you" or "not in this driver" of a single question.
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
_GPU_SENTENCES = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "it has fallen off the bus; only a reboot or a driver reload brings it back",
    pynvml.NVML_ERROR_RESET_REQUIRED: "it needs a reset (sudo nvidia-smi --gpu-reset)",
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not use it",
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: "its power cables are not plugged in right",
    pynvml.NVML_ERROR_IRQ_ISSUE: "the kernel has an interrupt problem with it; see the kernel's log",
}
# Errors of one GPU that no second try mends.
GPU_GONE = frozenset(_GPU_SENTENCES)

# Compute cores of one multiprocessor, by compute capability (CUDA C++ Programming Guide, "Compute Capabilities").
_CORES_OF_EXACT = {(6, 0): 64, (8, 0): 64}
_CORES_OF_MAJOR = {3: 192, 5: 128, 6: 128, 7: 64, 8: 128, 9: 128, 10: 128, 11: 128, 12: 128}

_NO_MEMORY_FIGURE = "the driver does not tell how much of its memory is in use"
_NO_INSTANCES = "it is in MIG mode without instances; make some, or end MIG mode (nvidia-smi mig)"

# Newer drivers drop old questions, older ones lack the new. The second memory structure tells the driver's own reserve
# (600 MB on a large GPU) apart from what programs use.
_MEMORY_QUERIES: tuple[Callable[[Any], Any], ...] = (
    lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2),
    pynvml.nvmlDeviceGetMemoryInfo,
)
_TEMPERATURE_QUERIES = (pynvml.nvmlDeviceGetTemperatureV, pynvml.nvmlDeviceGetTemperature)
_COMPUTE_QUERIES = (pynvml.nvmlDeviceGetComputeRunningProcesses_v3, pynvml.nvmlDeviceGetComputeRunningProcesses_v2)
_GRAPHICS_QUERIES = (pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, pynvml.nvmlDeviceGetGraphicsRunningProcesses_v2)

_LEVELS = frozenset(map(int, Proximity))

Identify = Callable[[int], Identity]


@dataclass(frozen=True, slots=True)
class Fixed:
    """What never changes about a GPU."""

    uuid: str
    name: str
    pci_bus_id: str | None = None
    numa_node: int | None = None
    compute_capability: tuple[int, int] | None = None
    multi_processor_count: int | None = None


def answer_or_none(query: Callable[..., Any], *arguments: Any) -> Any | None:
    """The driver's answer, or None when it has none to this query for this GPU and user. Raises other errors."""
    return _first_answer((query,), *arguments)


def _first_answer(queries: Sequence[Callable[..., Any]], *arguments: Any) -> Any | None:
    """The answer of the first query that has one. Raises the first error that says more than that there is none."""
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


def figure_or_none(query: Callable[..., Any], *arguments: Any) -> Any | None:
    """The answer to a query that a GPU can do without; None after any error."""
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def gpu_sentence(error: pynvml.NVMLError) -> str:
    """Why a GPU can't be used whose queries end with this error."""
    return _GPU_SENTENCES.get(error.value, f"the driver fails on it: {error}")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def read_fixed(handle: Any) -> Fixed:
    """What never changes about the GPU of this handle."""
    pci = figure_or_none(pynvml.nvmlDeviceGetPciInfo_v3, handle)
    answer = figure_or_none(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    capability = None if answer is None else (int(answer[0]), int(answer[1]))
    return Fixed(
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(figure_or_none(pynvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"),
        pci_bus_id=None if pci is None else _text(pci.busId),
        numa_node=_numa_node(handle),
        compute_capability=capability,
        multi_processor_count=multiprocessors(figure_or_none(pynvml.nvmlDeviceGetNumGpuCores, handle), capability),
    )


def multiprocessors(cores: int | None, capability: tuple[int, int] | None) -> int | None:
    """Multiprocessors of a GPU: NVML counts compute cores only, and how many make one depends on the architecture.

    >>> multiprocessors(6912, (8, 0))  # an A100
    108
    """
    if not cores or capability is None:
        return None
    each = _CORES_OF_EXACT.get(capability, _CORES_OF_MAJOR.get(capability[0]))
    return None if each is None else cores // each


def _numa_node(handle: Any) -> int | None:
    """The nearest NUMA node of host memory: the lowest bit of the driver's set of 64 nodes."""
    nodes = figure_or_none(pynvml.nvmlDeviceGetMemoryAffinity, handle, 1, pynvml.NVML_AFFINITY_SCOPE_NODE)
    if not nodes or not nodes[0]:
        return None
    return int(nodes[0] & -nodes[0]).bit_length() - 1


def no_processes(pid: int) -> Identity:
    """Passed to ``read_gpu`` in place of a process table when processes are not wanted; it is never called."""
    raise AssertionError(f"process {pid} was looked up although no processes were asked for")


def read_gpu(index: int, fixed: Fixed, handle: Any, identify: Identify) -> list[Gpu]:
    """The state of a GPU now and, behind it, of its MIG instances. ``identify=no_processes`` lists no processes."""
    mig_mode = answer_or_none(pynvml.nvmlDeviceGetMigMode, handle)
    if mig_mode is not None and mig_mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
        instances = _read_instances(index, fixed, handle, identify)
        return [_read_split(index, fixed, handle, instances), *instances]
    memory = _first_answer(_MEMORY_QUERIES, handle)
    if memory is None:
        return [broken_gpu(index, fixed, _NO_MEMORY_FIGURE)]
    return [
        Gpu(
            total_mb=memory.total // MB,
            used_mb=memory.used // MB,
            free_mb=memory.free // MB,
            processes=_read_processes(handle, identify),
            **_described(index, fixed),
            **_sensors(handle),
        )
    ]


def read_again(gpu: Gpu, handle: Any, identify: Identify) -> Gpu | None:
    """A whole GPU that was read before, with the memory and the processes of now and all else as it was.

    A third of the questions of ``read_gpu``. None when it is in MIG mode or does not tell its memory.
    """
    mig_mode = answer_or_none(pynvml.nvmlDeviceGetMigMode, handle)
    if mig_mode is not None and mig_mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    memory = _first_answer(_MEMORY_QUERIES, handle)
    if memory is None:
        return None
    total_mb, used_mb, free_mb = memory.total // MB, memory.used // MB, memory.free // MB
    processes = _read_processes(handle, identify)
    if (total_mb, used_mb, free_mb, processes) == (gpu.total_mb, gpu.used_mb, gpu.free_mb, gpu.processes):
        return gpu
    return replace(gpu, total_mb=total_mb, used_mb=used_mb, free_mb=free_mb, processes=processes)


def read_used_mb(handle: Any) -> int | None:
    """Memory in use on the GPU of this handle now, and nothing else; None where the driver does not tell."""
    memory = _first_answer(_MEMORY_QUERIES, handle)
    return None if memory is None else int(memory.used // MB)


def read_uncorrected_errors(handle: Any) -> int | None:
    """Memory errors that could not be corrected, since the driver was loaded; None for a GPU without ECC."""
    kind, since = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    found = figure_or_none(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, since)
    return None if found is None else int(found)


def broken_gpu(index: int, fixed: Fixed, problem: str) -> Gpu:
    """A GPU that can't be read: what is known of it, no memory, and the reason."""
    return Gpu(total_mb=0, used_mb=0, free_mb=0, problem=problem, **_described(index, fixed))


def _described(index: int, fixed: Fixed) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": fixed.uuid,
        "name": fixed.name,
        "pci_bus_id": fixed.pci_bus_id,
        "numa_node": fixed.numa_node,
        "compute_capability": fixed.compute_capability,
        "multi_processor_count": fixed.multi_processor_count,
    }


def _sensors(handle: Any) -> dict[str, Any]:
    utilisation = figure_or_none(pynvml.nvmlDeviceGetUtilizationRates, handle)
    power_mw = figure_or_none(pynvml.nvmlDeviceGetPowerUsage, handle)
    return {
        "utilisation_percent": None if utilisation is None else int(utilisation.gpu),
        "temperature_c": figure_or_none(_first_answer, _TEMPERATURE_QUERIES, handle, pynvml.NVML_TEMPERATURE_GPU),
        "power_w": None if power_mw is None else power_mw / 1000,
    }


def _read_split(index: int, fixed: Fixed, handle: Any, instances: Sequence[Gpu]) -> Gpu:
    """The whole GPU in MIG mode. Its memory is the instances' where the driver gives it to administrators only."""
    memory = figure_or_none(_first_answer, _MEMORY_QUERIES, handle)
    return Gpu(
        total_mb=sum(gpu.total_mb for gpu in instances) if memory is None else memory.total // MB,
        used_mb=sum(gpu.used_mb for gpu in instances) if memory is None else memory.used // MB,
        free_mb=sum(gpu.free_mb for gpu in instances) if memory is None else memory.free // MB,
        mig_instances=tuple(gpu.uuid for gpu in instances),
        problem=None if instances else _NO_INSTANCES,
        **_described(index, fixed),
        **_sensors(handle),
    )


def _read_instances(index: int, parent: Fixed, handle: Any, identify: Identify) -> list[Gpu]:
    places = figure_or_none(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    instances = []
    for place in range(places):
        instance = figure_or_none(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
        uuid = None if instance is None else figure_or_none(pynvml.nvmlDeviceGetUUID, instance)
        if uuid is not None:  # places without an instance are common, and without a name nothing can run on it
            instances.append(_read_instance(index, place, parent, instance, _text(uuid), identify))
    return instances


def _read_instance(index: int, place: int, parent: Fixed, handle: Any, uuid: str, identify: Identify) -> Gpu:
    """An instance, with the problem when it can't be read: the others of its GPU may work."""
    attributes = figure_or_none(pynvml.nvmlDeviceGetAttributes_v2, handle)
    own = Fixed(
        uuid=uuid,
        name=_text(figure_or_none(pynvml.nvmlDeviceGetName, handle) or f"{parent.name} MIG"),
        pci_bus_id=parent.pci_bus_id,
        numa_node=parent.numa_node,
        compute_capability=parent.compute_capability,
        multi_processor_count=None if attributes is None else int(attributes.multiprocessorCount),
    )
    try:
        memory, processes = _first_answer(_MEMORY_QUERIES, handle), _read_processes(handle, identify)
        problem = _NO_MEMORY_FIGURE if memory is None else None
    except pynvml.NVMLError as error:
        memory, processes, problem = None, (), gpu_sentence(error)
    return Gpu(
        total_mb=0 if memory is None else memory.total // MB,
        used_mb=0 if memory is None else memory.used // MB,
        free_mb=0 if memory is None else memory.free // MB,
        mig_parent=parent.uuid,
        mig_position=place,
        processes=processes,
        problem=problem,
        **_described(index, own),
    )


def _read_processes(handle: Any, identify: Identify) -> tuple[GpuProcess, ...]:
    if identify is no_processes:
        return ()
    found: dict[int, GpuProcess] = {}
    for compute, queries in ((True, _COMPUTE_QUERIES), (False, _GRAPHICS_QUERIES)):
        for entry in _first_answer(queries, handle) or ():
            if entry.pid in found:
                continue  # in both lists: it computes and draws
            who, used = identify(entry.pid), entry.usedGpuMemory
            memory_mb = None if used is None else used // MB
            found[entry.pid] = GpuProcess(entry.pid, who.user, who.command, memory_mb, compute)
    return tuple(found.values())


@dataclass(slots=True)
class _NvLinks:
    """Where the active NVLinks of one GPU lead: to other GPUs by PCI bus id, and to switches."""

    to_gpus: dict[str, int]
    to_switches: int = 0


def read_peers(handles: Mapping[Fixed, Any]) -> dict[str, tuple[Peer, ...]]:
    """For each GPU by UUID, the ways to all others: NVLinks, straight or through a switch, and nearness on PCIe."""
    links = {fixed.uuid: _read_nvlinks(handle) for fixed, handle in handles.items()}
    peers: dict[str, list[Peer]] = {fixed.uuid: [] for fixed in handles}
    for (one, one_handle), (two, two_handle) in combinations(handles.items(), 2):
        level = figure_or_none(pynvml.nvmlDeviceGetTopologyCommonAncestor, one_handle, two_handle)
        proximity = Proximity(level) if level in _LEVELS else Proximity.SYSTEM
        straight = 0 if two.pci_bus_id is None else links[one.uuid].to_gpus.get(two.pci_bus_id, 0)
        # A switch joins every GPU on it with all the links that both have to it.
        nvlinks = straight + min(links[one.uuid].to_switches, links[two.uuid].to_switches)
        peers[one.uuid].append(Peer(two.uuid, nvlinks, proximity))
        peers[two.uuid].append(Peer(one.uuid, nvlinks, proximity))
    return {uuid: tuple(found) for uuid, found in peers.items()}


def _read_nvlinks(handle: Any) -> _NvLinks:
    found = _NvLinks({})
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = figure_or_none(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break  # no NVLink at all, or no more of them
        if state != pynvml.NVML_FEATURE_ENABLED:
            continue
        if figure_or_none(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == (
            pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        ):
            found.to_switches += 1
            continue
        remote = figure_or_none(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        if remote is not None:
            bus_id = _text(remote.busId)
            found.to_gpus[bus_id] = found.to_gpus.get(bus_id, 0) + 1
    return found


# Critical Xid errors as the driver tells them: an event each, to those who have asked, from then on.
#
# Knows one session of the driver; the caller holds it open. A driver or GPU that has no such events tells none.

# So many events are fetched in one go; a GPU in a bad way sends them without end.
_MOST_AT_ONCE = 64


class XidEvents:
    """The events of these GPUs (handles by UUID) since it was made."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        self._uuids = {_number(handle): uuid for uuid, handle in handles.items()}
        self._seen: dict[str, tuple[int, int]] = {}
        self._set: Any | None = None
        try:
            self._set = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            return
        for handle in handles.values():
            self._register(handle)

    def _register(self, handle: Any) -> None:
        try:
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
        except pynvml.NVMLError:
            return  # this GPU has no events

    def seen(self) -> Mapping[str, tuple[int, int]]:
        """By UUID, the number of the last Xid and how many there have been; GPUs without any are missing."""
        for _ in range(_MOST_AT_ONCE if self._set is not None else 0):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, 0)
            except pynvml.NVMLError:
                break  # no more for now, or the driver fails, which the next snapshot tells
            uuid = self._uuids.get(_number(event.device))
            if uuid is not None and event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                self._seen[uuid] = (int(event.eventData), self._seen.get(uuid, (0, 0))[1] + 1)
        return self._seen

    def close(self) -> None:
        """Asks for no more events."""
        if self._set is not None:
            try:
                pynvml.nvmlEventSetFree(self._set)
            except pynvml.NVMLError:
                return  # the driver is gone, and the set with it
            finally:
                self._set = None


def _number(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


# What an Xid error of the NVIDIA driver says: the GPU's fault, or the program's.
#
# Numbers and meanings from NVIDIA's "Xid Errors" reference. Those that a program can cause by itself (13: an
# exception in a kernel, 31: a bad address, 43 and 45: its work was ended) say nothing about the GPU and have no
# sentence here.

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
