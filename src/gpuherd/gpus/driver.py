"""The NVIDIA driver, kept open and asked again when it fails.

It decides nothing about GPUs. No error leaves it: a driver that fails is started again and asked a few times more; then
the GPU, or the whole machine, comes with ``problem``, one plain sentence. What is asked of one GPU is in
``gpuherd.gpus.nvml``; no other module than these two talks to NVML.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pynvml

from gpuherd.gpus.nvml import (
    GPU_GONE,
    Fixed,
    XidEvents,
    broken_gpu,
    figure_or_none,
    gpu_sentence,
    no_processes,
    read_again,
    read_fixed,
    read_gpu,
    read_peers,
    read_uncorrected_errors,
    read_used_mb,
)
from gpuherd.gpus.state import UNREAD, Gpu, Machine, Peer, ProcessTable

logger = logging.getLogger(__name__)

# Seconds to wait before asking a failing driver again. A driver reload takes longer; then the caller's next snapshot
# finds it back.
PAUSES_S = (0.02, 0.1, 0.3)
# While someone waits for a driver, it is started again so often: each time may start its kernel module's loader.
DRIVER_PAUSE_S = 2.0

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
# Errors of the driver that no second try at once mends, as long as it has never answered.
_NO_DRIVER = frozenset(_DRIVER_SENTENCES)


@dataclass(slots=True)
class _Device:
    """A GPU as the driver numbers it. ``handle`` is None while the driver refuses it, for the reason ``refusal``;
    ``split``: it was in MIG mode when last read."""

    number: int
    fixed: Fixed
    handle: Any | None
    refusal: str = ""
    split: bool = False


@dataclass(slots=True)
class _Session:
    """What is kept between two snapshots as long as the driver goes on answering."""

    driver_version: str | None
    cuda_version: str | None
    devices: list[_Device]
    peers: dict[str, tuple[Peer, ...]] | None = None
    events: XidEvents | None = None


@dataclass(frozen=True, slots=True)
class _Try:
    """How one try reads: the last reports a GPU that fails; one that failed before is reported at once."""

    last: bool
    processes: bool
    topology: bool
    errors: bool
    only: Collection[str] | None = None
    failing: set[str] = field(default_factory=set)

    def wants(self, device: _Device) -> bool:
        """Whether to read this GPU; one that is split may be asked for by its instances, and one that fails changes how
        CUDA counts the others."""
        return self.only is None or device.split or device.handle is None or device.fixed.uuid in self.only

    def gives_up(self, error: pynvml.NVMLError, uuid: str) -> bool:
        """Whether this error of one GPU is reported rather than tried again."""
        return error.value in GPU_GONE or self.last or uuid in self.failing


class Nvml:
    """The driver, started when first needed and kept open. Threads may share one; a forked child starts its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._session: _Session | None = None
        self._processes = ProcessTable()
        self._ever_answered = False
        self._answered_last = True
        self._failing: set[str] = set()
        self._seen: dict[int, Fixed] = {}

    def snapshot(
        self,
        processes: bool = True,
        topology: bool = False,
        *,
        errors: bool = False,
        only: Collection[str] | None = None,
    ) -> Machine:
        """All whole GPUs and MIG instances now, in PCI order, an instance after its parent.

        Args:
            processes: list the processes on each GPU; without, the tuples are empty and the snapshot is cheaper.
            topology: list each GPU's peers. Read once and kept.
            errors: tell memory errors, and Xid errors since this was first asked.
            only: the UUIDs that the caller is interested in: other whole GPUs may be missing. None for all.
        """
        if self._pid != os.getpid():
            # The lock may be held by a thread that fork left behind, and the driver's handles are the parent's.
            self._lock, self._session, self._pid = threading.Lock(), None, os.getpid()
        with self._lock:
            return self._snapshot(processes, topology, errors, only)

    def used_mb(self, uuids: Collection[str]) -> dict[str, int]:
        """Memory in use now on each of these whole GPUs, by UUID: a look that costs a tenth of a snapshot.

        A GPU is missing when it is split, or can't be read at once; {} without a snapshot before, or a driver that
        answers. A snapshot then tells what is the matter.
        """
        if self._pid != os.getpid():
            return {}
        with self._lock:
            devices = () if self._session is None else tuple(self._session.devices)
            found: dict[str, int] = {}
            for device in devices:
                if device.handle is None or device.split or device.fixed.uuid not in uuids:
                    continue
                try:
                    used = read_used_mb(device.handle)
                except pynvml.NVMLError:
                    continue
                if used is not None:
                    found[device.fixed.uuid] = used
            return found

    def renewed(self, gpus: Sequence[Gpu]) -> dict[str, Gpu]:
        """These whole GPUs of an earlier snapshot with their memory and processes of now, by UUID: a cheap snapshot.

        {} when that does not do, and a snapshot is needed: a GPU (also one that was not asked for, which changes how
        CUDA counts) does not answer, or one is split, or the driver has other GPUs now.
        """
        if self._pid != os.getpid():
            return {}
        with self._lock:
            session = self._session
            try:
                if session is None or pynvml.nvmlDeviceGetCount() != len(session.devices):
                    return {}
                return self._renewed(session, {gpu.uuid: gpu for gpu in gpus})
            except pynvml.NVMLError:
                return {}

    def _renewed(self, session: _Session, gpus: Mapping[str, Gpu]) -> dict[str, Gpu]:
        found: dict[str, Gpu] = {}
        for device in session.devices:
            if device.handle is None or device.split:
                return {}
            known = gpus.get(device.fixed.uuid)
            if known is None:
                read_used_mb(device.handle)  # whether it answers
                continue
            now = None if known.problem else read_again(known, device.handle, self._processes.identify)
            if now is None:
                return {}
            found[known.uuid] = now
        if len(found) == len(session.devices):
            self._processes.keep_only({process.pid for gpu in found.values() for process in gpu.processes})
        return found if len(found) == len(gpus) else {}

    def close(self) -> None:
        """Lets go of the driver; the next snapshot starts it again."""
        with self._lock:
            self._end_session()

    def _snapshot(self, processes: bool, topology: bool, errors: bool, only: Collection[str] | None) -> Machine:
        # While the driver fails for good, every caller's own interval is pause enough.
        pauses = PAUSES_S if self._answered_last else ()
        for pause in (*pauses, None):
            try:
                machine = self._read(_Try(pause is None, processes, topology, errors, only, self._failing))
            except pynvml.NVMLError as error:
                self._end_session()
                if pause is None or (error.value in _NO_DRIVER and not self._ever_answered):
                    self._answered_last = False
                    return Machine(
                        problem=_driver_sentence(error), may_pass=error.value != pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
                    )
                time.sleep(pause)
            else:
                self._answered_last = True
                return machine
        raise AssertionError("the last try always returns")

    def _read(self, attempt: _Try) -> Machine:
        session = self._session
        if session is None or pynvml.nvmlDeviceGetCount() != len(session.devices):
            self._end_session()
            session = self._session = self._start_session(attempt)
        xids: Mapping[str, tuple[int, int]] = self._events(session).seen() if attempt.errors else {}
        gpus: list[Gpu] = []
        for index, device in enumerate(session.devices):
            if not attempt.wants(device) and _answers(device.handle):
                continue
            read = self._read_device(index, device, attempt)
            gpus += [_with_errors(gpu, device, xids.get(device.fixed.uuid)) for gpu in read] if attempt.errors else read
        first_broken = min((gpu.index for gpu in gpus if gpu.problem is not None), default=len(session.devices))
        gpus = [replace(gpu, index_unsure=True) if gpu.index > first_broken else gpu for gpu in gpus]
        if attempt.topology:
            peers = self._peers(session)
            gpus = [replace(gpu, peers=peers.get(gpu.uuid, ())) for gpu in gpus]
        if attempt.processes and attempt.only is None:
            self._processes.keep_only({process.pid for gpu in gpus for process in gpu.processes})
        if not session.devices:
            return Machine((), session.driver_version, session.cuda_version, "the NVIDIA driver finds no GPU", True)
        return Machine(tuple(gpus), session.driver_version, session.cuda_version)

    def _start_session(self, attempt: _Try) -> _Session:
        pynvml.nvmlInit()
        try:
            cuda = figure_or_none(pynvml.nvmlSystemGetCudaDriverVersion_v2)
            count = pynvml.nvmlDeviceGetCount()
            self._ever_answered = True
            devices = [self._open_device(number, attempt) for number in range(count)]
            if all(device.fixed.pci_bus_id for device in devices):
                devices.sort(key=lambda device: _pci_place(device.fixed.pci_bus_id or ""))
            return _Session(
                driver_version=figure_or_none(pynvml.nvmlSystemGetDriverVersion),
                cuda_version=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
                devices=devices,
            )
        except pynvml.NVMLError:
            _shut_down()
            raise

    def _end_session(self) -> None:
        if self._session is not None:
            if self._session.events is not None:
                self._session.events.close()
            self._session = None
            _shut_down()

    def _open_device(self, number: int, attempt: _Try) -> _Device:
        never_seen = Fixed(uuid=f"{UNREAD}{number}", name="unreadable GPU")
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            fixed = read_fixed(handle)
        except pynvml.NVMLError as error:
            known = self._seen.get(number, never_seen)
            if not attempt.gives_up(error, known.uuid):
                raise
            attempt.failing.add(known.uuid)
            return _Device(number, known, None, gpu_sentence(error))
        attempt.failing.discard(never_seen.uuid)
        self._seen[number] = fixed
        return _Device(number, fixed, handle)

    def _read_device(self, index: int, device: _Device, attempt: _Try) -> list[Gpu]:
        """The GPU and its MIG instances."""
        if device.handle is None:
            again = self._open_device(device.number, attempt)
            device.fixed, device.handle, device.refusal = again.fixed, again.handle, again.refusal
            if device.handle is None:
                return [broken_gpu(index, device.fixed, device.refusal)]
        identify = self._processes.identify if attempt.processes else no_processes
        try:
            gpus = read_gpu(index, device.fixed, device.handle, identify)
        except pynvml.NVMLError as error:
            if not attempt.gives_up(error, device.fixed.uuid):
                raise
            attempt.failing.add(device.fixed.uuid)
            return [broken_gpu(index, device.fixed, gpu_sentence(error))]
        attempt.failing.discard(device.fixed.uuid)
        device.split = bool(gpus[0].mig_instances)
        return gpus

    def _events(self, session: _Session) -> XidEvents:
        if session.events is None:
            devices = [device for device in session.devices if device.handle is not None]
            session.events = XidEvents({device.fixed.uuid: device.handle for device in devices})
        return session.events

    def _peers(self, session: _Session) -> dict[str, tuple[Peer, ...]]:
        if session.peers is not None:
            return session.peers
        handles = {device.fixed: device.handle for device in session.devices if device.handle is not None}
        peers = read_peers({fixed: handle for fixed, handle in handles.items() if fixed.uuid not in self._failing})
        if len(peers) == len(session.devices):
            session.peers = peers
        return peers


