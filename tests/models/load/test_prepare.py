"""Where blocks go on a machine: numbers as CUDA gives them here, free memory as it is now, the CPU only where meant."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from gpuherd.errors import UsageError
from gpuherd.models.describe.description import Architecture
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.load.options import LoadRequest
from gpuherd.models.load.prepare import ModelDoesNotFit, Placed, ThisMachine, destination
from gpuherd.models.memory.kv_cache import Reserve, Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.inventory import gpus_now
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.result import MemoryPlan
from gpuherd.standin.machine import SimulatedMachine

Standin = Callable[..., SimulatedMachine]


@pytest.fixture(scope="module")
def big() -> Architecture:
    return read_architecture("Llama-3.1-70B")


@pytest.fixture(scope="module")
def medium() -> Architecture:
    return read_architecture("Llama-3.1-8B")


def place(architecture: Architecture, precision: Precision = Precision.BF16, **asked: Any) -> Placed:
    """Where it would go, with the free memory of this moment."""
    what = LoadRequest(architecture.model, **asked)
    return destination(what, architecture, precision, ThisMachine(simulate=what.simulate))


def test_on_the_gpus_that_are_free_here(standin: Standin, big: Architecture) -> None:
    standin("4x40GB")
    placement, cards, _ = place(big)
    assert placement.gpus == (0, 1, 2, 3) and not placement.simulated
    assert [card.label for card in cards] == ["0", "1", "2", "3"]


def test_numbers_are_those_of_cuda_visible_devices(
    standin: Standin, medium: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = standin("4x40GB")
    plan = make_plan(medium, gpus_now().gpus[3:], Precision.BF16, Workload())
    assert isinstance(plan, MemoryPlan) and plan.loads[0].gpu.uuid == machine.uuid(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    placement, cards, _ = place(medium, plan=plan)
    assert set(placement.devices) == {1} and cards[0].label == "3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UsageError, match=r"uses GPU 3 .*does not show this process .CUDA_VISIBLE_DEVICES: 0,1"):
        place(medium, plan=plan)


def test_gpus_that_somebody_named_are_used_though_others_are_on_them(
    standin: Standin, medium: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = standin("2x40GB")
    machine.occupy(0, 10_000)
    placement, cards, _ = place(medium)
    assert placement.gpus == (1,) and cards[0].label == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    placement, cards, _ = place(medium)
    assert placement.gpus == (0,) and cards[0].label == "0"
    machine.occupy(0, 20_000)
    with pytest.raises(ModelDoesNotFit, match="lacks"):
        place(medium)


def test_no_gpu_is_free(standin: Standin, medium: Architecture) -> None:
    standin("1x40GB").occupy(0, 30_000)
    with pytest.raises(ModelDoesNotFit, match="no GPU is free: GPU 0 is left out"):
        place(medium)


def test_memory_that_is_taken_since_the_plan_was_made(standin: Standin, medium: Architecture) -> None:
    machine = standin("1x40GB")
    plan = make_plan(medium, gpus_now().gpus, Precision.BF16, Workload())
    assert isinstance(plan, MemoryPlan)
    machine.occupy(0, 35_000)
    with pytest.raises(ModelDoesNotFit, match=r"GPU 0 .* has \d.* free now, and the plan needs"):
        place(medium, plan=plan)


def test_a_device_map_that_puts_too_much_on_a_gpu(standin: Standin, big: Architecture) -> None:
    standin("4x40GB")
    with pytest.raises(ModelDoesNotFit, match=r"1\d\d\.\d GiB would lie on GPU 2"):
        place(big, device_map={"": 2})
    assert place(big, Precision.NF4_DQ, device_map={"": 0, "model.norm": 3})[0].gpus == (0, 3)


def test_words_of_gpus_mean_the_first_ones_where_there_are_any(standin: Standin, medium: Architecture) -> None:
    standin("2x24GB")
    placement, cards, _ = place(medium, gpus="1x40GB")
    assert placement.gpus == (0,) and cards[0].total < 25 << 30 and not placement.simulated
    with pytest.raises(ModelDoesNotFit, match="the plan needs"):
        place(medium, Precision.FP32, gpus="1x40GB")


def test_without_gpus_the_processor_is_meant_and_told(
    standin: Standin, medium: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement, _, notes = place(medium, Precision.NF4)
    assert set(placement.devices) == {"cpu"} and "on the CPU" in notes[0]
    standin("4x40GB")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, _, notes = place(medium, Precision.NF4)
    assert "CUDA_VISIBLE_DEVICES shows no GPU" in notes[0]


def test_the_computers_memory_has_an_end() -> None:
    giant = read_architecture("Llama-3.1-405B")
    pretended: tuple[dict[str, Any], ...] = (
        {"gpus": "40x80GB"},
        {"device_map": {"": 0}, "simulate": True},
        {"gpus": "1x80GB", "allow_offload": "cpu"},
    )
    on_cpu: tuple[dict[str, Any], ...] = ({"device_map": "cpu"}, {"device_map": {"": "cpu"}}, {})
    for asked in (*on_cpu, *pretended):
        with pytest.raises(ModelDoesNotFit, match=r"puts 1\d{3}\.\d GiB into the computer's memory, of which"):
            place(giant, Precision.FP32, **asked)


def test_offloading_beside_gpus(standin: Standin, big: Architecture) -> None:
    standin("4x30GB")
    with pytest.raises(ModelDoesNotFit, match="What would fit"):
        place(big)
    placement, _, notes = place(big, allow_offload="disk")
    assert placement.offloads and "disk" in placement.devices and "cpu" not in placement.devices
    assert "offloaded to disk" in notes[1] and "lacks" in notes[0]


def test_pretended_gpus_need_none(standin: Standin) -> None:
    little = read_architecture("Llama-3.2-1B")
    placement, cards, notes = place(little, gpus="4x40GB", parallel="layers")
    assert placement.simulated and placement.gpus == (0, 1, 2, 3) and cards == ()
    assert any("no CUDA here" in note for note in notes)
    standin("4x40GB")
    assert place(little, simulate=True)[0].simulated


def test_blocks_beside_gpus_have_the_computers_memory_for_them(standin: Standin) -> None:
    standin("4x40GB")
    giant = read_architecture("Llama-3.1-405B")
    with pytest.raises(ModelDoesNotFit, match=r"puts 1\d{3}\.\d GiB into the computer's memory"):
        place(giant, Precision.FP32, device_map={"": "cpu", "model.embed_tokens": 0}, allow_offload="cpu")


def test_offloading_is_for_gpus_that_are_there(standin: Standin, big: Architecture) -> None:
    standin("2x30GB")
    placement, cards, _ = place(big, gpus="2x30GB", allow_offload="disk")
    assert placement.gpus == (0, 1) and [card.label for card in cards] == ["0", "1"]
    with pytest.raises(UsageError, match=r"GPU 2 .*does not show this process"):
        place(big, gpus="3x30GB", allow_offload="disk")
    with pytest.raises(ModelDoesNotFit, match="would lie on GPU 0"):
        place(big, gpus="2x80GB", reserve=Reserve(fixed=20 << 30), allow_offload="disk")


def test_a_card_that_is_not_shown_is_no_other_one(
    standin: Standin, big: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin("2x30GB")
    cards = gpus_now().gpus
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UsageError, match=r"GPU 1 .*does not show this process"):
        place(big, gpus=cards, allow_offload="disk")


def test_what_this_process_holds_leaves_the_rest_of_a_gpu_to_it(standin: Standin) -> None:
    """A second model goes beside the first, where it has room."""
    machine = standin("1x40GB")
    machine.occupy(0, 20_000, pid=os.getpid())
    placement, cards, _ = place(read_architecture("Llama-3.2-1B"))
    assert placement.gpus == (0,) and cards[0].free < 21 << 30
    with pytest.raises(ModelDoesNotFit, match="lacks"):
        place(read_architecture("Llama-2-13B"))


def test_no_gpus_at_all_are_no_processor(medium: Architecture) -> None:
    with pytest.raises(UsageError, match="gpus: none are given"):
        place(medium, Precision.NF4, gpus=[])
