"""What a retry brings back when jobs need each other, against an oracle that is slow and obviously right."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.jobs import Job, Queue

NUMBER = 7


def stuck_by_the_rule(wanted: set[int], needs: dict[int, set[int]], bad: set[int]) -> set[int]:
    """Takes off, again and again, who needs one that has ended badly and is not wanted (any more)."""
    left = set(wanted)
    while gone := {job for job in left if any(need in bad and need not in left for need in needs[job])}:
        left -= gone
    return wanted - left


@given(
    st.sets(st.tuples(st.integers(0, NUMBER - 1), st.integers(0, NUMBER - 1)).filter(lambda pair: pair[0] < pair[1])),
    st.lists(st.sampled_from(["done", "failed", "cancelled", "doomed"]), min_size=NUMBER, max_size=NUMBER),
    st.sets(st.integers(0, NUMBER - 1), min_size=1),
)
def test_retry_brings_back_all_that_can_run_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, pairs: set[tuple[int, int]], ends: list[str], asked: set[int]
) -> None:
    path = tmp_path_factory.mktemp("queue") / "queue.sqlite"
    needs = {job: {need for need, later in pairs if later == job} for job in range(NUMBER)}
    with Queue(path) as queue:
        queue.submit(
            [Job(name=f"j{i}", argv=("true",), needs=tuple(f"j{n}" for n in sorted(needs[i]))) for i in range(NUMBER)]
        )
        with closing(sqlite3.connect(path)) as db:
            for job, end in enumerate(ends):
                state = "cancelled" if end == "doomed" else end
                db.execute("UPDATE jobs SET state = ?, doomed = ? WHERE name = ?", (state, end == "doomed", f"j{job}"))
            db.commit()
        bad = {job for job, end in enumerate(ends) if end != "done"}
        wanted = asked & bad
        wanted -= stuck_by_the_rule(wanted, needs, bad)
        along: set[int] = set()
        while more := {
            job
            for job in range(NUMBER)
            if ends[job] == "doomed" and job not in wanted | along and needs[job] & (wanted | along)
        }:
            along |= more
        along -= stuck_by_the_rule(wanted | along, needs, bad)
        got = queue.retry(tuple(f"j{job}" for job in sorted(asked)), time.time())
    assert set(got.jobs) == {f"j{job}" for job in wanted}
    assert set(got.along) == {f"j{job}" for job in along}
    assert len(got.refused) == len(asked - wanted)


def test_a_long_chain_of_needs_is_looked_at_once(tmp_path: Path) -> None:
    """Its dispatcher stands still meanwhile."""
    with Queue(tmp_path / "queue.sqlite") as queue:
        jobs = [Job(name=f"j{i}", argv=("true",), needs=(f"j{i - 1}",) if i else ()) for i in range(4000)]
        queue.submit(jobs)
        queue.cancel(("j0",), "me")
        began = time.process_time()
        assert len(queue.retry(tuple(job.name for job in jobs[1:]), time.time()).refused) == 3999
        assert time.process_time() - began < 5  # it took 45 s when every link was a new beginning
