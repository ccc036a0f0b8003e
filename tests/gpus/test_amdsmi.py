"""AMD's driver, against the stand-in library: every GPU, every version of it, and every way in which it fails."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gpus.machines import no_pauses
from tests.gpus.test_nvml import FORKS

from gpuherd.gpus.amdsmi import AmdSmi
from gpuherd.gpus.query import GpuReader, machine
from gpuherd.gpus.state import Maker
from gpuherd.standin import driver
from gpuherd.standin.machine import SimulatedMachine as Simulated

Standin = Callable[..., Simulated]

_UNKNOWN = 0xFFFFFFFF
_NOT_LOADED, _NO_PERM, _IO, _NOT_FOUND, _INIT_ERROR = 34, 10, 12, 31, 18


def test_gpus_come_in_the_order_of_rocm_with_all_their_figures(standin: Standin) -> None:
    simulated = standin("4xMI300X")
    simulated.set_utilisation(3, 77)
    simulated.set_temperature(3, 81)
    simulated.set_power(3, 312)
    simulated.set_numa_node(3, 1)
    simulated.set_ecc_errors(3, 2)
    seen = GpuReader().snapshot(errors=True)
    assert (seen.problem, seen.maker, seen.cuda_version) == (None, Maker.AMD, None)
    assert seen.driver_version == "6.14.14"
    assert [gpu.index for gpu in seen.gpus] == list(range(4))
    assert tuple(gpu.uuid for gpu in seen.gpus) == simulated.uuids
    assert [gpu.pci_bus_id for gpu in seen.gpus] != sorted(str(gpu.pci_bus_id) for gpu in seen.gpus)
    gpu = seen.gpus[3]
    assert (gpu.utilisation_percent, gpu.temperature_c, gpu.power_w, gpu.numa_node) == (77, 81, 312.0, 1)
    assert (gpu.multi_processor_count, gpu.compute_capability, gpu.uncorrected_errors) == (304, None, 2)
    assert 190_000 < gpu.total_mb == gpu.used_mb + gpu.free_mb
    assert gpu.name == "AMD Simulated MI300X"


@pytest.mark.parametrize("version", [(24, 7), (25, 5), (26, 2), (27, 1)])
def test_every_version_of_the_library_is_read_alike(standin: Standin, version: tuple[int, int]) -> None:
    simulated = standin("2xMI210")
    simulated.occupy(1, 1500, pid=os.getpid())
    before = GpuReader().snapshot(errors=True, topology=True)
    simulated.set_library_version(*version)
    assert GpuReader().snapshot(errors=True, topology=True) == before
    assert [process.memory_mb for process in before.gpus[1].processes] == [1500]


@pytest.mark.parametrize("version", [(24, 6), (23, 9), (28, 0)])
def test_another_version_is_refused_by_its_number(standin: Standin, version: tuple[int, int]) -> None:
    simulated = standin("2xMI210")
    simulated.set_library_version(*version)
    with no_pauses():
        seen = GpuReader().snapshot()
    assert (seen.gpus, seen.may_pass) == ((), True)
    assert f"libamd_smi.so {version[0]}.{version[1]}.0 is not supported" in str(seen.problem)


def test_processes_come_with_user_and_program_and_others_hide_theirs(standin: Standin) -> None:
    simulated = standin("2xMI300X")
    simulated.occupy(1, 1500, pid=os.getpid())
    stranger = simulated.occupy(1, 900)
    gpus = GpuReader().snapshot().gpus
    assert gpus[0].processes == ()
    listed = {process.pid: process for process in gpus[1].processes}
    assert listed.keys() == {os.getpid(), stranger.pid}
    assert listed[os.getpid()].user is not None
    assert (listed[stranger.pid].user, listed[stranger.pid].memory_mb) == (None, 900)
    simulated.hide_pids()
    gpu = GpuReader().snapshot().gpus[1]
    assert (gpu.processes, gpu.used_mb) == ((), 2400)


def test_a_process_that_holds_no_memory_of_a_gpu_is_not_on_it(standin: Standin) -> None:
    """Before its version 27 the library lists a process on every GPU that it could use."""
    simulated = standin("1xMI300X")
    simulated.occupy(0, 700, pid=os.getpid())
    simulated.hide_process_memory()
    assert GpuReader().snapshot().gpus[0].processes == ()


def test_more_processes_than_were_counted_are_listed_all_the_same(standin: Standin) -> None:
    simulated = standin("1xMI300X")
    for _ in range(40):
        simulated.occupy(0, 10)
    assert len(GpuReader().snapshot().gpus[0].processes) == 40


def test_links_are_xgmi_or_pcie(standin: Standin) -> None:
    simulated = standin("4xMI250X,nvlink=1")
    gpus = GpuReader().snapshot(topology=True).gpus
    assert {peer.uuid: peer.nvlinks for peer in gpus[0].peers} == dict(zip(simulated.uuids[1:], [1, 0, 0], strict=True))
    assert {peer.proximity.name for peer in gpus[0].peers} == {"NUMA_NODE", "SYSTEM"}


def test_a_split_gpu_is_a_problem_that_says_what_to_do(standin: Standin) -> None:
    standin("2xMI300X").split_mig(0, [20_000] * 4)
    gpus = GpuReader().snapshot().gpus
    assert "split into 4 compute partitions (CPX)" in str(gpus[0].problem)
    assert "--compute-partition SPX" in str(gpus[0].problem)
    assert (gpus[1].problem, gpus[1].index_unsure) == (None, True)


def test_a_lost_gpu_stays_in_its_place_with_its_name_and_comes_back(standin: Standin) -> None:
    simulated = standin("3xMI300X")
    reader = GpuReader()
    whole = reader.snapshot(topology=True)
    simulated.lose(1)
    with no_pauses():
        gpus = reader.snapshot(topology=True).gpus
    assert [gpu.uuid for gpu in gpus] == [gpu.uuid for gpu in whole.gpus]
    assert "fallen off the bus" in str(gpus[1].problem)
    assert [gpu.problem is None for gpu in gpus] == [True, False, True]
    assert [gpu.index_unsure for gpu in gpus] == [False, False, True]
    simulated.restore(1)
    assert replace(reader.snapshot().gpus[1], peers=whole.gpus[1].peers) == whole.gpus[1]


def test_known_gpus_are_read_again_for_what_changes_by_itself(standin: Standin) -> None:
    simulated = standin("4xMI300X")
    reader = GpuReader()
    reader.snapshot()
    simulated.occupy(2, 3_000)
    found = reader.snapshot(only=simulated.uuids[2:], sensors=False).gpus
    assert [(gpu.index, gpu.used_mb, gpu.power_w) for gpu in found] == [(2, 3_000, None), (3, 0, None)]
    assert reader.used_mb([simulated.uuid(2)]) == {simulated.uuid(2): 3_000}
    simulated.lose(0)
    seen = reader.snapshot(only=simulated.uuids[2:], sensors=False).gpus
    assert [(gpu.index, gpu.problem is None, gpu.index_unsure) for gpu in seen] == [
        (0, False, False),
        (2, True, True),
        (3, True, True),
    ]
    reader.close()


@pytest.mark.parametrize(
    ("code", "sentence"),
    [(_NOT_LOADED, "modprobe amdgpu"), (_INIT_ERROR, "modprobe amdgpu"), (_NO_PERM, "groups render and video")],
)
def test_a_driver_that_never_worked_is_told_at_once_with_the_remedy(standin: Standin, code: int, sentence: str) -> None:
    standin("2xMI300X").fail(code)
    with no_pauses():
        seen = GpuReader().snapshot()
    assert (sentence in str(seen.problem), seen.may_pass, seen.maker) == (True, True, Maker.AMD)


def test_a_driver_that_fails_for_a_moment_is_asked_again_and_one_for_good_is_a_sentence(standin: Standin) -> None:
    simulated = standin("2xMI300X")
    reader = GpuReader()
    before = reader.snapshot()
    simulated.fail(_UNKNOWN, calls=3)
    assert reader.snapshot() == before
    simulated.fail(_UNKNOWN)
    assert "the AMD driver fails" in str(reader.snapshot().problem)
    with no_pauses():
        assert reader.snapshot().problem is not None
    simulated.fail(None)
    assert reader.snapshot() == before


def test_without_any_driver_both_are_named(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    standin("1x40GB").deactivate()
    problem = str(machine().problem)
    assert "no NVIDIA driver is installed" in problem and "no AMD driver is installed" in problem


def test_the_maker_may_change_under_a_reader(standin: Standin) -> None:
    """As for tests; and a machine whose NVIDIA driver fails for a while is never taken for one of the other maker."""
    first = standin("2x40GB")
    assert tuple(gpu.uuid for gpu in machine().gpus) == first.uuids
    second = standin("3xMI300X")
    assert tuple(gpu.uuid for gpu in machine().gpus) == second.uuids
    second.fail(_NOT_LOADED)
    assert machine().maker is Maker.AMD


def test_a_library_without_a_function_lacks_only_that_figure(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    standin("2xMI300X,nvlink=1")

    class Older(ctypes.CDLL):
        def __getattr__(self, name: str) -> Any:
            if name in ("amdsmi_get_gpu_activity", "amdsmi_topo_get_link_type", "amdsmi_get_gpu_process_list"):
                raise AttributeError(name)
            return super().__getattr__(name)

    monkeypatch.setattr("gpuherd.gpus.amdsmi._load", lambda: Older(driver.AMD_SMI))
    seen = GpuReader().snapshot(topology=True)
    assert seen.problem is None
    assert [(gpu.utilisation_percent, gpu.temperature_c, gpu.problem) for gpu in seen.gpus] == [(None, 34, None)] * 2
    assert [peer.nvlinks for peer in seen.gpus[0].peers] == [0]


def test_a_forked_child_may_look_too_while_a_thread_is_looking(standin: Standin) -> None:
    standin("2xMI300X")
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], check=True, timeout=60)


def test_threads_share_one_driver(standin: Standin) -> None:
    standin("4xMI300X")
    reader = GpuReader()
    wanted = reader.snapshot()
    wrong: list[object] = []

    def look() -> None:
        wrong.extend(seen for _ in range(20) if (seen := reader.snapshot()) != wanted)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Without an answer to these, nobody knows which GPU it is, how ROCm counts it, or whether it is in use.
_DECIDES = {
    "amdsmi_get_processor_handles",
    "amdsmi_get_processor_type",
    "amdsmi_get_gpu_bdf_id",
    "amdsmi_get_gpu_kfd_info",
    "amdsmi_get_gpu_asic_info",
    "amdsmi_get_gpu_memory_total",
    "amdsmi_get_gpu_memory_usage",
    "amdsmi_get_gpu_process_list",
}
_DRIVER = {"amdsmi_init", "amdsmi_get_lib_version", "amdsmi_get_socket_handles"}


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """Four GPUs in linked pairs; no pauses between tries."""
    simulated = Simulated.create(tmp_path_factory.mktemp("linked") / "machine", "4xMI300X,nvlink=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpuherd.gpus.query.PAUSES_S", (0.0, 0.0, 0.0))
        yield simulated


@given(
    function=st.sampled_from(driver.entry_points(Maker.AMD)),
    code=st.sampled_from([*range(1, 21), *range(30, 57), 0xFFFFFFFE, _UNKNOWN]),
    gpu=st.sampled_from([None, 0, 1, 2, 3]),
    calls=st.sampled_from([None, None, 1, 2, 5]),
    lost=st.sampled_from([None, 0, 2]),
    late=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_any_call_may_return_any_code_and_every_other_gpu_stays_usable(
    linked: Simulated, function: str, code: int, gpu: int | None, calls: int | None, lost: int | None, late: bool
) -> None:
    linked.activate()
    reader = GpuReader()
    try:
        whole = reader.snapshot(topology=True, errors=True)
        assert [each.problem for each in whole.gpus] == [None] * 4
        if lost is not None:
            linked.lose(lost)
        linked.fail(code, function=function, gpu=gpu, calls=calls)
        reader = reader if late else GpuReader()
        for _ in range(2):
            seen = reader.snapshot(topology=True, errors=True)
            reader.used_mb([each.uuid for each in whole.gpus])
            reader.snapshot(only={each.uuid for each in whole.gpus}, sensors=False)
            if function in _DRIVER and gpu is None:
                continue
            assert seen.problem is None, seen.problem
            hit = {lost} if function not in _DECIDES else {0, 1, 2, 3} if gpu is None else {lost, gpu}
            spared = {uuid for number, uuid in enumerate(linked.uuids) if number not in hit}
            assert spared <= {each.uuid for each in seen.gpus if each.problem is None}
            # Where one could not be read from the start, nobody knows how ROCm counts the others: then by UUID.
            sure = [each for each in seen.gpus if each.problem is None and not each.index_unsure]
            assert all(each.uuid == linked.uuids[each.index] for each in sure)
    finally:
        linked.fail(None)
        if lost is not None:
            linked.restore(lost)
        again = reader.snapshot(topology=True, errors=True)
        linked.deactivate()
    assert [each.uuid for each in again.gpus if each.problem is None] == [each.uuid for each in whole.gpus]


def test_the_class_is_a_driver() -> None:
    from gpuherd.gpus.driver import Driver
    from gpuherd.gpus.nvml import Nvml

    drivers: list[Driver] = [AmdSmi(), Nvml()]
    assert [each.maker for each in drivers] == [Maker.AMD, Maker.NVIDIA]
