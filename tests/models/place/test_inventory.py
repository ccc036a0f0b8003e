"""Cards of the machine's own GPUs, as plain data and through the stand-in driver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuherd.gpus.idle import IdleRule
from gpuherd.gpus.leases import LeaseFolder
from gpuherd.gpus.state import Gpu, Peer, Proximity
from gpuherd.models.place.inventory import gpus_now, linked_order, usable_gpus
from gpuherd.standin.machine import SimulatedMachine

MIB = 1 << 20
RULE = IdleRule()


def gpu(index: int, *, used_mb: int = 0, total_mb: int = 40_960, peers: tuple[Peer, ...] = ()) -> Gpu:
    return Gpu(index, f"GPU-{index}", "NVIDIA A100-SXM4-40GB", total_mb, used_mb, total_mb - used_mb, peers=peers)


def linked(index: int, *others: int, nvlinks: int = 4) -> Gpu:
    """Linked by NVLink to ``others``, far from the rest of four."""
    far = [other for other in range(4) if other not in (index, *others)]
    return gpu(
        index,
        peers=(
            *(Peer(f"GPU-{other}", nvlinks, Proximity.NUMA_NODE) for other in others),
            *(Peer(f"GPU-{other}", 0, Proximity.SYSTEM) for other in far),
        ),
    )


def test_memory_of_others_is_taken_off() -> None:
    cards, left_out = usable_gpus([gpu(0, used_mb=300)], RULE, lambda _: None)
    assert [(card.label, card.free // MIB, card.total // MIB, card.uuid) for card in cards] == [
        ("0", 40_660, 40_960, "GPU-0")
    ]
    assert left_out == ()


def test_busy_and_held_gpus_are_left_out_unless_asked_for() -> None:
    gpus = [gpu(0, used_mb=9_000), gpu(1), gpu(2)]

    def taken(each: Gpu) -> str | None:
        return "held by gpuherd: alice" if each.index == 2 else None

    cards, left_out = usable_gpus(gpus, RULE, taken)
    assert [card.label for card in cards] == ["1"]
    assert left_out == (
        "GPU 0 is left out: 9000 MB used (threshold 500)",
        "GPU 2 is left out: held by gpuherd: alice",
    )
    cards, left_out = usable_gpus(gpus, RULE, taken, busy_too=True)
    assert {card.label: card.free // MIB for card in cards} == {"0": 31_960, "1": 40_960, "2": 40_960}
    assert left_out == ()


def test_a_full_gpu_is_never_a_card() -> None:
    cards, left_out = usable_gpus([gpu(0, used_mb=40_960)], RULE, lambda _: None, busy_too=True)
    assert cards == ()
    assert left_out == ("GPU 0 is left out: no memory is free on it",)


def test_linked_gpus_are_neighbours() -> None:
    gpus = [linked(0, 2), linked(1, 3), linked(2, 0), linked(3, 1)]
    assert [each.index for each in linked_order(gpus)] == [0, 2, 1, 3]


def test_a_pair_comes_before_one_that_is_alone() -> None:
    gpus = [linked(0), linked(1, 2), linked(2, 1)]
    assert [each.index for each in linked_order(gpus)] == [1, 2, 0]


def test_gpus_linked_alike_keep_their_order() -> None:
    assert [each.index for each in linked_order([gpu(index) for index in range(5)])] == [0, 1, 2, 3, 4]
    assert linked_order([]) == ()


def test_the_machine_without_gpus_says_so() -> None:
    now = gpus_now()
    assert now.gpus == ()
    assert now.problem


def test_a_simulated_machine(
    standin: Callable[..., SimulatedMachine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = standin("4x40GB")
    machine.occupy(1, 12_000)
    now = gpus_now()
    # 0 and 1, 2 and 3 are on one switch each; without 1, 0 is alone.
    assert [card.label for card in now.gpus] == ["2", "3", "0"]
    assert len(now.left_out) == 1
    assert now.problem is None
    everything = gpus_now(busy_too=True).gpus
    assert {card.label: (card.total - card.free) // MIB >= 12_000 for card in everything} == {
        "0": False,
        "1": True,
        "2": False,
        "3": False,
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert [card.label for card in gpus_now().gpus] == ["3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus_now().problem == "CUDA_VISIBLE_DEVICES shows no GPU"


HOLD = """
import sys
from gpuherd.gpus.leases import LeaseFolder
lease = LeaseFolder.default().acquire(sys.argv[1])
print("held" if lease else "not", flush=True)
sys.stdin.read()
"""


def test_a_lease_of_another_gpuherd_counts_and_our_own_does_not(
    standin: Callable[..., SimulatedMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = standin("2x40GB")
    with LeaseFolder.default().acquire(machine.uuids[1]) or pytest.fail("not taken"):
        command = [sys.executable, "-c", HOLD, machine.uuids[0]]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            now = gpus_now()
            assert [card.label for card in now.gpus] == ["1"]
            assert now.left_out[0].startswith("GPU 0 is left out: held by gpuherd")
            # A job's own GPUs are leased for it by its dispatcher.
            monkeypatch.setenv("GPUHERD_ATTEMPT", "x")
            assert len(gpus_now().gpus) == 2
            other.communicate()


def test_instances_of_a_split_gpu_stand_alone(standin: Callable[..., SimulatedMachine]) -> None:
    standin("40GB,mig=gpu0:20GB+20GB")
    assert [(card.label, card.mig) for card in gpus_now().gpus] == [("0:0", True), ("0:1", True)]


def test_policy_keeps_a_gpu(
    standin: Callable[..., SimulatedMachine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin("2x40GB")
    policy = tmp_path / "policy.toml"
    policy.write_text("exclude_gpus = [0]\n")
    monkeypatch.setenv("GPUHERD_POLICY", str(policy))
    assert [card.label for card in gpus_now().gpus] == ["1"]
