"""The stand-in driver library, asked through NVIDIA's own Python binding, answers what the state says."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpuherd.errors import UsageError
from gpuherd.gpus.state import SIMULATED
from gpuherd.standin import driver
from gpuherd.standin import state as layout
from gpuherd.standin.machine import OutOfMemory, SimulatedMachine

Standin = Callable[..., SimulatedMachine]
MB = 1 << 20


@pytest.fixture(autouse=True)
def _shut_down() -> Iterator[None]:
    yield
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


def handles() -> list[Any]:
    pynvml.nvmlInit()
    return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]


def used_mb(handle: Any) -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) // MB


def processes(handle: Any) -> list[tuple[int, int | None]]:
    found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return [(p.pid, None if p.usedGpuMemory is None else p.usedGpuMemory // MB) for p in found]


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])


def test_c_and_python_agree_on_the_layout() -> None:
    library = ctypes.CDLL(str(driver.library_folder() / driver.NVML))
    told = (ctypes.c_uint32 * 8)()
    library.gpuherd_standin_layout(told)
    assert list(told) == [
        layout.LAYOUT_VERSION,
        ctypes.sizeof(layout.State),
        ctypes.sizeof(layout.Device),
        ctypes.sizeof(layout.Process),
        layout.State.calls.offset,  # type: ignore[attr-defined]
        layout.State.nvlinks.offset,  # type: ignore[attr-defined]
        layout.State.device.offset,  # type: ignore[attr-defined]
        layout.State.process.offset,  # type: ignore[attr-defined]
    ]


def test_lists_the_gpus_of_the_spec(standin: Standin) -> None:
    machine = standin("2x24GB+80GB")
    gpus = handles()
    assert [pynvml.nvmlDeviceGetMemoryInfo(gpu).total // MB for gpu in gpus] == [24576, 24576, 81920]
    assert tuple(pynvml.nvmlDeviceGetUUID(gpu) for gpu in gpus) == machine.uuids
    assert [pynvml.nvmlDeviceGetName(gpu) for gpu in gpus] == [
        "Simulated 24GB GPU",
        "Simulated 24GB GPU",
        "Simulated 80GB GPU",
    ]
    assert [pynvml.nvmlDeviceGetPciInfo(gpu).bus for gpu in gpus] == [0x10, 0x11, 0x12]
    assert pynvml.nvmlDeviceGetCudaComputeCapability(gpus[0]) == (8, 0)
    for gpu, uuid in zip(gpus, machine.uuids, strict=True):
        same = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        assert pynvml.nvmlDeviceGetIndex(same) == pynvml.nvmlDeviceGetIndex(gpu)
    bus_id = pynvml.nvmlDeviceGetPciInfo(gpus[2]).busId
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)) == 2


def test_machines_never_share_a_uuid(tmp_path: Path) -> None:
    machines = [SimulatedMachine.create(tmp_path / str(i), "8x40GB") for i in range(3)]
    assert len({uuid for machine in machines for uuid in machine.uuids}) == 24
    assert SimulatedMachine.open(tmp_path / "1").uuids == machines[1].uuids
    # What was recorded of them is known for what it is.
    assert all(uuid.endswith(f"-{SIMULATED}") for machine in machines for uuid in machine.uuids)


def test_without_a_machine_there_is_no_driver(standin: Standin) -> None:
    with pytest.raises(pynvml.NVMLError_LibraryNotFound):
        pynvml.nvmlInit()
    machine = standin("1x40GB")
    (gpu,) = handles()
    machine.deactivate()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetUUID(gpu)
    with pytest.raises(pynvml.NVMLError_LibraryNotFound):
        pynvml.nvmlInit()


def test_another_machine_needs_a_new_initialisation(standin: Standin) -> None:
    standin("1x40GB")
    assert len(handles()) == 1
    standin("3x40GB")
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()
    assert len(handles()) == 3


def test_initialisations_are_counted(standin: Standin) -> None:
    standin("1x40GB")
    pynvml.nvmlInit()
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    assert pynvml.nvmlDeviceGetCount() == 1
    pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


def test_a_truncated_state_file_is_no_machine(standin: Standin) -> None:
    machine = standin("1x40GB")
    machine.path.write_bytes(machine.path.read_bytes()[:100])
    with pytest.raises(pynvml.NVMLError):
        pynvml.nvmlInit()


def test_memory_belongs_to_a_living_process(standin: Standin) -> None:
    machine = standin("2x40GB")
    gpu, other = handles()
    process = sleeper()
    try:
        machine.occupy(0, 3000, pid=process.pid)
        assert used_mb(gpu) == machine.used_mb(0) == 3000
        assert processes(gpu) == [(process.pid, 3000)]
        assert used_mb(other) == 0
        info = pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2)
        assert (info.total // MB, info.free // MB, info.used // MB) == (40960, 37960, 3000)
        process.send_signal(signal.SIGKILL)
        # Not yet waited for, it is a zombie as soon as the kernel has cleaned up: it holds no memory then.
        deadline = time.monotonic() + 5
        while used_mb(gpu) and time.monotonic() < deadline:
            time.sleep(0.002)
        assert process.returncode is None
        assert used_mb(gpu) == machine.used_mb(0) == 0
        assert processes(gpu) == []
    finally:
        process.kill()
        process.wait()


def test_a_pid_used_again_is_another_process(standin: Standin) -> None:
    machine = standin("1x40GB")
    machine.occupy(0, 1000, pid=os.getpid())
    with machine.change() as state:
        state.process[0].start -= 1
    (gpu,) = handles()
    assert used_mb(gpu) == machine.used_mb(0) == 0


def test_phantoms_last_until_their_time_or_release(standin: Standin) -> None:
    machine = standin("2x40GB")
    first, second = handles()
    machine.occupy(0, 1000, until_s=1)
    held = machine.occupy(1, 2000)
    assert (used_mb(first), used_mb(second)) == (1000, 2000)
    time.sleep(1.01)
    assert (used_mb(first), used_mb(second)) == (0, 2000)
    held.release()
    replaced = machine.occupy(1, 500)
    held.release()  # must not touch what took its place
    assert used_mb(second) == 500
    replaced.release()
    assert used_mb(second) == 0


def test_what_does_not_fit_is_refused_whole(standin: Standin) -> None:
    machine = standin("1x40GB")
    machine.occupy(0, 40_000)
    with pytest.raises(OutOfMemory, match="960 MB free; 961 MB"):
        machine.occupy(0, 961)
    machine.occupy(0, 960)
    assert machine.used_mb(0) == 40_960


def test_display_processes_are_listed_apart(standin: Standin) -> None:
    machine = standin("1x40GB")
    machine.occupy(0, 150, graphics=True)
    (gpu,) = handles()
    assert processes(gpu) == []
    assert len(pynvml.nvmlDeviceGetGraphicsRunningProcesses(gpu)) == 1


def test_containers_hide_pids_and_some_drivers_hide_memory(standin: Standin) -> None:
    machine = standin("1x40GB")
    held = machine.occupy(0, 700)
    (gpu,) = handles()
    machine.hide_process_memory()
    assert processes(gpu) == [(held.pid, None)]
    machine.hide_pids()
    assert processes(gpu) == []
    machine.set_ghost_memory(0, 300)
    assert used_mb(gpu) == 1000


def test_figures_follow_use_until_they_are_set(standin: Standin) -> None:
    machine = standin("1x40GB")
    (gpu,) = handles()

    def figures() -> tuple[int, int, int]:
        utilisation = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu
        return utilisation, pynvml.nvmlDeviceGetTemperature(gpu, 0), pynvml.nvmlDeviceGetPowerUsage(gpu)

    idle = figures()
    held = machine.occupy(0, 1000)
    busy = figures()
    assert all(low < high for low, high in zip(idle, busy, strict=True))
    machine.set_utilisation(0, 17)
    machine.set_temperature(0, 80)
    machine.set_power(0, 123.5)
    assert figures() == (17, 80, 123_500)
    assert pynvml.nvmlDeviceGetTemperatureV(gpu, 0) == 80
    held.release()
    machine.set_utilisation(0, None)
    machine.set_temperature(0, None)
    machine.set_power(0, None)
    assert figures() == idle


def test_a_lost_gpu_answers_so_and_comes_back(standin: Standin) -> None:
    machine = standin("2x40GB")
    gpu, other = handles()
    machine.lose(0)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetMemoryInfo(gpu)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlDeviceGetCount() == 2
    assert used_mb(other) == 0
    machine.restore(0)
    assert used_mb(gpu) == 0


def test_a_failing_driver_fails_every_call_and_recovers(standin: Standin) -> None:
    machine = standin("1x40GB")
    (gpu,) = handles()
    machine.fail(pynvml.NVML_ERROR_UNKNOWN)
    for call in (lambda: used_mb(gpu), pynvml.nvmlDeviceGetCount, pynvml.nvmlInit):
        with pytest.raises(pynvml.NVMLError_Unknown):
            call()
    machine.fail(None)
    assert used_mb(gpu) == 0
    machine.fail(pynvml.NVML_ERROR_TIMEOUT, calls=2)
    for _ in range(2):
        with pytest.raises(pynvml.NVMLError_Timeout):
            used_mb(gpu)
    assert used_mb(gpu) == 0


def test_latency_and_calls_are_seen(standin: Standin) -> None:
    machine = standin("1x40GB")
    (gpu,) = handles()
    before = machine.calls
    machine.set_latency(0.05)
    start = time.monotonic()
    used_mb(gpu)
    used_mb(gpu)
    assert time.monotonic() - start >= 0.1
    assert machine.calls == before + 2


def test_mig_instances_are_devices_with_their_own_memory(standin: Standin) -> None:
    machine = standin("2x40GB,mig=gpu1:20GB+10GB")
    whole, split = handles()
    assert pynvml.nvmlDeviceGetMigMode(whole) == [0, 0]
    assert pynvml.nvmlDeviceGetMigMode(split) == [1, 1]
    first, second = (pynvml.nvmlDeviceGetMigDeviceHandleByIndex(split, i) for i in range(2))
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetMigDeviceHandleByIndex(split, 2)
    assert pynvml.nvmlDeviceGetUUID(second) == machine.uuid("1:1")
    assert pynvml.nvmlDeviceGetUUID(second).startswith("MIG-")
    assert pynvml.nvmlDeviceIsMigDeviceHandle(first).value == 1
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(first)
    assert pynvml.nvmlDeviceGetUUID(parent) == machine.uuids[1]
    held = machine.occupy("1:1", 6000)
    assert [used_mb(gpu) for gpu in (whole, split, first, second)] == [0, 6000, 0, 6000]
    assert processes(second) == [(held.pid, 6000)]
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(split)[0].gpuInstanceId == 2
    with pytest.raises(OutOfMemory):
        machine.occupy("1:1", 5000)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetUtilizationRates(first)
    assert pynvml.nvmlDeviceGetAttributes(first).memorySizeMB == 20480


def test_links_and_nearness(standin: Standin) -> None:
    machine = standin("4x40GB")
    machine.link(0, 2, 4)
    machine.link(0, 3, 2)
    gpus = handles()
    peers = []
    for link in range(layout.MAX_LINKS):
        if pynvml.nvmlDeviceGetNvLinkState(gpus[0], link):
            peers.append(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(gpus[0], link).bus - 0x10)
    assert peers == [2, 2, 2, 2, 3, 3]
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetNvLinkState(gpus[1], 0)
    level = pynvml.nvmlDeviceGetTopologyCommonAncestor
    assert level(gpus[0], gpus[1]) == pynvml.NVML_TOPOLOGY_SINGLE
    assert level(gpus[0], gpus[2]) == pynvml.NVML_TOPOLOGY_SYSTEM
    machine.set_proximity(0, 2, pynvml.NVML_TOPOLOGY_NODE)
    assert level(gpus[2], gpus[0]) == pynvml.NVML_TOPOLOGY_NODE
    assert [pynvml.nvmlDeviceGetMemoryAffinity(gpu, 1, 0)[0] for gpu in gpus] == [1, 1, 2, 2]


def test_a_child_process_sees_the_machine_by_its_environment_alone(standin: Standin) -> None:
    machine = standin("3x40GB")
    code = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "3"
    environment = {name: value for name, value in os.environ.items() if name not in machine.environment()}
    silent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert silent.returncode != 0


def test_a_forked_child_has_a_lock_of_its_own(standin: Standin) -> None:
    machine = standin("1x40GB")
    (gpu,) = handles()
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if all(used_mb(gpu) in (0, 100) for _ in range(300)) else 1
            finally:
                os._exit(code)
        children.append(pid)
    for _ in range(100):
        machine.occupy(0, 100).release()
        used_mb(gpu)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4


def test_xid_errors_are_told_to_each_who_has_asked_for_them_and_only_from_then_on(standin: Standin) -> None:
    machine = standin("2x40GB")
    gpus = handles()
    machine.xid(0, 31)
    sets = [pynvml.nvmlEventSetCreate() for _ in range(2)]
    for number, events in enumerate(sets):
        for gpu in gpus[number:]:
            pynvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventTypeXidCriticalError, events)
    machine.xid(0, 79)
    machine.xid(1, 48)
    told = [[told_by(events) for _ in range(3)] for events in sets]
    assert told == [[(0, 79), (1, 48), None], [(1, 48), None, None]]
    pynvml.nvmlEventSetFree(sets[0])
    with pytest.raises(pynvml.NVMLError):
        pynvml.nvmlEventSetWait_v2(sets[0], 0)
    with pytest.raises(pynvml.NVMLError):
        pynvml.nvmlDeviceRegisterEvents(gpus[0], pynvml.nvmlEventTypeClock, sets[1])


def told_by(events: Any) -> tuple[int, int] | None:
    """The next event as GPU and Xid, None when there is no more."""
    try:
        event = pynvml.nvmlEventSetWait_v2(events, 0)
    except pynvml.NVMLError as none:
        assert none.value == pynvml.NVML_ERROR_TIMEOUT
        return None
    return pynvml.nvmlDeviceGetIndex(event.device), int(event.eventData)


def test_memory_errors_that_could_not_be_corrected(standin: Standin) -> None:
    machine = standin("1x40GB")
    (gpu,) = handles()
    machine.set_ecc_errors(0, 3)
    counts = [pynvml.nvmlDeviceGetTotalEccErrors(gpu, kind, pynvml.NVML_VOLATILE_ECC) for kind in (0, 1)]
    assert counts == [0, 3]


@pytest.mark.parametrize("name", driver.entry_points())
def test_every_call_can_be_made_to_fail_by_itself(standin: Standin, name: str) -> None:
    machine = standin("2x40GB")
    library = ctypes.CDLL(str(driver.library_folder() / driver.NVML))
    gpus = handles()
    machine.fail(77, function=name)
    if name != "nvmlInit_v2":
        assert getattr(library, name)(gpus[0], None, None, None) == 77
    else:
        assert library.nvmlInit() == library.nvmlInit_v2() == library.nvmlInitWithFlags(0) == 77
    if name != "nvmlDeviceGetUUID":
        assert pynvml.nvmlDeviceGetUUID(gpus[0]) == machine.uuids[0]
    machine.fail(None)
    assert len(handles()) == 2


def test_a_call_can_fail_for_one_gpu_and_for_a_number_of_times(standin: Standin) -> None:
    machine = standin("3x40GB")
    machine.fail(77, function="nvmlDeviceGetHandleByIndex_v2", gpu=1, calls=2)
    pynvml.nvmlInit()
    codes = []
    for gpu in (0, 1, 1, 1, 2):
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlDeviceGetHandleByIndex(gpu)
            codes.append(gpu)
    assert codes == [0, 1, 2]
    gpus = handles()
    machine.fail(999, gpu=2)
    assert used_mb(gpus[0]) == 0
    with pytest.raises(pynvml.NVMLError_Unknown):
        used_mb(gpus[2])
    with pytest.raises(UsageError, match="nvmlDeviceGetColour"):
        machine.fail(999, function="nvmlDeviceGetColour")


def test_a_lost_gpu_is_lost_to_questions_of_its_neighbours_too(standin: Standin) -> None:
    machine = standin("2x40GB,nvlink=2")
    one, two = handles()
    machine.lose(1)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetNvLinkRemotePciInfo(one, 0)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetTopologyCommonAncestor(one, two)
