"""Looks become seconds, joules and memory; nothing depends on the wall clock's steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gpus.machines import gpu
from tests.ledger.uses import use

from gpuherd.ledger.metering import Look, Meter, begun, part_of
from gpuherd.ledger.records import line_of, use_of


def start(mono: float = 0.0, wall: float = 1e9) -> Meter:
    return begun(use(held_s=0.0), mono=mono, wall=wall)


@given(
    steps=st.lists(
        st.tuples(st.floats(0, 100), st.floats(0.1, 1), st.none() | st.floats(0, 1), st.floats(1e9 - 1e8, 1e9 + 1e8)),
        max_size=20,
    )
)
def test_the_length_is_that_of_the_steady_clock_and_figures_stay_below_it(
    steps: list[tuple[float, float, float | None, float]],
) -> None:
    meter, mono, held = start(), 0.0, 0.0
    for passed, part, utilisation, wall in steps:
        mono += passed
        held += passed * part
        meter = meter.advanced(mono=mono, wall=wall, look=Look(part, utilisation, 100.0, 500))
        assert meter.use.until == pytest.approx(wall)
    assert meter.use.span_s == pytest.approx(mono, abs=1e-3)
    assert meter.use.held_s == pytest.approx(held)
    assert (meter.use.computing_s or 0.0) <= meter.use.held_s + 1e-9
    assert (meter.use.energy_j or 0.0) == pytest.approx(held * 100)
    assert use_of(line_of(meter.use)) is not None


def test_users_have_parts_that_make_a_whole() -> None:
    for users in (1, 2, 5):
        for of_each in (1, 3):
            everyone = set(range(users))
            assert sum(part_of(uid, everyone, of_each) for uid in everyone for _ in range(of_each)) == pytest.approx(1)


def test_it_is_idle_since_the_look_that_saw_it_first() -> None:
    busy, idle = Look(utilisation=0.5, memory_mb=100), Look(utilisation=0.0, memory_mb=100)
    meter = start().advanced(mono=10.0, wall=1e9 + 10, look=busy)
    assert meter.use.idle_since is None
    meter = meter.advanced(mono=20.0, wall=1e9 + 20, look=idle)
    assert meter.use.idle_since == pytest.approx(1e9 + 20)
    # The clock is set ahead by an hour: it has been idle for ten seconds all the same.
    meter = meter.advanced(mono=30.0, wall=1e9 + 3630, look=idle)
    assert meter.use.until - (meter.use.idle_since or 0) == pytest.approx(10.0)
    assert meter.advanced(mono=40.0, wall=1e9 + 3640, look=busy).use.idle_since is None
    # Without memory, or where the driver says nothing, nobody knows.
    assert start().advanced(mono=1.0, wall=1e9, look=Look(utilisation=0.0)).use.idle_since is None
    assert start().advanced(mono=1.0, wall=1e9, look=Look(memory_mb=100)).use.idle_since is None


def test_what_is_not_measured_is_not_known() -> None:
    meter = start().advanced(mono=10.0, wall=1e9 + 10, look=Look())
    assert (meter.use.computing_s, meter.use.energy_j, meter.use.memory_mb_s) == (None, None, None)
    assert meter.use.held_s == 10.0
    lost = Look.of(gpu(0, problem="it fell off the bus", utilisation_percent=0, power_w=0.0), memory_mb=0)
    assert lost == Look()


def test_it_is_never_shortened() -> None:
    meter = start().advanced(mono=10.0, wall=1e9 + 10)
    again = meter.advanced(mono=4.0, wall=1e9 + 4)
    assert again.use == meter.use


def test_a_gap_counts_as_held() -> None:
    known = use(since=1e9, held_s=50.0, computing_s=20.0)
    meter = Meter.resumed(use(held_s=0.0), known, mono=50.0).advanced(mono=80.0, wall=1e9 + 80, look=Look(0.5, 1.0))
    assert meter.use.held_s == pytest.approx(65.0)
    assert meter.use.computing_s == pytest.approx(35.0)
    assert meter.use.since == pytest.approx(1e9)
