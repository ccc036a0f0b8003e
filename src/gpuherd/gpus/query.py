"""The machine's GPUs, read through whichever maker's driver shows some, kept open and queried again when it fails.

No error leaves this module: a driver that fails is started again and queried up to three times more; then the GPU, or
the whole machine, comes with ``problem``, one sentence. It decides nothing about GPUs.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from gpuherd.gpus.amdsmi import AmdSmi
from gpuherd.gpus.driver import DRIVER_PAUSE_S, Driver, DriverEvent, DriverFailure, Events, Memory
from gpuherd.gpus.nvml import Nvml
from gpuherd.gpus.state import UNREAD, Gpu, GpuProcess, Machine, Peer

logger = logging.getLogger(__name__)

# The first that shows GPUs is used, and no other as long as it is installed: on a machine whose NVIDIA driver fails for
# a while, jobs must not go to the processor's own graphics. Where none shows any, the first that is installed gives the
# reason.
DRIVERS: tuple[Callable[[], Driver], ...] = (Nvml, AmdSmi)
# Seconds to wait before querying a failing driver again. A driver reload takes longer; then the caller's next snapshot
# finds it back.
PAUSES_S = (0.02, 0.1, 0.3)

_NO_MEMORY_FIGURE = "the driver does not report how much of its memory is in use"


def _owner(pid: int) -> tuple[str | None, str | None]:
    """User and program of a process; None for both when it has ended, or runs in another container."""
    import psutil  # slow to import, and commands that only plan need none

    try:
        return _owner_since(pid, psutil.Process(pid).create_time())
    except (psutil.Error, ValueError, OverflowError):
        return None, None


@lru_cache(maxsize=4096)
def _owner_since(pid: int, started: float) -> tuple[str, str]:
    """The owner of the process that was started then, kept so that looking at the same GPUs ten times a second stays
    cheap. Only the program's name is read, never its arguments, which may hold secrets."""
    del started
    import psutil

    process = psutil.Process(pid)
    # A process may call itself anything, also what moves a terminal's cursor.
    name = "".join(character if character.isprintable() else "?" for character in process.name())
    return process.username(), name


@dataclass(slots=True)
class _Device:
    """A GPU as the driver numbers it. ``gpu``: what does not change, and its index; ``place`` sorts it as the runtime
    counts, () where that is not known; ``handle`` is None while the driver refuses it, for the reason ``refusal``;
    ``split``: it had partitions when last read."""

    number: int
    gpu: Gpu
    place: tuple[int, ...]
    handle: Any | None
    refusal: str = ""
    split: bool = False


@dataclass(slots=True)
class _Session:
    """Kept from one snapshot to the next, as long as the driver answers."""

    versions: tuple[str | None, str | None]
    devices: list[_Device]
    peers: dict[str, tuple[Peer, ...]] | None = None
    events: Events | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    """The parts of a snapshot to read."""

    processes: bool
    topology: bool
    errors: bool
    sensors: bool
    only: Collection[str] | None
    known: Mapping[str, Gpu]

    def wants(self, device: _Device) -> bool:
        """Whether to read this GPU. A split one may be meant by its instances, and one that fails changes how the
        runtime counts the others."""
        return self.only is None or device.split or device.handle is None or device.gpu.uuid in self.only


