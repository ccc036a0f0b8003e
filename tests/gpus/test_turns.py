"""Whose turn it is: what must hold of the rule, whatever tickets, loads and GPUs there are."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.gpus.turns import RULES, Load, Ticket, TurnRules, assign, window_end

UUIDS = [f"GPU-{number}" for number in range(6)]


@st.composite
def all_tickets(draw: st.DrawFn, *, users: int = 4, most: int = 8) -> list[Ticket]:
    """Tickets of some users, some of which can use only some GPUs."""
    tickets = []
    for number in range(draw(st.integers(1, most))):
        smallest = draw(st.integers(1, 4))
        tickets.append(
            Ticket(
                f"t{number}",
                uid=draw(st.integers(1, users)),
                since=draw(st.floats(0, 1000)),
                gpus=draw(st.integers(0, 8)),
                smallest=smallest,
                usable=draw(st.none() | st.frozensets(st.sampled_from(UUIDS))),
            )
        )
    return tickets


all_loads = st.dictionaries(
    st.integers(1, 4),
    st.builds(Load, st.floats(0, 1e7), st.integers(0, 8), st.floats(0.1, 10)),
)
free_gpus = st.dictionaries(st.sampled_from(UUIDS), st.floats(0, 1000))
times = st.floats(1000, 20_000)


@given(free_gpus, all_tickets(), all_loads, times, st.frozensets(st.sampled_from(UUIDS)))
def test_no_gpu_is_meant_for_two_and_none_for_a_ticket_that_cannot_use_it(
    free: dict[str, float], tickets: list[Ticket], loads: dict[int, Load], now: float, held: frozenset[str]
) -> None:
    found = assign(free, tickets, loads, now=now, held=held - free.keys())
    assert sum(map(len, found.to.values())) == len(frozenset[str]().union(*found.to.values()))
    for ticket in found.order:
        gpus = found.to[ticket.key]
        assert gpus <= free.keys()
        assert ticket.usable is None or gpus <= ticket.usable
        assert len(gpus) <= ticket.gpus
        assert (ticket.key in found.until) == bool(gpus)
        assert not gpus or found.until[ticket.key] > now


@given(free_gpus, all_tickets(), all_loads, times, st.randoms())
def test_the_order_in_which_tickets_are_read_does_not_matter(
    free: dict[str, float], tickets: list[Ticket], loads: dict[int, Load], now: float, chance: object
) -> None:
    found = assign(free, tickets, loads, now=now)
    turned = dict(reversed(free.items()))
    assert assign(turned, tickets[::-1], loads, now=now) == found


@given(free_gpus, all_tickets(users=1), all_loads, times, st.sampled_from(UUIDS))
def test_a_user_alone_may_take_everything_at_once(
    free: dict[str, float], tickets: list[Ticket], loads: dict[int, Load], now: float, held: str
) -> None:
    mine = replace(tickets[0], gpus=8)
    found = assign(free, [mine, *tickets[1:]], loads, now=now, me=mine.key, held={held} - free.keys())
    assert found.allowed(mine.key, free) == free.keys()
    assert found.ahead_of(mine.key) == ()


@given(free_gpus, all_tickets(), all_loads, times)
def test_what_is_meant_for_one_is_left_alone_by_the_others(
    free: dict[str, float], tickets: list[Ticket], loads: dict[int, Load], now: float
) -> None:
    found = assign(free, tickets, loads, now=now)
    for ticket in found.order:
        others = [other for other in found.order if other.uid != ticket.uid]
        kept = frozenset[str]().union(*(found.to[other.key] for other in others))
        assert found.allowed(ticket.key, free) == free.keys() - kept
        assert set(found.kept_for_others(ticket.key)) == kept


@given(free_gpus, all_tickets(most=4), all_loads, times, st.integers(1, 4))
def test_splitting_a_ticket_gains_nothing(
    free: dict[str, float], others: list[Ticket], loads: dict[int, Load], now: float, gpus: int
) -> None:
    """A user with one ticket for several GPUs gets as many as with several tickets for one."""
    others = [ticket for ticket in others if ticket.uid != 1 and ticket.gpus >= ticket.smallest]
    whole = Ticket("w", uid=1, since=7.0, gpus=gpus)
    parts = [replace(whole, key=f"w{number}", gpus=1) for number in range(gpus)]
    one = assign(free, [*others, whole], loads, now=now)
    many = assign(free, [*others, *parts], loads, now=now)
    assert len(one.to["w"]) == sum(len(many.to[part.key]) for part in parts)
    assert {other.key: one.to[other.key] for other in others} == {other.key: many.to[other.key] for other in others}


@given(free_gpus, st.lists(st.integers(1, 3), min_size=2, max_size=4), all_loads, times, st.floats(0, 1))
def test_a_lower_load_never_gets_less(
    free: dict[str, float], sizes: list[int], loads: dict[int, Load], now: float, share: float
) -> None:
    tickets = [
        Ticket(f"t{number}", uid=number + 1, since=float(number), gpus=8, smallest=size)
        for number, size in enumerate(sizes)
    ]
    before = assign(free, tickets, loads, now=now, held=set(UUIDS) - free.keys())
    load = loads.get(1, Load(1e5))
    lower = {**loads, 1: replace(load, used_s=load.used_s * share)}
    after = assign(free, tickets, lower, now=now, held=set(UUIDS) - free.keys())
    if 1 in loads:
        assert len(after.to["t0"]) >= len(before.to["t0"])


def test_the_lowest_load_goes_first_until_it_is_level() -> None:
    free = dict.fromkeys(UUIDS[:4], 0.0)
    tickets = [Ticket("a", uid=1, since=0.0, gpus=4), Ticket("b", uid=2, since=1.0, gpus=4)]
    level = assign(free, tickets, {}, now=5.0)
    assert [len(level.to[key]) for key in "ab"] == [2, 2]
    owed = assign(free, tickets, {1: Load(used_s=2.5 * RULES.quantum_s)}, now=5.0)
    assert [len(owed.to[key]) for key in "ab"] == [1, 3]
    weighted = assign(free, tickets, {1: Load(weight=3.0)}, now=5.0)
    assert [len(weighted.to[key]) for key in "ab"] == [3, 1]
    holding = assign(free, tickets, {1: Load(held=2)}, now=5.0)
    assert [len(holding.to[key]) for key in "ab"] == [1, 3]


def test_a_gpu_is_kept_for_the_grace_only_and_anew_when_another_comes_free() -> None:
    pair = Ticket("pair", uid=1, since=0.0, gpus=2, smallest=2)
    mine = Ticket("mine", uid=2, since=0.0, gpus=2)
    loads = {2: Load(used_s=1e6)}
    both = {"GPU-0": 100.0, "GPU-1": 150.0}
    assert assign(both, [pair, mine], loads, now=179.0, me="mine").allowed("mine", both) == set()
    assert assign(both, [pair, mine], loads, now=179.0).until == {"pair": 180.0}
    assert assign(both, [pair, mine], loads, now=180.0, me="mine").allowed("mine", both) == both.keys()
    single = replace(pair, gpus=2, smallest=1)
    # It did not want the first for 30 s, and has not had the time for the second.
    assert assign(both, [single, mine], loads, now=179.0, me="mine").allowed("mine", both) == {"GPU-0"}
    late = replace(single, since=170.0)
    assert assign(both, [late, mine], loads, now=199.0, me="mine").allowed("mine", both) == set()


def test_for_a_large_job_gpus_are_kept_in_windows_if_others_hold_the_rest() -> None:
    large = Ticket("large", uid=1, since=0.0, gpus=3, smallest=3)
    mine = Ticket("mine", uid=2, since=0.0, gpus=3)
    free, held, loads = {"GPU-0": 0.0}, {"GPU-1", "GPU-2"}, {2: Load(used_s=1e6)}

    def kept(now: float, held: set[str] = held, large: Ticket = large) -> bool:
        return not assign(free, [large, mine], loads, now=now, me="mine", held=held).allowed("mine", free)

    assert [kept(now) for now in (10.0, 31.0, 53.0, 54.1, 59.9, 60.1, 108.1, 120.1)] == [
        True, False, False, True, True, False, True, False
    ]  # fmt: skip
    assert not kept(10.0, {"GPU-1"})  # a third one will never come
    assert not kept(10.0, large=replace(large, usable=frozenset(["GPU-1", "GPU-2", "GPU-3"])))


@given(st.floats(0, 1e7), st.floats(0, 100), st.floats(0.01, 0.9))
def test_windows_take_no_more_than_their_share_of_the_time_waited(waited: float, grace: float, share: float) -> None:
    rules = TurnRules(grace_s=grace, keep_share=share)
    first = max(grace, 1.0)
    # All windows that end before now, from their ends backwards.
    end, total = first, min(grace, waited)
    while 2 * end <= waited:
        end *= 2
        total += share * end / 2
    current = window_end(waited, rules)
    if current is not None and waited >= grace:
        assert current >= waited
        assert window_end(current - share * current / 2 + 1e-6 * current, rules) == current
        total += max(0.0, waited - (current - share * current / 2))
    assert total <= grace + share * waited + 1e-6


class _World:
    """Users with jobs that end, by the rule alone: what gpuherds do in virtual time, each GPU ready at once."""

    def __init__(self, gpus: int, users: Mapping[int, tuple[int, float, float]], rules: TurnRules):
        self.free = dict.fromkeys(UUIDS[:gpus], 0.0)
        self.users, self.rules = users, rules
        self.since = dict.fromkeys(users, 0.0)
        self.held: dict[str, int] = {}
        self.ends: list[tuple[float, int, tuple[str, ...]]] = []
        self.used: dict[int, float] = dict.fromkeys(users, 0.0)
        self.started: dict[int, int] = dict.fromkeys(users, 0)
        self.now = 0.0

    def run(self, until: float) -> None:
        """All users always want all GPUs, each in jobs of its own size and length."""
        gpus = len(self.free) + len(self.held)
        while self.now < until:
            tickets = [Ticket(str(uid), uid, self.since[uid], gpus, size) for uid, (size, _, _) in self.users.items()]
            loads = {
                uid: Load(self.used[uid], sum(holder == uid for holder in self.held.values()), weight)
                for uid, (_, _, weight) in self.users.items()
            }
            found = assign(self.free, tickets, loads, now=self.now, held=self.held.keys(), rules=self.rules)
            for uid, (size, length, _) in self.users.items():
                got = sorted(found.to[str(uid)])
                for begin in range(0, len(got) - size + 1, size):
                    self._start(uid, tuple(got[begin : begin + size]), length)
            wakes = [at for at in found.until.values() if at < float("inf")]
            at = min([end for end, _, _ in self.ends[:1]] + [wake + 1e-3 for wake in wakes] + [self.now + 60.0])
            for uid in self.held.values():
                self.used[uid] += at - self.now
            self.now = at
            while self.ends and self.ends[0][0] <= self.now:
                _, _, gone = heapq.heappop(self.ends)
                for uuid in gone:
                    del self.held[uuid]
                    self.free[uuid] = self.now

    def _start(self, uid: int, gpus: Sequence[str], length: float) -> None:
        for uuid in gpus:
            del self.free[uuid]
            self.held[uuid] = uid
        self.since[uid] = self.now
        self.started[uid] += 1
        heapq.heappush(self.ends, (self.now + length, self.started[uid] * 1000 + uid, tuple(gpus)))


@settings(max_examples=15)
@given(
    st.dictionaries(
        st.integers(1, 4),
        st.tuples(st.integers(1, 4), st.floats(30, 900), st.just(1.0)),
        min_size=2,
    )
)
def test_whoever_can_be_served_is_served(users: dict[int, tuple[int, float, float]]) -> None:
    """Also jobs on all GPUs beside ones on a single GPU, however these end one after the other."""
    world = _World(4, users, RULES)
    longest = max(length for _, length, _ in users.values())
    world.run(40 * longest + 3600)
    assert all(world.started.values()), world.started


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (5.0, 2.0, 1.0)])
def test_shares_follow_the_weights(weights: tuple[float, ...]) -> None:
    """Three users with jobs of other lengths on four GPUs, over some hours."""
    users = {uid: (1, 100.0 + 37 * uid, weight) for uid, weight in enumerate(weights, start=1)}
    world = _World(4, users, TurnRules(quantum_s=600.0))
    world.run(4 * 3600.0)
    total = sum(world.used.values())
    assert total > 0.99 * 4 * world.now
    for uid, weight in enumerate(weights, start=1):
        assert world.used[uid] / total == pytest.approx(weight / sum(weights), abs=0.05)
