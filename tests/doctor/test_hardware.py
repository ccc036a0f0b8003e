"""What the doctor says of a driver, of GPUs and of how they are joined."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuherd.checks import Status
from gpuherd.doctor.checks import driver, interconnect, usage, visibility
from gpuherd.gpus.idle import IdleRule
from gpuherd.gpus.leases import Holder
from gpuherd.gpus.state import Gpu, GpuProcess, Machine, Peer, Proximity
from gpuherd.gpus.visible import visible


def gpu(index: int, used_mb: int = 0) -> Gpu:
    return Gpu(index, f"GPU-{index}", "A100", total_mb=40_000, used_mb=used_mb, free_mb=40_000 - used_mb)


MACHINE = Machine(tuple(gpu(i) for i in range(4)), "580.1", "13.0")
NO_DRIVER = Machine(problem="no NVIDIA driver is installed")


def test_no_driver_and_no_card_is_well() -> None:
    result = driver(NO_DRIVER, 0, simulated=False)
    assert result.status is Status.OK
    assert "no NVIDIA driver is installed" in result.detail
    assert "runs on the CPU" in result.detail


def test_cards_without_a_driver_are_wrong() -> None:
    result = driver(NO_DRIVER, 2, simulated=False)
    assert (result.status, result.detail) == (Status.FAIL, "2 NVIDIA cards, but no NVIDIA driver is installed")


def test_a_driver_is_told_with_its_versions_and_simulation_plainly() -> None:
    assert driver(MACHINE, 4, simulated=False).detail == "NVIDIA driver 580.1, CUDA 13.0, 4 GPUs"
    assert "SIMULATED" in driver(MACHINE, 0, simulated=True).detail
    assert driver(NO_DRIVER, 0, simulated=True).status is Status.FAIL


@pytest.mark.parametrize(
    ("value", "status", "words"),
    [
        (None, Status.OK, "not set"),
        ("2,0", Status.OK, "only GPU 2, 0"),
        ("GPU-3", Status.OK, "only GPU 3"),
        ("", Status.WARN, "hides every GPU"),
        ("-1", Status.WARN, "hides every GPU"),
        ("1,7,2", Status.WARN, "stops reading at '7'"),
    ],
)
def test_explains_what_is_visible(value: str | None, status: Status, words: str) -> None:
    result = visibility(value, MACHINE, visible(MACHINE.gpus, value))
    assert result.status is status
    assert words in result.detail


def test_without_gpus_the_variable_means_nothing() -> None:
    assert visibility("3", NO_DRIVER, ()).status is Status.OK


def test_free_busy_taken_and_broken_gpus_are_told_apart() -> None:
    rule = IdleRule()
    assert usage(gpu(0, 100), None, rule).detail.endswith("free")
    process = GpuProcess(4711, "alice", "python", 900)
    busy = usage(replace(gpu(1, 400), processes=(process,)), None, rule)
    assert (busy.status, busy.name) == (Status.WARN, "GPU 1")
    assert "alice runs python (pid 4711, 900 MB)" in busy.detail
    taken = usage(gpu(2), Holder("GPU-2", user="bob", job="bert"), rule)
    assert "held by gpuherd: bob, job bert" in taken.detail
    broken = usage(replace(gpu(3), problem="it has fallen off the bus"), None, rule)
    assert (broken.status, "fallen off" in broken.detail) == (Status.FAIL, True)


def test_sums_up_how_gpus_are_joined() -> None:
    def joined(index: int, *peers: tuple[int, int, Proximity]) -> Gpu:
        return replace(gpu(index), numa_node=index // 2, peers=tuple(Peer(f"GPU-{i}", n, way) for i, n, way in peers))

    far, near = Proximity.SYSTEM, Proximity.ONE_SWITCH
    gpus = [
        joined(0, (1, 4, near), (2, 2, far)),
        joined(1, (0, 4, near), (2, 0, far)),
        joined(2, (0, 2, far), (1, 0, far)),
    ]
    assert interconnect(gpus).detail == (
        "NVLink x4: 0-1; NVLink x2: 0-2; same PCIe switch: 0-1; NUMA node 0: 0, 1; NUMA node 1: 2"
    )
    assert interconnect(gpus[:1]).detail == "fewer than two GPUs: nothing to join"
    assert interconnect([gpu(0), gpu(1)]).status is Status.SKIP