class _DriverReader:
    """One maker's driver: its session, and the identities of its GPUs over sessions."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._session: _Session | None = None
        self.has_shown_gpus = False
        self._ever_answered = False
        self._answered_last = True
        self._failing: set[str] = set()
        self._seen: dict[int, tuple[Gpu, tuple[int, ...]]] = {}

    def forget_session(self) -> None:
        """Drops the session without ending it: after a fork the handles are the parent's."""
        self._session = None

    def end_session(self) -> None:
        """Closes the driver; the next snapshot starts it again."""
        if self._session is not None:
            if self._session.events is not None:
                self._session.events.close()
            self._session = None
            self._driver.close()

    def snapshot(self, request: _Request) -> Machine:
        """See ``GpuReader.snapshot``."""
        # While the driver fails for good, every caller's own interval is pause enough.
        pauses = PAUSES_S if self._answered_last else ()
        for pause in (*pauses, None):
            try:
                machine = self._read(request, last=pause is None)
            except self._driver.error as error:
                self.end_session()
                failure = self._driver.machine_failure(error)
                if pause is None or (failure.lasting and not self._ever_answered):
                    self._answered_last = False
                    return Machine(problem=failure.sentence, may_pass=failure.installed, maker=self._driver.maker)
                time.sleep(pause)
            else:
                self._answered_last = True
                return machine
        raise AssertionError("the last try always returns")

    def used_mb(self, uuids: Collection[str]) -> dict[str, int]:
        """See ``GpuReader.used_mb``."""
        found: dict[str, int] = {}
        for device in () if self._session is None else tuple(self._session.devices):
            if device.handle is None or device.split or device.gpu.uuid not in uuids:
                continue
            try:
                memory = self._driver.memory(device.handle)
            except self._driver.error:
                continue
            if memory is not None:
                found[device.gpu.uuid] = memory.used_mb
        return found

    # --- a session --------------------------------------------------------------------------------------------

    def _start_session(self, *, last: bool) -> _Session:
        self._driver.open()
        try:
            count = self._driver.count()
            self._ever_answered = True
            devices = [self._open_device(number, last=last) for number in range(count)]
            if not self._driver.numbers_in_order or all(device.place for device in devices):
                # First those whose place is not known yet: the index of every other one is unsure then.
                devices.sort(key=lambda device: device.place)
            return _Session(self._driver.versions(), devices)
        except self._driver.error:
            self._driver.close()
            raise

    def _is_out_of_order(self, session: _Session) -> bool:
        """Whether the place of a GPU among the others became known since the session began: indices are then wrong."""
        places = [device.place for device in session.devices]
        return not self._driver.numbers_in_order and places != sorted(places)

    def _open_device(self, number: int, *, last: bool) -> _Device:
        never_seen = Gpu(index=0, uuid=f"{UNREAD}{number}", name="unreadable GPU", maker=self._driver.maker)
        try:
            handle = self._driver.device(number)
            known = self._driver.identity(handle), self._driver.place(handle) or ()
        except self._driver.error as error:
            gpu, place = self._seen.get(number, (never_seen, ()))
            return _Device(number, gpu, place, None, self._give_up(error, gpu.uuid, last=last).sentence)
        self._failing.discard(never_seen.uuid)
        self._seen[number] = known
        return _Device(number, *known, handle)

    def _give_up(self, error: Exception, uuid: str, *, last: bool) -> DriverFailure:
        """The failure to report of a GPU. Raises the error instead when the whole snapshot is worth another try: a
        GPU that failed before, or for good, is reported at once."""
        failure = self._driver.gpu_failure(error)
        if not (failure.lasting or last or uuid in self._failing):
            raise error
        self._failing.add(uuid)
        return failure

    def _events(self, session: _Session) -> Mapping[str, DriverEvent]:
        if session.events is None:
            devices = [device for device in session.devices if device.handle is not None]
            session.events = self._driver.events({device.gpu.uuid: device.handle for device in devices})
        return {} if session.events is None else session.events.seen()

    def _peers(self, session: _Session) -> dict[str, tuple[Peer, ...]]:
        if session.peers is not None:
            return session.peers
        handles = {device.gpu: device.handle for device in session.devices if device.handle is not None}
        peers = self._driver.peers({each: handle for each, handle in handles.items() if each.uuid not in self._failing})
        if len(peers) == len(session.devices):
            session.peers = peers
        return peers

    # --- reading ----------------------------------------------------------------------------------------------

    def _read(self, request: _Request, *, last: bool) -> Machine:
        session = self._session
        if session is None or self._driver.count() != len(session.devices):
            self.end_session()
            session = self._session = self._start_session(last=last)
        events = self._events(session) if request.errors else {}
        gpus: list[Gpu] = []
        for index, device in enumerate(session.devices):
            if not request.wants(device) and self._answers(device.handle):
                continue
            if device.handle is None:
                device = session.devices[index] = self._open_device(device.number, last=last)
            read = self._read_device(index, device, request, last=last)
            if request.errors:
                read = [self._with_errors(gpu, device, events.get(device.gpu.uuid)) for gpu in read]
            gpus += read
        if self._is_out_of_order(session):
            self.end_session()
            return self._read(request, last=last)
        first_broken = min((gpu.index for gpu in gpus if gpu.problem is not None), default=len(session.devices))
        gpus = [replace(gpu, index_unsure=True) if gpu.index > first_broken else gpu for gpu in gpus]
        if request.topology:
            peers = self._peers(session)
            gpus = [replace(gpu, peers=peers.get(gpu.uuid, ())) for gpu in gpus]
        maker = self._driver.maker
        problem = None if session.devices else f"the {maker} driver finds no GPU"
        return Machine(tuple(gpus), *session.versions, problem, may_pass=problem is not None, maker=maker)

    def _answers(self, handle: Any) -> bool:
        """Whether the driver still reaches this GPU: the cheapest query."""
        try:
            self._driver.memory(handle)
        except self._driver.error:
            return False
        return True

    def _read_device(self, index: int, device: _Device, request: _Request, *, last: bool) -> list[Gpu]:
        """The GPU and its partitions."""
        if device.gpu.index != index:
            device.gpu = replace(device.gpu, index=index)
        if device.handle is None:
            return [self._with_figures(device.gpu, None, request, problem=device.refusal)]
        try:
            gpus = self._read_gpu(device, request)
        except self._driver.error as error:
            failure = self._give_up(error, device.gpu.uuid, last=last)
            return [self._with_figures(device.gpu, None, request, problem=failure.sentence)]
        self._failing.discard(device.gpu.uuid)
        device.split = len(gpus) > 1
        return gpus

    def _read_gpu(self, device: _Device, request: _Request) -> list[Gpu]:
        gpu = device.gpu
        partitions = self._driver.partitions(device.handle, gpu)
        if partitions is not None:
            return self._read_split(gpu, device.handle, partitions, request)
        memory = self._driver.memory(device.handle)
        if memory is None:
            return [self._with_figures(gpu, None, request, problem=_NO_MEMORY_FIGURE)]
        processes = self._processes(device.handle) if request.processes else ()
        return [
            self._with_figures(gpu, memory, request, device.handle if request.sensors else None, processes=processes)
        ]

    def _read_split(
        self, whole: Gpu, handle: Any, partitions: Sequence[tuple[Any, Gpu]] | DriverFailure, request: _Request
    ) -> list[Gpu]:
        """A GPU in parts. Its memory is that of the parts where the driver reports it to administrators only."""
        problem = partitions.sentence if isinstance(partitions, DriverFailure) else None
        parts = [] if isinstance(partitions, DriverFailure) else partitions
        read = [self._read_partition(gpu, part, request) for part, gpu in parts]
        try:
            memory = self._driver.memory(handle)
        except self._driver.error:
            memory = None
        if memory is None:
            sums = zip(*((gpu.total_mb, gpu.used_mb, gpu.free_mb) for gpu in read), strict=True)
            memory = Memory(*map(sum, sums)) if read else None
        uuids = tuple(gpu.uuid for gpu in read)
        return [self._with_figures(whole, memory, request, handle, mig_instances=uuids, problem=problem), *read]

    def _read_partition(self, gpu: Gpu, handle: Any, request: _Request) -> Gpu:
        """With the problem when it can't be read: the others of its GPU may work."""
        processes: tuple[GpuProcess, ...] = ()
        try:
            memory = self._driver.memory(handle)
            processes = self._processes(handle) if request.processes else ()
            problem = _NO_MEMORY_FIGURE if memory is None else None
        except self._driver.error as error:
            memory, problem = None, self._driver.gpu_failure(error).sentence
        return self._with_figures(gpu, memory, request, processes=processes, problem=problem)

    def _with_figures(
        self, gpu: Gpu, memory: Memory | None, request: _Request, handle: Any = None, **fields: Any
    ) -> Gpu:
        """``handle``: of a whole GPU whose sensors are read too. One copy, since this is the dispatcher's hot path."""
        known = request.known.get(gpu.uuid)
        if known is not None:
            fields["peers"] = known.peers
        if memory is not None:
            fields |= {"total_mb": memory.total_mb, "used_mb": memory.used_mb, "free_mb": memory.free_mb}
        if handle is not None:
            sensors = self._driver.sensors(handle)
            fields["utilisation_percent"] = sensors.utilisation_percent
            fields["temperature_c"], fields["power_w"] = sensors.temperature_c, sensors.power_w
        elif known is not None and not request.sensors:
            fields["utilisation_percent"] = known.utilisation_percent
            fields["temperature_c"], fields["power_w"] = known.temperature_c, known.power_w
        return replace(gpu, **fields)

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...]:
        found: dict[int, GpuProcess] = {}
        for process in self._driver.processes(handle):
            if process.pid not in found:
                user, command = _owner(process.pid)
                found[process.pid] = replace(process, user=user, command=command)
        return tuple(found.values())

    def _with_errors(self, gpu: Gpu, device: _Device, event: DriverEvent | None) -> Gpu:
        readable = device.handle is not None and gpu.problem is None
        gpu = replace(gpu, uncorrected_errors=self._driver.uncorrected_errors(device.handle) if readable else None)
        return gpu if event is None else replace(gpu, last_xid=event.number, xids=event.count, fault=event.fault)