_SHARED = Nvml()


def machine(*, processes: bool = True, topology: bool = False, driver_wait_s: float = 0) -> Machine:
    """The machine's GPUs now, through a driver session that the whole process shares. See ``Nvml.snapshot``.

    Args:
        driver_wait_s: an installed driver that shows no GPU is waited for so many seconds at most; a warning says so.
    """
    deadline = time.monotonic() + driver_wait_s
    now = _SHARED.snapshot(processes, topology)
    if now.may_pass and driver_wait_s > 0:
        logger.warning("waiting up to %g s for the NVIDIA driver: %s", driver_wait_s, now.problem)
    while now.may_pass and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(DRIVER_PAUSE_S, left))
        now = _SHARED.snapshot(processes, topology)
    return now


def _with_errors(gpu: Gpu, device: _Device, xid: tuple[int, int] | None) -> Gpu:
    readable = device.handle is not None and gpu.problem is None
    uncorrected = read_uncorrected_errors(device.handle) if readable else None
    last, count = (None, 0) if xid is None else xid
    return replace(gpu, uncorrected_errors=uncorrected, last_xid=last, xids=count)


def _shut_down() -> None:
    try:
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return  # the driver is gone; there is nothing left to close


def _driver_sentence(error: pynvml.NVMLError) -> str:
    return _DRIVER_SENTENCES.get(error.value, f"the NVIDIA driver fails: {error}")


def _answers(handle: Any) -> bool:
    """Whether the driver still reaches this GPU: the cheapest question."""
    try:
        read_used_mb(handle)
    except pynvml.NVMLError:
        return False
    return True


def _pci_place(bus_id: str) -> tuple[int, ...]:
    """Domain, bus, device and function of ``00000000:3B:00.0``, which sorts GPUs as CUDA's PCI_BUS_ID order does."""
    return tuple(int(part, 16) for part in bus_id.replace(".", ":").split(":"))
