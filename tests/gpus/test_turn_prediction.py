"""When a turn comes: the rule stepped through expected ends."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.gpus.turn_prediction import HORIZON_S, HeldGpu, Prediction, grown, predict_start
from gpuherd.gpus.turns import Load, Ticket, TurnRules, decayed

ENDS = st.one_of(st.none(), st.floats(0, 5_000))


def held(*ends: float | None, uid: int = 9) -> list[HeldGpu]:
    return [HeldGpu(f"GPU-{number}", uid, end) for number, end in enumerate(ends)]


# --- a user alone ---------------------------------------------------------------------------------------------


@given(ends=st.lists(ENDS, min_size=1, max_size=8), smallest=st.integers(1, 4), now=st.floats(0, 1_000))
def test_alone_one_gets_each_gpu_at_its_end(ends: list[float | None], smallest: int, now: float) -> None:
    mine = Ticket("me", uid=1, since=now, gpus=8, smallest=smallest)
    known = sorted(max(end, now) for end in ends if end is not None)
    found = predict_start("me", [mine], held(*ends), {}, now=now)
    if len(known) < smallest:
        assert found.at is None and found.gpus == ()
    else:
        assert found.at == pytest.approx(known[smallest - 1])
        assert len(found.gpus) >= smallest
    assert set(found.unknown) == {f"GPU-{number}" for number, end in enumerate(ends) if end is None}
    assert found.before == {}


@given(ends=st.lists(st.floats(0, 5_000), min_size=4, max_size=8))
def test_later_jobs_of_ones_queue_come_no_earlier(ends: list[float]) -> None:
    mine = Ticket("me", uid=1, since=0.0, gpus=8, job_s=100.0, jobs=8)
    found = [predict_start("me", [mine], held(*ends), {}, now=0.0, nth=nth).at for nth in range(1, 9)]
    assert None not in found
    assert found == sorted(found)  # type: ignore[type-var]


def test_free_gpus_are_taken_at_once_however_long_they_are_free() -> None:
    mine = Ticket("me", uid=1, since=500.0, gpus=2, smallest=2)
    found = predict_start("me", [mine], [], {}, now=900.0, free={"GPU-0": 0.0, "GPU-1": 0.0})
    assert found == Prediction(900.0, ("GPU-0", "GPU-1"))


def test_a_gpu_of_another_must_be_quiet_first_and_ones_own_need_not() -> None:
    mine = Ticket("me", uid=1, since=0.0)
    assert predict_start("me", [mine], held(100.0, uid=9), {}, now=0.0, quiet_s=9.0).at == 109.0
    assert predict_start("me", [mine], held(100.0, uid=1), {}, now=0.0, quiet_s=9.0).at == 100.0


def test_a_job_that_should_have_ended_is_expected_to_end_now() -> None:
    assert predict_start("me", [Ticket("me", uid=1, since=0.0)], held(100.0), {}, now=400.0).at == 400.0


def test_only_usable_gpus_count() -> None:
    mine = Ticket("me", uid=1, since=0.0, usable=frozenset({"GPU-1"}))
    found = predict_start("me", [mine], held(10.0, 70.0), {}, now=0.0)
    assert (found.at, found.gpus) == (70.0, ("GPU-1",))


# --- several --------------------------------------------------------------------------------------------------


def test_who_is_owed_more_goes_first_and_is_named() -> None:
    tickets = [
        Ticket("me", uid=1, since=0.0),
        Ticket("bob", uid=2, since=50.0, gpus=2, job_s=1_000.0, jobs=2),
        Ticket("carol", uid=3, since=60.0, gpus=4, job_s=1_000.0, jobs=9),
    ]
    loads = {1: Load(used_s=7_200.0), 2: Load(used_s=3_600.0), 3: Load(used_s=36_000.0)}
    found = predict_start("me", tickets, held(100.0, 200.0, 300.0, 400.0), loads, now=90.0)
    # Bob's two jobs, then it is our turn; Carol has had more.
    assert (found.at, found.before) == (300.0, {"bob": 2})


def test_a_large_job_waits_for_a_window_or_for_ends_at_the_same_time() -> None:
    tickets = [
        Ticket("me", uid=1, since=0.0, gpus=2, smallest=2),
        Ticket("bob", uid=2, since=0.0, gpus=2, job_s=500.0, jobs=99),
    ]
    # Bob is owed nothing, and takes one GPU at a time whenever none is kept for us.
    loads = {2: Load(used_s=90_000.0, held=2)}
    rules = TurnRules(grace_s=30.0, keep_share=0.2)
    in_first_window = predict_start("me", tickets, held(5.0, 20.0), loads, now=0.0, rules=rules)
    assert in_first_window.at == 20.0
    missed = predict_start("me", tickets, held(35.0, 45.0), loads, now=0.0, rules=rules)
    assert missed.at is not None and missed.at > 500.0
    assert missed.before["bob"] >= 2


@given(
    ends=st.lists(ENDS, min_size=1, max_size=6),
    others=st.lists(
        st.tuples(st.integers(2, 5), st.integers(1, 3), st.one_of(st.none(), st.floats(1, 900)), st.floats(0, 90)),
        max_size=6,
    ),
    smallest=st.integers(1, 3),
    used=st.floats(0, 1e6),
)
@settings(deadline=None)
def test_what_must_hold_of_every_prediction(
    ends: list[float | None], others: list[tuple[int, int, float | None, float]], smallest: int, used: float
) -> None:
    tickets = [Ticket("me", uid=1, since=10.0, gpus=4, smallest=smallest, job_s=50.0, jobs=4)]
    tickets += [
        Ticket(f"t{number}", uid, since, gpus=4, smallest=size, job_s=job_s, jobs=3)
        for number, (uid, size, job_s, since) in enumerate(others)
    ]
    loads = {1: Load(used_s=used), 9: Load(held=len(ends))}
    before = dict(loads)
    found = predict_start("me", tickets, held(*ends), loads, now=100.0, quiet_s=1.0)
    assert found == predict_start("me", tickets, held(*ends), loads, now=100.0, quiet_s=1.0), "the same each time"
    assert loads == before
    assert "me" not in found.before
    assert all(count > 0 for count in found.before.values())
    if found.at is None:
        assert found.gpus == ()
    else:
        assert 100.0 <= found.at <= 100.0 + HORIZON_S
        assert len(found.gpus) >= smallest and set(found.gpus) <= {f"GPU-{number}" for number in range(len(ends))}
        # Alone it would have had its turn at the same time or earlier.
        alone = predict_start("me", tickets[:1], held(*ends), loads, now=100.0, quiet_s=1.0)
        assert alone.at is not None and alone.at <= found.at + 1e-6


# --- what strangers write -------------------------------------------------------------------------------------


@pytest.mark.parametrize("job_s", [0.0, -5.0, math.inf, math.nan, 1e300])
def test_absurd_tickets_of_strangers_end_in_a_prediction_all_the_same(job_s: float) -> None:
    stranger = Ticket("stranger", uid=2, since=0.0, gpus=10**9, job_s=job_s, jobs=10**12)
    mine = Ticket("me", uid=1, since=50.0, gpus=10**9, smallest=10**9)
    loads = {1: Load(used_s=1e9)}
    began = time.process_time()
    assert predict_start("me", [stranger, mine], held(5.0, 6.0), loads, now=0.0).at is None
    small = predict_start("me", [stranger, Ticket("me", uid=1, since=50.0)], held(5.0, 6.0), loads, now=0.0)
    assert small.at is None or small.at >= 5.0
    assert time.process_time() - began < 5.0


def test_a_ticket_that_is_not_there_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        predict_start("me", [], held(1.0), {}, now=0.0)


# --- loads ----------------------------------------------------------------------------------------------------


@given(used=st.floats(0, 1e6), gpus=st.integers(0, 8), first=st.floats(0, 1e6), then=st.floats(0, 1e6))
def test_a_load_grows_the_same_in_one_step_or_two(used: float, gpus: int, first: float, then: float) -> None:
    load, half_life_s = Load(used, gpus, 2.0), 86_400.0
    once = grown(load, first + then, half_life_s)
    twice = grown(grown(load, first, half_life_s), then, half_life_s)
    assert once.used_s == pytest.approx(twice.used_s, rel=1e-9, abs=1e-6)
    assert (once.held, once.weight) == (gpus, 2.0)
    if not gpus:
        assert once.used_s == pytest.approx(decayed(used, first + then, half_life_s))


def test_a_held_gpu_counts_its_time_while_that_is_recent() -> None:
    assert grown(Load(held=3), 60.0, 7 * 86_400.0).used_s == pytest.approx(180.0, rel=1e-3)
    # For ever it comes to the half-life over ln 2.
    assert grown(Load(held=1), 1e9, 86_400.0).used_s == pytest.approx(86_400.0 / math.log(2))