class GpuReader:
    """The drivers, started when first needed and kept open. Threads may share one; a forked child starts its own."""

    def __init__(self) -> None:
        self._readers = [_DriverReader(make()) for make in DRIVERS]
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def snapshot(
        self,
        processes: bool = True,
        topology: bool = False,
        *,
        errors: bool = False,
        sensors: bool = True,
        only: Collection[str] | None = None,
        known: Mapping[str, Gpu] = MappingProxyType({}),
    ) -> Machine:
        """All whole GPUs and MIG instances now, in the order of their indices, an instance after its parent.

        Args:
            processes: list the processes on each GPU; without, the tuples are empty and the snapshot is cheaper.
            topology: list each GPU's peers. Read once and kept.
            errors: report memory errors, and critical errors since the first snapshot with them.
            sensors: read utilisation, temperature and power of whole GPUs that are not split: two thirds of the calls.
            only: the UUIDs that the caller is interested in: other whole GPUs may be missing. None for all.
            known: the GPUs as the caller read them before, by UUID: their peers, and their sensors where those are not
                read, are taken over.
        """
        if self._pid != os.getpid():
            # The lock may be held by a thread that fork left behind, and the driver's handles are the parent's.
            self._lock, self._pid = threading.Lock(), os.getpid()
            for reader in self._readers:
                reader.forget_session()
        request = _Request(processes, topology, errors, sensors, only, known)
        with self._lock:
            without: list[Machine] = []
            for reader in self._readers:
                machine = reader.snapshot(request)
                if machine.problem is None:
                    reader.has_shown_gpus = True
                    self._readers.sort(key=lambda each: each is not reader)  # the first one tried from now on
                if machine.problem is None or (reader.has_shown_gpus and machine.may_pass):
                    return machine
                without.append(machine)
            missing = Machine(problem=", and ".join(str(machine.problem) for machine in without))
            return next((machine for machine in without if machine.may_pass), missing)

    def used_mb(self, uuids: Collection[str]) -> dict[str, int]:
        """Memory in use now on each of these whole GPUs, by UUID: a tenth of the cost of a snapshot.

        A GPU is missing when it is split, or can't be read at once; {} without a snapshot before, or a driver that
        answers. A snapshot then has the reason.
        """
        if self._pid != os.getpid():
            return {}
        with self._lock:
            return self._readers[0].used_mb(uuids)

    def close(self) -> None:
        """Closes the drivers; the next snapshot starts them again."""
        with self._lock:
            for reader in self._readers:
                reader.end_session()


_SHARED = GpuReader()


def machine(*, processes: bool = True, topology: bool = False, driver_wait_s: float = 0) -> Machine:
    """The machine's GPUs now, through a driver session that the whole process shares. See ``GpuReader.snapshot``.

    Args:
        driver_wait_s: wait at most so many seconds for an installed driver that shows no GPU; a warning is logged.
    """
    deadline = time.monotonic() + driver_wait_s
    now = _SHARED.snapshot(processes, topology)
    if now.may_pass and driver_wait_s > 0:
        logger.warning("waiting up to %g s for the %s driver: %s", driver_wait_s, now.maker, now.problem)
    while now.may_pass and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(DRIVER_PAUSE_S, left))
        now = _SHARED.snapshot(processes, topology)
    return now
