"""Our reading of the driver, against the stand-in library: every GPU, and every way in which a driver fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gpus.machines import no_pauses

from gpuherd.gpus.nvml import multiprocessors
from gpuherd.gpus.query import GpuReader, machine
from gpuherd.gpus.state import GpuProcess, Proximity
from gpuherd.standin import driver as build
from gpuherd.standin.machine import SimulatedMachine as Simulated

Standin = Callable[..., Simulated]


def test_eight_gpus_come_in_pci_order_with_all_their_figures(standin: Standin) -> None:
    simulated = standin("7x40GB+1x80GB")
    simulated.set_utilisation(3, 77)
    simulated.set_temperature(3, 81)
    simulated.set_power(3, 312.5)
    simulated.set_numa_node(3, 1)
    seen = GpuReader().snapshot()
    assert seen.problem is None
    assert seen.driver_version is not None
    assert seen.cuda_version is not None
    assert [gpu.index for gpu in seen.gpus] == list(range(8))
    assert tuple(gpu.uuid for gpu in seen.gpus) == simulated.uuids
    assert [gpu.pci_bus_id for gpu in seen.gpus] == sorted(str(gpu.pci_bus_id) for gpu in seen.gpus)
    assert [gpu.total_mb for gpu in seen.gpus] == [40_960] * 7 + [81_920]
    gpu = seen.gpus[3]
    assert (gpu.utilisation_percent, gpu.temperature_c, gpu.power_w, gpu.numa_node) == (77, 81, 312.5, 1)
    assert gpu.compute_capability is not None
    assert gpu.multi_processor_count is not None
    assert gpu.used_mb + gpu.free_mb == gpu.total_mb
    assert gpu.label == gpu.visible_name == "3"


def test_processes_come_with_user_and_program(standin: Standin) -> None:
    simulated = standin("2x40GB")
    simulated.occupy(1, 1500, pid=os.getpid())
    gpus = GpuReader().snapshot().gpus
    assert gpus[0].processes == ()
    (process,) = gpus[1].processes
    assert (process.pid, process.memory_mb, process.compute) == (os.getpid(), 1500, True)
    assert process.user is not None
    assert process.command is not None
    assert gpus[1].used_mb == 1500


def test_strangers_that_cannot_be_looked_up_and_display_servers_are_listed(standin: Standin) -> None:
    simulated = standin("1x40GB")
    stranger = simulated.occupy(0, 900)
    simulated.occupy(0, 150, pid=os.getpid(), graphics=True)
    listed = {process.pid: process for process in GpuReader().snapshot().gpus[0].processes}
    assert listed[stranger.pid] == GpuProcess(stranger.pid, None, None, 900, True)
    assert not listed[os.getpid()].compute


def test_a_process_that_computes_and_draws_is_listed_once_as_computing(standin: Standin) -> None:
    simulated = standin("1x40GB")
    simulated.occupy(0, 100, pid=os.getpid(), graphics=True)
    simulated.occupy(0, 200, pid=os.getpid())
    (process,) = GpuReader().snapshot().gpus[0].processes
    assert process.compute


def test_memory_of_a_process_that_ended_is_free_again(standin: Standin) -> None:
    simulated = standin("1x40GB")
    driver = GpuReader()
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        simulated.occupy(0, 5000, pid=child.pid)
        assert driver.snapshot().gpus[0].processes[0].pid == child.pid
        child.kill()
    gpu = driver.snapshot().gpus[0]
    assert (gpu.used_mb, gpu.processes) == (0, ())


def test_figures_that_the_driver_does_not_give_are_none(standin: Standin) -> None:
    simulated = standin("1x40GB")
    simulated.occupy(0, 700, pid=os.getpid())
    driver = GpuReader()
    simulated.hide_process_memory()
    assert driver.snapshot().gpus[0].processes[0].memory_mb is None
    simulated.hide_pids()
    gpu = driver.snapshot().gpus[0]
    assert (gpu.processes, gpu.used_mb) == ((), 700)


def test_processes_can_be_left_out_and_cost_fewer_calls(standin: Standin) -> None:
    simulated = standin("4x40GB")
    simulated.occupy(0, 100)
    driver = GpuReader()
    driver.snapshot()
    before = simulated.calls
    driver.snapshot()
    full, before = simulated.calls - before, simulated.calls
    assert driver.snapshot(processes=False).gpus[0].processes == ()
    assert simulated.calls - before < full


def test_links_and_distances_are_read_when_asked_for(standin: Standin) -> None:
    simulated = standin("4x40GB")
    simulated.link(0, 3, 4)
    simulated.set_proximity(1, 2, Proximity.SAME_BOARD)
    driver = GpuReader()
    assert driver.snapshot().gpus[0].peers == ()
    gpus = driver.snapshot(topology=True).gpus
    peers = {peer.uuid: peer for peer in gpus[0].peers}
    assert peers.keys() == {gpu.uuid for gpu in gpus[1:]}
    assert peers[gpus[3].uuid].nvlinks == 4
    assert peers[gpus[1].uuid].nvlinks == 0
    assert next(peer for peer in gpus[2].peers if peer.uuid == gpus[1].uuid).proximity is Proximity.SAME_BOARD


def test_mig_instances_follow_their_parent(standin: Standin) -> None:
    simulated = standin("3x40GB")
    uuids = simulated.split_mig(1, [20_000, 10_000])
    simulated.occupy("1:1", 3000, pid=os.getpid())
    gpus = GpuReader().snapshot().gpus
    assert [gpu.label for gpu in gpus] == ["0", "1", "1:0", "1:1", "2"]
    parent, first, second = gpus[1:4]
    assert parent.mig_instances == uuids == (first.uuid, second.uuid)
    assert parent.mig_parent is None
    assert first.mig_parent == second.mig_parent == parent.uuid
    assert (first.total_mb, second.total_mb) == (20_000, 10_000)
    assert (first.used_mb, second.used_mb) == (0, 3000)
    assert [process.pid for process in second.processes] == [os.getpid()]
    assert first.processes == ()
    assert second.visible_name == second.uuid


def test_mig_mode_without_instances_is_a_problem_that_is_told(standin: Standin) -> None:
    standin("1x40GB").split_mig(0, [])
    (gpu,) = GpuReader().snapshot().gpus
    assert "MIG mode without instances" in str(gpu.problem)


def test_a_lost_gpu_stays_in_its_place_with_its_name_and_comes_back(standin: Standin) -> None:
    simulated = standin("3x40GB")
    driver = GpuReader()
    whole = driver.snapshot(topology=True)
    simulated.lose(1)
    with no_pauses():
        gpus = driver.snapshot(topology=True).gpus
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert gpus[1].uuid == whole.gpus[1].uuid
    assert "fallen off the bus" in str(gpus[1].problem)
    assert gpus[0].problem is None
    # CUDA may leave the lost one out, and then count those after it differently.
    assert [gpu.visible_name for gpu in gpus] == ["0", "1", gpus[2].uuid]
    simulated.restore(1)
    assert [gpu.visible_name for gpu in driver.snapshot().gpus] == ["0", "1", "2"]
    assert replace(driver.snapshot().gpus[1], peers=whole.gpus[1].peers) == whole.gpus[1]


def test_a_gpu_lost_before_the_first_look_does_not_hide_the_others(standin: Standin) -> None:
    simulated = standin("3x40GB")
    simulated.lose(0)
    driver = GpuReader()
    gpus = driver.snapshot(topology=True).gpus
    assert [gpu.problem is None for gpu in gpus] == [False, True, True]
    assert [gpu.uuid for gpu in gpus[1:]] == list(simulated.uuids[1:])
    simulated.restore(0)
    gpus = driver.snapshot(topology=True).gpus
    assert [gpu.uuid for gpu in gpus] == list(simulated.uuids)
    assert len(gpus[0].peers) == 2


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_TIMEOUT]
)
def test_a_driver_that_fails_for_a_moment_is_asked_again(standin: Standin, code: int) -> None:
    simulated = standin("4x40GB")
    driver = GpuReader()
    before = driver.snapshot()
    simulated.fail(code, calls=3)
    assert driver.snapshot() == before


@pytest.mark.parametrize("calls", range(1, 40, 3))
def test_whichever_call_fails_the_answer_is_whole(standin: Standin, calls: int) -> None:
    """The driver starts to answer again at any point of a snapshot, also in the middle of a GPU."""
    simulated = standin("2x40GB")
    driver = GpuReader()
    before = driver.snapshot()
    thread = threading.Timer(0.01, simulated.fail, [None])
    simulated.fail(pynvml.NVML_ERROR_UNKNOWN)
    thread.start()
    assert driver.snapshot() == before
    thread.join()
    simulated.fail(pynvml.NVML_ERROR_UNKNOWN, calls=calls)
    seen = driver.snapshot()
    assert seen.problem is not None or len(seen.gpus) == 2
    simulated.fail(None)
    assert driver.snapshot() == before


def test_a_driver_that_goes_on_failing_is_a_sentence_and_costs_no_waiting_any_more(standin: Standin) -> None:
    simulated = standin("2x40GB")
    driver = GpuReader()
    driver.snapshot()
    simulated.fail(pynvml.NVML_ERROR_UNKNOWN)
    seen = driver.snapshot()
    assert seen.gpus == ()
    assert "the NVIDIA driver fails" in str(seen.problem)
    with no_pauses():
        assert driver.snapshot().problem is not None
    simulated.fail(None)
    assert len(driver.snapshot().gpus) == 2


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reboot"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidiactl"),
    ],
)
def test_a_driver_that_never_worked_is_told_at_once_with_the_remedy(standin: Standin, code: int, sentence: str) -> None:
    standin("2x40GB").fail(code)
    with no_pauses():
        assert sentence in str(GpuReader().snapshot().problem)


def test_a_driver_reload_under_us_is_survived(standin: Standin) -> None:
    simulated = standin("2x40GB")
    driver = GpuReader()
    before = driver.snapshot()
    thread = threading.Timer(0.05, simulated.fail, [None])
    simulated.fail(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    thread.start()
    assert driver.snapshot() == before
    thread.join()


ErrorOf = Callable[[str, int], None]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> ErrorOf:
    """``answers(name, code)``: from now on this one function of the driver answers this code and nothing else."""

    def answer(name: str, code: int) -> None:
        monkeypatch.setitem(pynvml._nvmlGetFunctionPointer_cache, name, lambda *_: code)

    return answer


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND])
@pytest.mark.parametrize(
    "name",
    [
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetNumGpuCores",
        "nvmlDeviceGetMemoryAffinity",
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetNvLinkRemoteDeviceType",
        "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    ],
)
def test_a_figure_that_fails_for_good_costs_neither_the_gpu_nor_time(
    standin: Standin, answers: ErrorOf, name: str, code: int
) -> None:
    standin("2x40GB,nvlink=2")
    answers(name, code)
    with no_pauses():
        seen = GpuReader().snapshot(topology=True)
    assert [(gpu.total_mb, gpu.problem, len(gpu.peers)) for gpu in seen.gpus] == [(40_960, None, 1)] * 2


@pytest.mark.parametrize(
    "missing",
    [
        ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetTemperatureV"),
        ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3"),
        ("nvmlDeviceGetMigMode", "nvmlSystemGetCudaDriverVersion_v2"),
    ],
)
def test_an_old_driver_without_newer_questions_tells_the_same(
    standin: Standin, answers: ErrorOf, missing: tuple[str, ...]
) -> None:
    simulated = standin("1x40GB")
    simulated.occupy(0, 700, pid=os.getpid())
    before = GpuReader().snapshot()
    for name in missing:
        answers(name, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    assert GpuReader().snapshot().gpus == before.gpus
    assert before.gpus[0].temperature_c is not None


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (pynvml.NVML_ERROR_INSUFFICIENT_POWER, "power cables"),
        (pynvml.NVML_ERROR_IRQ_ISSUE, "interrupt"),
        (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error"),
    ],
)
def test_gpus_that_the_driver_never_opens_are_told_and_cost_no_more_waiting(
    standin: Standin, answers: ErrorOf, code: int, sentence: str
) -> None:
    standin("2x40GB")
    driver = GpuReader()
    answers("nvmlDeviceGetHandleByIndex_v2", code)
    assert [sentence in str(gpu.problem) for gpu in driver.snapshot().gpus] == [True, True]
    with no_pauses():
        assert [gpu.index for gpu in driver.snapshot().gpus] == [0, 1]


def test_without_a_driver_there_are_no_gpus_and_one_sentence() -> None:
    code = "from gpuherd.gpus import machine; m = machine(); print(len(m.gpus), m.problem)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if child.stdout.startswith("0"):
        assert "driver" in child.stdout
    assert child.stderr == ""


def test_another_machine_in_the_same_process_is_noticed(standin: Standin) -> None:
    first = standin("2x40GB")
    assert tuple(gpu.uuid for gpu in machine().gpus) == first.uuids
    second = standin("2x40GB")
    assert tuple(gpu.uuid for gpu in machine().gpus) == second.uuids
    standin("3x40GB")
    assert len(machine().gpus) == 3


def test_threads_share_one_driver(standin: Standin) -> None:
    standin("4x40GB")
    driver = GpuReader()
    wanted = driver.snapshot()
    wrong: list[object] = []

    def ask() -> None:
        for _ in range(50):
            seen = driver.snapshot()
            if seen != wanted:
                wrong.append(seen)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


FORKS = """
import os, signal, threading
from gpuherd.gpus.query import GpuReader
driver = GpuReader()
threading.Thread(target=lambda: [driver.snapshot() for _ in iter(int, 1)], daemon=True).start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # a lock that nobody opens any more would wait for ever
        os._exit(0 if len(driver.snapshot().gpus) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""


def test_a_forked_child_may_look_too_while_a_thread_is_looking(standin: Standin) -> None:
    standin("2x40GB")
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], check=True, timeout=60)


