"""What a plan needs free on each of its GPUs: the figure that jobs ask their queue for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.models.memory.toy import NOTHING, gpus_of, toy

from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.result import AnswerRefusal, MemoryPlan

BF16 = Precision.BF16
ONE = Workload(1, 16, 16)


def test_a_request_is_that_of_the_fullest_gpu() -> None:
    plan = make_plan(toy([10, 10, 10]), gpus_of(24, 26), BF16, ONE, NOTHING)
    assert isinstance(plan, MemoryPlan)
    assert [load.usage.weights >> 20 for load in plan.loads] == [14, 24]
    assert (plan.gpus, plan.memory_mb) == (2, 25)  # the last one's workspace begins another MB


@given(st.integers(1, 4), st.integers(5, 90), st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_a_plan_comes_true_on_what_it_asks_for(gpus: int, size: int, layers: list[int]) -> None:
    plan = make_plan(toy(layers), gpus_of(*[size] * gpus), BF16, ONE, NOTHING, advise=False)
    if isinstance(plan, AnswerRefusal):
        return
    assert plan.memory_mb <= size
    again = make_plan(toy(layers), gpus_of(*[plan.memory_mb] * plan.gpus), BF16, ONE, NOTHING)
    assert isinstance(again, MemoryPlan)
