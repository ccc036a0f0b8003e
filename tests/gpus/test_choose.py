"""Which GPUs a job gets, against a brute-force reading of the rule."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from tests.gpus.machines import gpu, linked_machines, split

from gpuherd.gpus.choose import choose, links_between
from gpuherd.gpus.state import Gpu, Peer, Proximity


def linked(pairs: dict[tuple[int, int], int], count: int, *, proximity: Proximity = Proximity.SYSTEM) -> list[Gpu]:
    """GPUs with so many NVLinks between pairs."""
    return [
        gpu(
            one,
            peers=tuple(
                Peer(gpu(two).uuid, pairs.get((min(one, two), max(one, two)), 0), proximity)
                for two in range(count)
                if two != one
            ),
        )
        for one in range(count)
    ]


def indices(chosen: tuple[Gpu, ...] | None) -> list[int]:
    assert chosen is not None
    return [each.index for each in chosen]


def worth(group: tuple[Gpu, ...]) -> tuple[object, ...]:
    """The rule as the module's docstring states it, written down once more."""
    ways = [next(peer for peer in one.peers if peer.uuid == two.uuid) for one, two in combinations(group, 2)]
    return (
        -min((way.nvlinks for way in ways), default=0),
        -sum(way.nvlinks for way in ways),
        max((way.proximity for way in ways), default=0),
        sum(way.proximity for way in ways),
        len({each.numa_node for each in group}),
        sum(each.used_mb for each in group),
        sum(each.utilisation_percent or 0 for each in group),
        sorted(each.index for each in group),
    )


@given(linked_machines(), st.integers(0, 7), st.none() | st.integers(0, 45_000))
def test_choice_is_the_best_of_all_sets_that_fit(gpus: list[Gpu], count: int, memory_mb: int | None) -> None:
    chosen = choose(gpus, count, memory_mb=memory_mb)
    fitting = [each for each in gpus if memory_mb is None or each.free_mb >= memory_mb]
    if count > len(fitting):
        assert chosen is None
        return
    assert chosen is not None
    assert len(chosen) == count
    assert worth(chosen) == min(map(worth, combinations(fitting, count)))


@given(linked_machines(), st.integers(1, 6), st.integers(0, 250_000))
def test_together_they_hold_what_is_asked(gpus: list[Gpu], count: int, total_mb: int) -> None:
    chosen = choose(gpus, count, total_mb=total_mb)
    holding = [group for group in combinations(gpus, count) if sum(each.free_mb for each in group) >= total_mb]
    if chosen is None:
        assert not holding
    else:
        assert worth(chosen) == min(map(worth, holding))


@given(linked_machines(), st.integers(0, 6), st.data())
def test_preferred_gpus_come_first_in_their_order(gpus: list[Gpu], count: int, data: st.DataObject) -> None:
    preference = data.draw(st.lists(st.sampled_from([each.uuid for each in gpus]), unique=True))
    chosen = choose(gpus, count, preference=preference)
    if chosen is None:
        assert count > len(gpus)
        return
    assert [each.uuid for each in chosen][: len(preference)] == preference[:count]
    rest = [each.index for each in chosen[len(preference) :]]
    assert rest == sorted(rest)


def test_one_gpu_is_the_least_used_then_the_least_busy_then_the_first() -> None:
    assert indices(choose([gpu(0, used_mb=9), gpu(1, used_mb=3), gpu(2, used_mb=3)], 1)) == [1]
    assert indices(choose([gpu(0, utilisation_percent=9), gpu(1, utilisation_percent=0)], 1)) == [1]


def test_linked_gpus_beat_idle_ones() -> None:
    gpus = linked({(1, 3): 4, (0, 2): 2}, 4)
    assert indices(choose(gpus, 2)) == [1, 3]
    assert indices(choose([each for each in gpus if each.index != 3], 2)) == [0, 2]


def test_the_weakest_link_counts_before_the_sum() -> None:
    fast_pair_and_stranger = {(0, 1): 12}
    ring = {(1, 2): 2, (2, 3): 2, (1, 3): 2}
    assert indices(choose(linked(fast_pair_and_stranger | ring, 4), 3)) == [1, 2, 3]


def test_without_nvlink_near_gpus_win() -> None:
    near = {Proximity.SYSTEM: [0, 1], Proximity.ONE_SWITCH: [2, 3]}
    gpus = [
        gpu(0, peers=()),
        gpu(1, peers=()),
        gpu(2, peers=(Peer(gpu(3).uuid, 0, Proximity.ONE_SWITCH),)),
        gpu(3, peers=(Peer(gpu(2).uuid, 0, Proximity.ONE_SWITCH),)),
    ]
    assert indices(choose(gpus, 2)) == near[Proximity.ONE_SWITCH]


def test_mig_instances_go_to_one_gpu_jobs_only() -> None:
    instances = split(0, [0, 1])[1:]
    assert choose(instances, 1) == (instances[0],)
    assert choose(instances, 2) is None
    assert indices(choose([*instances, gpu(1), gpu(2)], 2)) == [1, 2]


def test_sixteen_gpus_are_compared_completely_in_good_time() -> None:
    pairs = {(one, one + 1): 2 for one in range(0, 16, 2)} | {(14, 15): 4}
    started = time.process_time()
    assert indices(choose(linked(pairs, 16), 2)) == [14, 15]
    assert len(indices(choose(linked(pairs, 16), 8))) == 8
    assert time.process_time() - started < 3


def test_more_gpus_than_can_be_compared_still_give_a_well_linked_set() -> None:
    quads = {(one, two): 1 for first in range(0, 40, 8) for one, two in combinations(range(first, first + 8), 2)}
    chosen = indices(choose(linked(quads, 40), 8))
    assert chosen == list(range(chosen[0], chosen[0] + 8))
    assert chosen[0] % 8 == 0