def test_closing_lets_go_and_the_next_look_starts_again(standin: Standin) -> None:
    standin("2x40GB")
    driver = GpuReader()
    before = driver.snapshot()
    driver.close()
    driver.close()
    assert driver.snapshot() == before


def test_a_look_at_eight_gpus_is_cheap(standin: Standin) -> None:
    simulated = standin("8x40GB")
    for gpu in range(8):
        simulated.occupy(gpu, 1000)
    driver = GpuReader()
    driver.snapshot()
    fastest = min(_seconds(driver) for _ in range(50))
    assert fastest < 0.002, f"{fastest * 1e6:.0f} us"


def _seconds(driver: GpuReader) -> float:
    started = time.thread_time()
    driver.snapshot()
    return time.thread_time() - started


@pytest.mark.parametrize(
    ("cores", "capability", "count"),
    [
        (6912, (8, 0), 108),
        (10752, (8, 6), 84),
        (16896, (9, 0), 132),
        (5120, (7, 0), 80),
        (None, (8, 0), None),
        (100, (99, 0), None),
    ],
)
def test_multiprocessors_follow_from_cores(cores: int | None, capability: tuple[int, int], count: int | None) -> None:
    assert multiprocessors(cores, capability) == count


def test_a_look_at_some_gpus_reads_those_and_still_sees_that_another_is_lost(standin: Callable[..., Simulated]) -> None:
    """A lost GPU changes how CUDA counts those behind it, whoever asks for which."""
    machine = standin("4x40GB")
    nvml = GpuReader()
    nvml.snapshot()
    machine.occupy(3, 2_000)
    (found,) = nvml.snapshot(only=[machine.uuid(3)]).gpus
    assert (found.index, found.used_mb >= 2_000, found.index_unsure) == (3, True, False)
    machine.lose(1)
    lost, found = nvml.snapshot(only=[machine.uuid(3)]).gpus
    assert (lost.index, lost.problem is not None, found.index, found.index_unsure) == (1, True, 3, True)
    nvml.close()


