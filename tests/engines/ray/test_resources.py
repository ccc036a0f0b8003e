"""What Ray is asked for, and the sentences about what it can't give. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.engines.base import Placement
from gpuherd.engines.ray.cluster import NodeCapacity, custom, never, resources_per_node, turn_of, waits_for
from gpuherd.errors import UsageError

GB = 2**30


def room(
    name: str, *, gpus: float = 4, free_gpus: float | None = None, cpus: float = 8, memory_gb: float = 64
) -> NodeCapacity:
    total = {"GPU": gpus, "CPU": cpus, "memory": memory_gb * GB}
    return NodeCapacity(name, total, {**total, "GPU": gpus if free_gpus is None else free_gpus})


def test_a_parcel_takes_what_it_asks_for_and_what_ray_gives_by_default() -> None:
    assert resources_per_node(Placement(gpus=2), {}, cpus=1) == {"GPU": 2, "CPU": 1}
    assert resources_per_node(Placement(gpus=0, cpus=6, memory_mb=512), {"licence": 1}, cpus=1) == {
        "CPU": 6,
        "memory": 512 * 2**20,
        "licence": 1,
    }


def test_custom_resources_are_names_with_amounts() -> None:
    assert custom(["licence=1", "accelerator_type:A100=0.001", "a=b=2"]) == {
        "licence": 1,
        "accelerator_type:A100": 0.001,
        "a=b": 2,
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["licence"], "NAME=AMOUNT"),
        (["=1"], "NAME=AMOUNT"),
        (["licence=many"], "whole number"),
        (["licence=0"], "whole number"),
        (["licence=-1"], "whole number"),
        (["licence=nan"], "whole number"),
        (["licence=inf"], "whole number"),
        (["licence=1.5"], "whole number"),
        (["GPU=1"], "--gpus-per-job"),
        (["memory=1"], "--host-mem"),
        (["a=1", "a=2"], "twice"),
    ],
)
def test_words_that_are_no_resources_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        custom(words)


def test_more_gpus_than_any_node_has_are_never_had() -> None:
    nodes = [room("a", gpus=2), room("b", gpus=4, free_gpus=0)]
    placement = Placement(gpus=8)
    assert never(placement, resources_per_node(placement, {}, cpus=1), nodes) == (
        "it asks for 8 GPUs on one node, and the most that any of the Ray cluster's 2 nodes has is 4 GPUs; "
        "ask for less by --gpus-per-job"
    )


def test_what_is_in_use_now_can_be_had_later() -> None:
    placement = Placement(gpus=4)
    assert never(placement, resources_per_node(placement, {}, cpus=1), [room("a", free_gpus=0)]) is None


def test_no_single_node_may_have_all_though_each_thing_is_there() -> None:
    nodes = [room("a", gpus=8, cpus=4), room("b", gpus=1, cpus=64)]
    placement = Placement(gpus=8, cpus=64)
    reason = never(placement, resources_per_node(placement, {}, cpus=1), nodes)
    assert reason is not None and "no single one of the Ray cluster's 2 nodes has all of that" in reason


def test_several_nodes_must_each_have_it() -> None:
    nodes = [room("a", gpus=8), room("b", gpus=4), room("c", gpus=8)]
    assert never(Placement(gpus=8, nodes=2), {"GPU": 8.0}, nodes) is None
    reason = never(Placement(gpus=8, nodes=3), {"GPU": 8.0}, nodes)
    assert reason == (
        "it asks for 3 nodes with 8 GPUs each, and 2 of the Ray cluster's 3 nodes have that; ask for fewer nodes"
    )


def test_a_resource_that_nobody_has_is_named_with_its_flag() -> None:
    reason = never(Placement(gpus=0), {"licence": 1.0}, [room("a")])
    assert reason is not None and "0 licence" in reason and "--ray-resources licence=" in reason


def test_a_cluster_without_nodes_gives_nothing() -> None:
    assert never(Placement(gpus=0), {"CPU": 1.0}, []) == "the Ray cluster has no node that is alive"


def test_a_wait_says_what_is_missing() -> None:
    asked = {"GPU": 4.0, "CPU": 1.0}
    assert waits_for(1, asked, [room("a", free_gpus=3), room("b", free_gpus=1)]) == (
        "waits for 4 GPUs; at most 3 GPUs free on one node"
    )
    assert waits_for(1, {"GPU": 9.0}, [room("a")]) == "Ray has no node with 9 GPUs now; it starts when one joins"
    assert waits_for(1, asked, [room("a")]) == "Ray is about to start it"
    assert waits_for(2, asked, [room("a"), room("b", free_gpus=0)]) == (
        "waits for 2 nodes with 4 GPUs and 1 CPU free on each; 1 of 2 have that"
    )


@given(
    st.integers(0, 16),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16)), max_size=6),
)
def test_never_is_said_exactly_when_too_few_nodes_are_large_enough(
    gpus: int, nodes: int, rooms: list[tuple[int, int]]
) -> None:
    there = [room(str(number), gpus=total, free_gpus=min(total, free)) for number, (total, free) in enumerate(rooms)]
    asked = resources_per_node(Placement(gpus=gpus), {}, cpus=1)
    able = sum(total >= gpus for total, _ in rooms)
    assert (never(Placement(gpus=gpus, nodes=nodes), asked, there) is None) == (able >= nodes)
    if able >= nodes:
        assert waits_for(nodes, asked, there)


def test_a_turn_ends_with_the_notice_before_its_time_is_up() -> None:
    assert turn_of(Placement(gpus=1), 120) is None
    assert turn_of(Placement(gpus=1, time_s=3600), 120) == 3480
    assert turn_of(Placement(gpus=1, time_s=60), 120) == 60
