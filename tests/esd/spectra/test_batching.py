"""Plans for GPUs: every matrix once, memory within what the job asked for, and shares near the best possible."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.esd.spectra.batching import (
    GRAM_COPIES,
    HOST_SIDE,
    LANES_BYTES,
    LEAST_LANES,
    MOST_LANES,
    Size,
    assign,
    batch_of,
    lane_bytes,
    lanes_at,
    panel_length,
    peak_bytes,
    plan_lanes,
)

SIDES = st.sampled_from([1, 64, HOST_SIDE, HOST_SIDE + 1, 400, 512, 768, 1023, 1024, 4096, 16384])


@st.composite
def models(draw: st.DrawFn) -> list[Size]:
    shapes = draw(st.lists(st.tuples(SIDES, st.integers(0, 5), st.booleans(), st.integers(0, 3)), max_size=40))
    return [
        Size(3 * i, side, side + 100 * more, pieces=more or 1, bundle=("t", b) if b else None, on_host=host)
        for i, (side, more, host, b) in enumerate(shapes)
    ]


@given(models(), st.integers(1, 4), st.one_of(st.none(), st.integers(0, 2**40)))
def test_every_matrix_is_planned_once_on_one_device(sizes: list[Size], devices: int, free: int | None) -> None:
    plan = plan_lanes(sizes, devices, free)
    planned = [index for group in plan.groups for index in group.indices]
    assert sorted(planned) == [size.index for size in sizes]
    by_index = {size.index: size for size in sizes}
    for group in plan.groups:
        members = [by_index[index] for index in group.indices]
        small = {size.on_host or size.side <= HOST_SIDE for size in members}
        assert small == {group.device is None}
        assert group.device is None or 0 <= group.device < devices
        if members[0].bundle is None:
            assert len({size.side for size in members}) == 1
            assert len(members) <= batch_of(members[0].side)
        else:
            assert {size.bundle for size in members} == {members[0].bundle}
    costs = [group.cost for group in plan.groups if group.device is not None]
    assert costs == sorted(costs, reverse=True)
    assert 1 <= plan.lanes <= MOST_LANES


@given(models(), st.integers(1, 4), st.integers(0, 2**40))
def test_free_memory_changes_lanes_only(sizes: list[Size], devices: int, free: int) -> None:
    plan, unbounded = plan_lanes(sizes, devices, free), plan_lanes(sizes, devices)
    assert plan.groups == unbounded.groups
    assert plan.lanes <= unbounded.lanes
    sides = [size.side for size in sizes if not size.on_host and size.side > HOST_SIDE]
    if sides and plan.lanes > 1:
        assert plan.lanes * lane_bytes(max(sides)) <= free


def test_what_is_one_of_a_bundle_but_small_goes_to_the_cpu_by_itself() -> None:
    sizes = [Size(0, 4096, 4096, bundle="qkv"), Size(1, 64, 4096, bundle="qkv"), Size(2, 64, 4096, bundle="qkv")]
    plan = plan_lanes(sizes, 1)
    assert [(group.indices, group.device) for group in plan.groups] == [((0,), 0), ((1, 2), None)]


def test_small_matrices_are_solved_together_and_leave_work_for_each_lane() -> None:
    small = [Size(i, 400, 400) for i in range(1000)]
    assert [len(group.indices) for group in plan_lanes(small, 1).groups] == 31 * [32] + [8]
    assert [len(group.indices) for group in plan_lanes(small[:20], 1).groups] == 6 * [3] + [2]
    large = [Size(i, 4096, 4096) for i in range(20)]
    assert all(len(group.indices) == 1 for group in plan_lanes(large, 1).groups)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 3))
def test_shares_are_within_four_thirds_of_the_best(costs: list[int], devices: int) -> None:
    where = assign([float(cost) for cost in costs], devices)
    loads = [sum(c for c, at in zip(costs, where, strict=True) if at == device) for device in range(devices)]
    best = min(
        max(sum(c for c, at in zip(costs, chosen, strict=True) if at == device) for device in range(devices))
        for chosen in itertools.product(range(devices), repeat=len(costs))
    )
    assert 3 * devices * max(loads) <= (4 * devices - 1) * best


@pytest.mark.parametrize("side", [257, 768, 1024, 4096, 5120, 8192, 16384, 65536])
def test_memory_of_lanes(side: int) -> None:
    panels = 8 * side * panel_length(side) + 4 * side * panel_length(side, 4)  # in float64, and as it is stored
    for smaller in range(HOST_SIDE + 1, side + 1, 97):
        assert lane_bytes(side) >= GRAM_COPIES * 8 * batch_of(smaller) * smaller**2 + panels
    # The compensated form: the sum, a product, 8 slices of 1024 columns, and three times what is left of them.
    assert lane_bytes(side) >= (8 + 4) * side**2 + 1024 * side * (8 * 4 + 3 * 8) + panels
    assert LEAST_LANES <= lanes_at(side) <= MOST_LANES
    assert peak_bytes(side, parallel=True) <= max(LANES_BYTES, LEAST_LANES * lane_bytes(side))
    assert peak_bytes(side, parallel=False) == lane_bytes(side)