def test_memory_that_others_use_is_not_there() -> None:
    gpus = [gpu(0, used_mb=30_000), gpu(1, used_mb=1_000)]
    assert indices(choose(gpus, 1, preference=[gpus[0].uuid], memory_mb=20_000)) == [1]
    assert choose(gpus, 2, memory_mb=20_000) is None


def test_on_equal_links_gpus_of_one_numa_node_go_together() -> None:
    gpus = [replace(each, numa_node=each.index % 2) for each in linked({}, 4)]
    gpus[0] = replace(gpus[0], used_mb=400)  # counts less than the node
    assert indices(choose(gpus, 2)) == [1, 3]


def test_what_preferred_gpus_have_free_counts_for_the_memory_of_all() -> None:
    gpus = [gpu(0), gpu(1, used_mb=20_960)]
    assert indices(choose(gpus, 2, preference=[gpus[1].uuid], total_mb=60_960)) == [1, 0]
    assert choose(gpus, 2, preference=[gpus[1].uuid], total_mb=60_961) is None


def test_a_gpu_preferred_twice_has_its_first_place() -> None:
    gpus = [gpu(0), gpu(1)]
    assert indices(choose(gpus, 1, preference=[gpus[1].uuid, gpus[0].uuid, gpus[1].uuid])) == [1]


def islands(count: int, number: int) -> list[Gpu]:
    """So many GPUs; those whose index leaves the same remainder by ``number`` are joined by NVLink."""
    pairs = {(one, two): 4 for one, two in combinations(range(count), 2) if one % number == two % number}
    return linked(pairs, count)


def test_with_too_many_sets_to_compare_an_island_is_still_found() -> None:
    gpus = islands(32, 4)  # more than ten million sets of eight
    gpus[1] = replace(gpus[1], used_mb=100)
    assert indices(choose(gpus[1:], 8)) == list(range(2, 32, 4))


def test_with_too_many_sets_to_compare_memory_is_found_wherever_it_is() -> None:
    roomy = {3, 8, 13, 14, 20, 25, 26, 31}  # two of each island: no linked set has the memory
    gpus = [gpu(each.index, used_mb=0 if each.index in roomy else 40_000, peers=each.peers) for each in islands(32, 4)]
    chosen = choose(gpus, 8, total_mb=8 * 40_960)
    assert set(indices(chosen)) == roomy


PAIRS = {(0, 1): 4, (2, 3): 4, (4, 5): 4, (6, 7): 4}


def test_single_jobs_fill_a_broken_pair_before_they_break_another() -> None:
    """Five jobs on one GPU each, one after the other: four pairs become two full ones, a broken one and a whole one."""
    gpus = linked(PAIRS, 8)
    taken: list[int] = []
    while len(taken) < 5:
        free = [each for each in gpus if each.index not in taken]
        taken += indices(choose(free, 1, keep_together=True))
    assert sorted(taken) == [0, 1, 2, 3, 4]
    # Jobs have ended on one GPU of each of three pairs: the next goes to one of those and not to the whole pair.
    free = [gpus[index] for index in (0, 1, 3, 5, 6)]
    assert indices(choose(free, 1, keep_together=True))[0] in (3, 5, 6)
    assert indices(choose(free, 1)) == [0]


def test_a_pair_is_split_for_a_gpu_that_is_much_less_used() -> None:
    gpus = linked(PAIRS, 8)
    whole = [gpus[0], gpus[1]]
    assert indices(choose([*whole, replace(gpus[2], used_mb=9)], 1, keep_together=True)) == [2]
    assert indices(choose([*whole, replace(gpus[2], used_mb=5_000)], 1, keep_together=True)) == [0]
    assert indices(choose([*whole, replace(gpus[2], utilisation_percent=90)], 1, keep_together=True)) == [0]


def test_a_pair_is_not_taken_out_of_a_quad_when_a_lone_pair_is_as_good() -> None:
    quad = dict.fromkeys(combinations(range(4), 2), 2)
    gpus = linked(quad | {(4, 5): 2}, 6)
    assert indices(choose(gpus, 2, keep_together=True)) == [4, 5]
    assert indices(choose(gpus, 2)) == [0, 1]


def test_without_nvlink_the_nearest_on_pcie_stay_together() -> None:
    def on_switch(index: int, near: int | None) -> Gpu:
        peers = tuple(
            Peer(gpu(two).uuid, 0, Proximity.ONE_SWITCH if two == near else Proximity.SYSTEM)
            for two in range(3)
            if two != index
        )
        return gpu(index, peers=peers)

    assert indices(choose([on_switch(0, 1), on_switch(1, 0), on_switch(2, None)], 1, keep_together=True)) == [2]


@given(linked_machines(), st.integers(1, 6), st.none() | st.integers(0, 250_000))
def test_what_is_kept_together_costs_no_link(gpus: list[Gpu], count: int, total_mb: int | None) -> None:
    """The set is as well linked as the best, and uses about as little; only then does what is left count."""
    plain, kind = choose(gpus, count, total_mb=total_mb), choose(gpus, count, total_mb=total_mb, keep_together=True)
    if plain is None or kind is None:
        assert plain is kind
        return
    assert worth(kind)[:5] == worth(plain)[:5]
    assert sum(each.used_mb for each in kind) < sum(each.used_mb for each in plain) + 512


@given(linked_machines(), st.integers(0, 4), st.booleans())
def test_links_that_the_caller_keeps_change_nothing(gpus: list[Gpu], count: int, keep_together: bool) -> None:
    some = gpus[::2]
    assert choose(some, count, keep_together=keep_together) == choose(
        some, count, keep_together=keep_together, links=links_between(gpus)
    )