def test_a_look_at_some_gpus_names_them_as_a_look_at_all_does(standin: Standin) -> None:
    """By index while that is CUDA's too; by UUID behind a broken GPU, also where the look passes that one over."""
    simulated = standin("4x40GB")
    reader = GpuReader()

    def names(*, only: bool) -> list[str]:
        gpus = reader.snapshot(only={simulated.uuid(3)} if only else None).gpus
        return [gpu.visible_name for gpu in gpus if gpu.uuid == simulated.uuid(3)]

    assert names(only=True) == names(only=False) == ["3"]
    simulated.lose(1)
    assert names(only=False) == [simulated.uuid(3)]
    assert names(only=True) == [simulated.uuid(3)]
    simulated.restore(1)
    assert names(only=False) == names(only=True) == ["3"]


def test_known_gpus_are_read_again_for_what_changes_by_itself(standin: Standin) -> None:
    simulated = standin("4x40GB")
    reader = GpuReader()
    uuids = set(simulated.uuids[2:])
    reader.snapshot()
    simulated.occupy(2, 3_000)
    calls = simulated.calls
    found = reader.snapshot(only=uuids, sensors=False).gpus
    spent = simulated.calls - calls
    whole = reader.snapshot(only=uuids).gpus
    assert spent < simulated.calls - calls - spent, "it is to be cheaper"
    assert [gpu.uuid for gpu in found] == list(simulated.uuids[2:])
    assert [gpu.utilisation_percent for gpu in found] == [None, None]
    assert [replace(gpu, utilisation_percent=None, temperature_c=None, power_w=None) for gpu in whole] == list(found)
    assert found[0].processes
    reader.close()


