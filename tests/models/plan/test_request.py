"""What jobs ask their queue for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.plan.toy import NOTHING, cards_of, toy

from gpuherd.errors import UsageError
from gpuherd.models.plan.planner import make_plan
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.reading import read_architecture
from gpuherd.models.plan.request import GpuRequest, gpu_request, request_for
from gpuherd.models.plan.result import MemoryPlan, Refusal
from gpuherd.models.plan.workload import Reserve, Workload

BF16 = Precision.BF16
ONE = Workload(1, 16, 16)


def test_a_request_is_that_of_the_fullest_gpu() -> None:
    plan = make_plan(toy([10, 10, 10]), cards_of(24, 26), BF16, ONE, NOTHING)
    assert isinstance(plan, MemoryPlan)
    request = gpu_request(plan)
    assert request.gpus == 2
    assert request.memory_mb == max(-(-load.usage.total // (1 << 20)) for load in plan.loads)


def test_one_and_seventy_billion_on_one_machine_ask_for_what_each_needs() -> None:
    small = request_for(read_architecture("llama-3.2-1b"), BF16, Workload(), [40_960] * 4)
    large = request_for(read_architecture("llama-3.1-70b"), BF16, Workload(), [40_960] * 4)
    assert isinstance(small, GpuRequest)
    assert isinstance(large, GpuRequest)
    assert (small.gpus, large.gpus) == (1, 4)
    assert small.memory_mb < 8_000 < 36_000 < large.memory_mb <= 40_960


def test_on_gpus_of_two_sizes_the_smaller_will_do_where_it_does() -> None:
    reserve = Reserve(0, 0, 0.05)
    request = request_for(toy(), BF16, ONE, [60, 200, 200], reserve)
    assert isinstance(request, GpuRequest)
    assert request.gpus == 1
    assert request.memory_mb <= 60
    alone = request_for(toy(), BF16, ONE, [40, 200], reserve)
    assert alone == GpuRequest(1, 59)


def test_what_fits_nowhere_is_refused_with_advice() -> None:
    told = request_for(read_architecture("llama-3.1-70b"), BF16, Workload(), [24_576] * 4)
    assert isinstance(told, Refusal)
    assert told.alternatives


def test_no_gpus() -> None:
    with pytest.raises(UsageError, match="no GPU to plan for"):
        request_for(toy(), BF16, ONE, [])
    with pytest.raises(UsageError, match="3 GPUs a replica"):
        request_for(toy(), BF16, ONE, [60, 60], gpus=3)


@given(st.lists(st.integers(5, 90), min_size=1, max_size=4), st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_a_plan_comes_true_on_whatever_the_queue_gives(sizes: list[int], layers: list[int]) -> None:
    """Any GPUs that have the memory asked for hold the model, with nothing reserved for their size."""
    asked = request_for(toy(layers), BF16, ONE, sizes, NOTHING)
    if isinstance(asked, Refusal):
        return
    assert sum(size >= asked.memory_mb for size in sizes) >= asked.gpus
    given_by_queue = cards_of(*[asked.memory_mb] * asked.gpus)
    assert isinstance(make_plan(toy(layers), given_by_queue, BF16, ONE, NOTHING), MemoryPlan)
