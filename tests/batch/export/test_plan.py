"""Jobs in order and together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.batch.export.jobs import job

from gpuherd.batch.export import in_order, placement_of, to_export
from gpuherd.engines.export import ExportGroup, Place
from gpuherd.engines.export import groups_of as groups
from gpuherd.engines.options import EngineOptions
from gpuherd.errors import UsageError
from gpuherd.jobs.job import Job

SLURM = EngineOptions(engine="slurm")


def groups_of(jobs: list[Job], most: int = 1000) -> tuple[ExportGroup, ...]:
    return groups(to_export(jobs, SLURM, "/"), most)


@st.composite
def plans(draw: st.DrawFn) -> list[Job]:
    jobs: list[Job] = []
    for number in range(draw(st.integers(1, 12))):
        earlier = [each.name for each in jobs]
        needs = draw(st.lists(st.sampled_from(earlier), max_size=3)) if earlier else []
        least = max((each.round for each in jobs if each.name in needs), default=0)
        jobs.append(
            job(
                f"j{number}",
                needs=tuple(needs),
                round=draw(st.integers(least, least + 2)),
                gpus=draw(st.integers(0, 2)),
                priority=draw(st.integers(-1, 1)),
            )
        )
    return draw(st.permutations(jobs))


@given(plans(), st.integers(1, 4))
def test_each_group_is_behind_all_that_it_needs_and_no_larger_than_it_may_be(jobs: list[Job], most: int) -> None:
    found = groups_of(jobs, most)
    where = {each.name: Place(g, i) for g, group in enumerate(found) for i, each in enumerate(group.jobs)}
    needs = {each.name: each.needs for each in jobs}
    assert sorted(where) == sorted(needs)
    assert len({group.name for group in found}) == len(found)
    rounds = sorted({each.round for each in jobs})
    for number, group in enumerate(found):
        assert 1 <= len(group.jobs) <= most
        assert {each.round for each in group.jobs} == {group.jobs[0].round}
        for each in group.jobs:
            assert {where[need] for need in needs[each.name]} == set(group.after)
        assert all(place.group < number for place in group.after)
        at = rounds.index(group.jobs[0].round)
        before = {n for n, other in enumerate(found) if at and other.jobs[0].round == rounds[at - 1]}
        assert set(group.behind) == before and all(n < number for n in before)


@given(plans())
def test_in_order_nothing_comes_before_what_it_needs_or_an_earlier_round(jobs: list[Job]) -> None:
    ordered = in_order(jobs)
    seen: set[str] = set()
    for each in ordered:
        assert set(each.needs) <= seen
        seen.add(each.name)
    assert [each.round for each in ordered] == sorted(each.round for each in jobs)


def test_of_what_could_come_next_priority_and_then_age_decides() -> None:
    jobs = [job("a"), job("b", priority=2), job("c", needs=("b",), priority=9), job("d")]
    assert [each.name for each in in_order(jobs)] == ["b", "c", "a", "d"]


def test_circles_are_refused() -> None:
    with pytest.raises(UsageError, match="circle"):
        groups_of([job("a", needs=("b",)), job("b", needs=("a",))])


def test_a_jobs_own_words_come_first() -> None:
    options = replace(SLURM, cpus_per_job=4, host_mem=1000, time_limit=3600.0)
    plain = placement_of(job("a", gpus=2), options)
    assert (plain.gpus, plain.cpus, plain.memory_mb, plain.time_s) == (2, 4, 1000, 3600.0)
    own = placement_of(job("a", cpus=8, host_memory_mb=5, nodes=2, timeout_s=60.0), options)
    assert (own.nodes, own.cpus, own.memory_mb, own.time_s) == (2, 8, 5, 3600.0)
    assert placement_of(job("a", timeout_s=60.0), SLURM).time_s == 120.0


def test_groups_are_named_for_people() -> None:
    names = [group.name for group in groups_of([job("train/a 1"), job("train/a 2"), job("é", gpus=1)])]
    assert names == ["01-train-a", "02"]
    # Where names have nothing in common the first stands for all: people look for it in squeue.
    assert [group.name for group in groups_of([job("lr"), job("seed")])] == ["01-lr"]