def test_a_lost_gpu_with_nvlinks_costs_its_neighbours_nothing_but_these_links(standin: Standin) -> None:
    simulated = standin("4x40GB,nvlink=4")
    simulated.lose(1)
    for driver in (GpuReader(), GpuReader()):
        seen = driver.snapshot(topology=True, errors=True)
        assert seen.problem is None
        assert [gpu.problem is None for gpu in seen.gpus] == [True, False, True, True]
        assert {peer.uuid: peer.nvlinks for peer in seen.gpus[2].peers}[simulated.uuids[3]] == 4


# Without an answer to these, nobody knows what the GPU is, or whether it is in use.
_DECIDES = {
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
}
_DRIVER = {"nvmlInit_v2", "nvmlDeviceGetCount_v2"}
_CODES = [
    *range(1, 33),
    42,
    pynvml.NVML_ERROR_UNKNOWN,
]


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """Four GPUs in NVLink pairs, the last split into two MIG instances; no pauses between tries."""
    simulated = Simulated.create(tmp_path_factory.mktemp("linked") / "machine", "4x40GB,nvlink=4,mig=gpu3:20GB+20GB")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpuherd.gpus.query.PAUSES_S", (0.0, 0.0, 0.0))
        yield simulated


@given(
    function=st.sampled_from(build.entry_points()),
    code=st.sampled_from(_CODES),
    gpu=st.sampled_from([None, 0, 1, 2, 3, "3:0", "3:1"]),
    calls=st.sampled_from([None, None, 1, 2, 5]),
    lost=st.sampled_from([None, 0, 2]),
    late=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_call_may_return_any_code_and_every_other_gpu_stays_usable(
    linked: Simulated,
    function: str,
    code: int,
    gpu: int | str | None,
    calls: int | None,
    lost: int | None,
    late: bool,
) -> None:
    linked.activate()
    driver = GpuReader()
    labels = ["0", "1", "2", "3", "3:0", "3:1"]
    try:
        whole = driver.snapshot(topology=True, errors=True)
        assert [each.label for each in whole.gpus if each.problem is None] == labels
        if lost is not None:
            linked.lose(lost)
        linked.fail(code, function=function, gpu=gpu, calls=calls)
        driver = driver if late else GpuReader()
        for _ in range(2):
            seen = driver.snapshot(topology=True, errors=True)
            driver.used_mb([each.uuid for each in whole.gpus])
            driver.snapshot(only={each.uuid for each in whole.gpus if each.mig_parent is None}, sensors=False)
            if function in _DRIVER and gpu is None:
                assert seen.problem is None or calls != 1
                continue
            assert seen.problem is None, seen.problem
            usable = {each.label for each in seen.gpus if each.problem is None}
            spared = {label for label in labels if label.split(":")[0] != str(lost)}
            if function in _DECIDES:
                # Those of a split GPU go with it, and a split GPU without any instance has nothing to use.
                hit = labels if gpu is None else [label for label in labels if label.split(":")[0] == str(gpu)]
                spared -= {str(gpu), *hit}
            assert spared <= usable
    finally:
        linked.fail(None)
        if lost is not None:
            linked.restore(lost)
        again = driver.snapshot(topology=True, errors=True)
        linked.deactivate()
    assert [each.uuid for each in again.gpus if each.problem is None] == [each.uuid for each in whole.gpus]
