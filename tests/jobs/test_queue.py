"""The queue on a real file: submitting again, transitions, needs, files that are no good."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.jobs.attempts import attempt_of, settled

from gpuherd.errors import CannotOpenQueue, QueueBusy, QueueUnreadable, UsageError
from gpuherd.jobs.completion import NextTry
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.options import Order
from gpuherd.jobs.queue import schema
from gpuherd.jobs.queue.store import ImpossibleTransition, Queue
from gpuherd.jobs.records import AttemptRecord, AttemptState, Handed, PauseReason, ResourceRequest, StartRecord
from gpuherd.jobs.scheduler.memory import FamilyMemory
from gpuherd.jobs.scheduler.ordering import MOST_KINDS


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    made = Queue(tmp_path / "queue.sqlite")
    yield made
    made.close()


def job(name: str, *argv: str, **more: object) -> Job:
    return Job(name=name, argv=argv or ("true",), **more)  # type: ignore[arg-type]


@pytest.fixture
def start(queue: Queue) -> Callable[[str], AttemptRecord]:
    run = queue.begin_run(time.time(), 0.0)

    def begin(name: str) -> AttemptRecord:
        queued = next(q for q in queue.head(1000, time.time()) if q.job.name == name)
        number, now = queue.last_attempt() + 1, time.time()
        record = attempt_of(queued, number, gpus=("GPU-a",), labels=("0",), started_at=now, started_mono=5.0)
        queue.record_starts([StartRecord(record, 1.0, 4.0)], run)
        return record

    return begin


def end(
    queue: Queue,
    record: AttemptRecord,
    state: AttemptState,
    job_state: JobState,
    *,
    ended_at: float | None = None,
    not_before: float = 0.0,
    adapted: ResourceRequest | None = None,
    costs_try: bool = True,
    **more: Any,
) -> tuple[str, ...]:
    asks, again = adapted or record.queued.request, None
    if job_state is JobState.WAITING:
        again = NextTry(
            not_before=not_before,
            request=asks,
            avoid=frozenset(),
            costs_try=costs_try,
        )
    at = time.time() if ended_at is None else ended_at
    return queue.record_ends([settled(record, state, job_state, at, mono=7.0, again=again, **more)])[0]


def test_order_is_priority_then_age(queue: Queue) -> None:
    queue.submit([job("a"), job("b", priority=5), job("c"), job("d", priority=5), job("e", gpus=0)])
    assert [q.job.name for q in queue.head(10, time.time())] == ["b", "d", "a", "c", "e"]
    assert [q.job.name for q in queue.head(1, time.time())] == ["b", "e"]


def test_a_job_comes_back_as_it_went_in(queue: Queue) -> None:
    full = job(
        "n", "p", "é", "", gpus=2, memory_mb=3, priority=-1, retries=4, timeout_s=1.5,
        env={"A": "b"}, cwd="/", result="/r", title="t", identity="i",
    )  # fmt: skip
    queue.submit([full])
    assert queue.head(1, time.time())[0].job == full


def test_submitting_again(queue: Queue, start: Callable[[str], AttemptRecord], tmp_path: Path) -> None:
    result = tmp_path / "r"
    jobs = [job("done", result=str(result)), job("failed"), job("after", needs=("failed",)), job("waiting")]
    assert queue.submit(jobs).remarks == ()
    result.touch()
    end(queue, start("done"), AttemptState.DONE, JobState.DONE)
    end(queue, start("failed"), AttemptState.FAILED, JobState.FAILED, reason="why")
    queue.end_run(1, time.time())
    assert queue.submit(jobs).revived == ("failed",)
    assert queue.states() == {"done": "done", "failed": "waiting", "after": "waiting", "waiting": "waiting"}
    failed = next(q for q in queue.head(9, time.time()) if q.job.name == "failed")
    assert (failed.tries, failed.attempts) == (0, 1)  # fresh tries, but the log names go on
    result.unlink()
    queue.submit(jobs)
    assert queue.states()["done"] == "waiting"


def test_a_run_that_never_ended_is_continued_as_it_stood(queue: Queue, start: Callable[[str], AttemptRecord]) -> None:
    """What has failed or was cancelled or paused stays so, and tries go on being counted: nobody has said otherwise.
    A job that is another now, or that is asked for again, is a new one."""
    names = ("failed", "cancelled", "paused", "tried", "asked", "changed")
    jobs = [*(job(name, retries=2) for name in names), job("after", needs=("changed",)), job("lost", needs=("failed",))]
    queue.submit(jobs)
    for name in ("failed", "asked", "changed"):
        end(queue, start(name), AttemptState.FAILED, JobState.FAILED, reason="why")
    end(queue, start("tried"), AttemptState.FAILED, JobState.WAITING, not_before=9e9)
    queue.cancel(["cancelled"], "me")
    queue.pause(["paused"], "me", 1.0)
    queue.set_priority(["tried"], 7)
    assert queue.states()["after"] == queue.states()["lost"] == "cancelled"
    jobs[3], jobs[5] = job("tried", retries=2, priority=3), job("changed", "other words", retries=2)
    found = queue.submit([*jobs, job("new"), job("new after", needs=("cancelled",))], rerun=["asked"])
    assert found.kept == {"failed": ("failed",), "cancelled": ("cancelled",), "paused": ("paused",)}
    assert found.revived == ("asked", "changed")
    assert {name: str(state) for name, state in queue.states().items()} == {
        "failed": "failed",
        **dict.fromkeys(("cancelled", "lost", "new after"), "cancelled"),
        **dict.fromkeys(("paused", "tried", "asked", "changed", "after", "new"), "waiting"),
    }
    assert queue.held() == 1
    found_tried = queue.job("tried")
    assert found_tried is not None
    assert (found_tried[0].tries, found_tried[0].not_before, found_tried[0].job.priority) == (1, 9e9, 7)
    queue.end_run(1, time.time())
    assert queue.submit(jobs).revived == ("failed", "cancelled")
    assert queue.held() == 0 and queue.states()["lost"] == "waiting"


def test_a_run_that_has_left_jobs_to_an_engine_is_continued(
    queue: Queue, start: Callable[[str], AttemptRecord]
) -> None:
    """It has ended in order, and they go on there; else their tries would be counted anew with each start."""
    jobs = [job("a", retries=2), job("b")]
    queue.submit(jobs)
    end(queue, start("a"), AttemptState.FAILED, JobState.WAITING)
    found = queue.job("a")
    assert found is not None
    handed = attempt_of(found[0], 9, handed=Handed("slurm", "batch", 0), process=None)
    queue.record_starts([StartRecord(handed, 0.0, None)], 1)
    queue.cancel(["b"], "me")
    queue.end_run(1, time.time())
    assert queue.submit(jobs).kept == {"cancelled": ("b",)}
    assert queue.running()[0].queued.tries == 1


def test_a_done_job_runs_again_when_asked_or_changed(queue: Queue, start: Callable[[str], AttemptRecord]) -> None:
    queue.submit([job("a", "x")])
    end(queue, start("a"), AttemptState.DONE, JobState.DONE)
    queue.submit([job("a", "x", priority=3)])  # another place in the line is no other work
    assert queue.states() == {"a": JobState.DONE}
    queue.submit([job("a", "x")], rerun={"a"})
    assert queue.states() == {"a": JobState.WAITING}
    end(queue, start("a"), AttemptState.DONE, JobState.DONE)
    queue.submit([job("a", "y")])
    assert queue.head(1, time.time())[0].job.argv == ("y",)


def test_identity_decides_where_a_job_has_one(queue: Queue, start: Callable[[str], AttemptRecord]) -> None:
    queue.submit([job("a", "x", identity="figures")])
    end(queue, start("a"), AttemptState.DONE, JobState.DONE)
    queue.submit([job("a", "x", "--faster", identity="figures")])
    assert queue.states() == {"a": JobState.DONE}
    queue.submit([job("a", "x", "--faster", identity="other figures")])
    assert queue.states() == {"a": JobState.WAITING}


def test_a_relative_result_is_found_from_anywhere(
    queue: Queue, start: Callable[[str], AttemptRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "r").touch()
    queue.submit([job("a", result="r", cwd=str(tmp_path / "here"))])
    monkeypatch.chdir(tmp_path / "here")
    queue.submit([job("a", result="r", cwd=str(tmp_path / "here")), job("b", result="r")])
    assert {q.job.result for q in queue.head(9, time.time())} == {str(tmp_path / "here" / "r")}
    end(queue, start("b"), AttemptState.DONE, JobState.DONE)
    monkeypatch.chdir(tmp_path)
    queue.submit([job("b", result="here/r")])
    assert queue.states()["b"] is JobState.DONE


def test_a_running_job_keeps_its_command(queue: Queue, start: Callable[[str], AttemptRecord]) -> None:
    queue.submit([job("a", "x")])
    start("a")
    queue.submit([job("a", "y")])
    assert queue.running()[0].queued.job.argv == ("x",)


def test_a_running_job_of_a_folder_that_was_moved_is_tried_again_by_the_new_command(
    queue: Queue, start: Callable[[str], AttemptRecord], tmp_path: Path
) -> None:
    """Its dispatcher was killed; its processes are gone, or leave their result where the folder was."""
    before, after = (job("a", name, result=f"{tmp_path}/{name}/result") for name in ("x", "y"))
    queue.submit([before])
    begun = start("a")
    queue.submit([after])
    assert queue.states()["a"] is JobState.RUNNING and queue.running()[0].queued.job == after
    end(queue, begun, AttemptState.FAILED, JobState.WAITING)
    assert [(each.job, each.tries) for each in queue.head(1, time.time())] == [(after, 1)]


def test_what_is_no_longer_listed_is_cancelled_and_can_come_back(queue: Queue) -> None:
    queue.submit([job("a"), job("b")])
    queue.submit([job("b")])
    assert queue.states() == {"a": JobState.CANCELLED, "b": JobState.WAITING}
    assert queue.counts().total == 1
    queue.submit([job("a"), job("b")])
    assert queue.counts().waiting == 2


def test_needs(queue: Queue, start: Callable[[str], AttemptRecord]) -> None:
    chain = [job("c", needs=("b",)), job("b", needs=("a",)), job("a"), job("x", needs=("a", "c"))]
    queue.submit(chain)
    assert [q.job.name for q in queue.head(9, time.time())] == ["a"]
    end(queue, start("a"), AttemptState.DONE, JobState.DONE)
    assert [q.job.name for q in queue.head(9, time.time())] == ["b"]
    assert set(end(queue, start("b"), AttemptState.FAILED, JobState.FAILED)) == {"c", "x"}
    assert queue.states() == {"a": "done", "b": "failed", "c": "cancelled", "x": "cancelled"}
    queue.end_run(1, time.time())
    queue.submit(chain)
    assert [q.job.name for q in queue.head(9, time.time())] == ["b"]
    end(queue, start("b"), AttemptState.DONE, JobState.DONE)
    end(queue, start("c"), AttemptState.DONE, JobState.DONE)
    end(queue, start("x"), AttemptState.DONE, JobState.DONE)
    assert queue.counts().done == 4


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([job("a"), job("a")], "two jobs are named 'a'"),
        ([job("a", needs=("b",))], "needs 'b', and there is no such job"),
        ([job("a", needs=("a",))], "circle: 'a' needs 'a'"),
        (
            [job("x"), job("a", needs=("b",)), job("b", needs=("c",)), job("c", needs=("a",))],
            "'a' needs 'b' needs 'c' needs 'a'",
        ),
    ],
)
def test_bad_needs_change_nothing(queue: Queue, jobs: list[Job], message: str) -> None:
    queue.submit([job("kept")])
    with pytest.raises(UsageError, match=message):
        queue.submit(jobs)
    assert queue.states() == {"kept": JobState.WAITING}


def test_a_chain_of_ten_thousand_needs_is_no_problem(queue: Queue) -> None:
    names = [f"j{i}" for i in range(10_000)]
    queue.submit(
        [job(name, needs=(before,) if before else ()) for before, name in zip(["", *names], names, strict=False)]
    )
    assert [q.job.name for q in queue.head(9, time.time())] == ["j0"]


def test_impossible_transitions_are_refused(queue: Queue, start: Callable[[str], AttemptRecord]) -> None:
    queue.submit([job("a"), job("b")])
    record = start("a")
    with pytest.raises(ImpossibleTransition):
        queue.record_starts([StartRecord(record, 0, None)], 1)  # it runs already
    end(queue, record, AttemptState.DONE, JobState.DONE)
    before = (queue.states(), list(queue.attempts()))
    with pytest.raises(ImpossibleTransition):
        end(queue, record, AttemptState.FAILED, JobState.WAITING)  # it has ended already
    with pytest.raises(ImpossibleTransition):
        queue.fail_waiting(record.queued.id, "x")
    assert (queue.states(), list(queue.attempts())) == before


def test_back_off_hides_a_job_and_a_clock_set_back_does_not_for_ever(
    queue: Queue, start: Callable[[str], AttemptRecord]
) -> None:
    queue.submit([job("a")])
    now = time.time()
    end(queue, start("a"), AttemptState.FAILED, JobState.WAITING, not_before=now + 50)
    assert queue.head(1, now) == ()
    assert queue.next_not_before(now) == pytest.approx(now + 50)
    assert queue.head(1, now + 51)[0].tries == 1
    a_year_back = now - 365 * 86_400
    assert queue.head(1, a_year_back)[0].job.name == "a"
    assert queue.next_not_before(a_year_back) is None


def test_a_foreign_a_newer_and_a_damaged_file_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t (x)")
    db.close()
    newer = tmp_path / "newer.sqlite"
    Queue(newer).close()
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    junk = tmp_path / "junk.sqlite"
    junk.write_bytes(b"this is no database at all" * 100)
    torn = tmp_path / "torn.sqlite"
    whole = Queue(torn)
    whole.submit([job(f"j{i}") for i in range(2000)])
    whole.close()
    torn.write_bytes(torn.read_bytes()[:-50_000])
    for path, message in [(other, "no gpuherd queue"), (newer, "newer gpuherd"), (junk, "damaged"), (torn, "damaged")]:
        before = path.read_bytes()
        with pytest.raises(QueueUnreadable, match=message):
            Queue(path)
        assert path.read_bytes() == before


def test_two_openers_make_one_queue(tmp_path: Path) -> None:
    code = "import sys; from gpuherd.jobs.queue.store import Queue; q = Queue(sys.argv[1]); print(q.tag)"
    path = str(tmp_path / "q.sqlite")
    children = [
        subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert len({child.communicate()[0] for child in children}) == 1


def test_a_copied_queue_knows_that_it_is_one(queue: Queue, tmp_path: Path) -> None:
    queue.begin_run(time.time(), 0.0)
    assert not Queue(queue.path).copied
    copy = tmp_path / "copy.sqlite"
    with sqlite3.connect(copy) as target, sqlite3.connect(queue.path) as source:
        source.backup(target)
    target.close()
    source.close()
    opened = Queue(copy)
    assert opened.copied
    assert opened.tag != queue.tag
    opened.close()


def test_one_dispatcher_a_queue(tmp_path: Path) -> None:
    lock = DispatcherLock(tmp_path / "lock")
    with pytest.raises(QueueBusy, match=f"pid {os.getpid()}"):
        DispatcherLock(tmp_path / "lock")
    lock.close()
    DispatcherLock(tmp_path / "lock").close()


def test_a_hundred_thousand_jobs(queue: Queue, start: Callable[[str], AttemptRecord]) -> None:
    began = time.process_time()
    queue.submit([job(f"j{i}", priority=i % 7) for i in range(100_000)])
    assert time.process_time() - began < 30
    queue.head(20, time.time())
    best = min(_timed(lambda: queue.head(20, time.time())) for _ in range(5))
    assert best < 0.03
    assert min(_timed(queue.counts) for _ in range(5)) < 0.3


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def test_a_queue_that_can_not_be_opened_is_not_called_damaged(tmp_path: Path) -> None:
    lock = sqlite3.connect(tmp_path / "locked.sqlite", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    with patch.object(schema, "_LOCK_WITHIN_S", 0.1), pytest.raises(CannotOpenQueue, match="database is locked"):
        Queue(tmp_path / "locked.sqlite")
    lock.close()


def test_a_full_disk_is_told_as_such_and_takes_the_whole_transaction_back(queue: Queue) -> None:
    queue.submit([job("a")])
    pages = queue._db.execute("PRAGMA page_count").fetchone()[0]
    queue._db.execute(f"PRAGMA max_page_count = {pages}")  # the file can't grow: SQLITE_FULL, as on a full disk
    with pytest.raises(sqlite3.OperationalError, match="full"):
        queue.submit([job(f"b{i}", "x" * 1000) for i in range(100)])
    queue._db.execute(f"PRAGMA max_page_count = {pages + 1000}")
    assert queue.states() == {"a": JobState.WAITING}
    queue.submit([job("a"), job("b")])


def test_what_is_due_is_found_by_indexes_however_long_the_queue(queue: Queue) -> None:
    plan = queue._db.execute(
        "EXPLAIN QUERY PLAN SELECT min(not_before) FROM jobs WHERE state = 'waiting' AND blocked = 0"
        " AND held = 0 AND not_before > 5 AND not_before <= 9"
    ).fetchall()
    assert "jobs_later" in plan[0]["detail"]


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match="no UTF-8 text"):
        job("n\udcff")


def test_only_a_failure_costs_a_try(queue: Queue, start: Callable[[str], AttemptRecord]) -> None:
    queue.submit([job("a")])
    end(queue, start("a"), AttemptState.REQUEUED, JobState.WAITING)
    assert [(q.tries, q.attempts) for q in queue.head(1, time.time())] == [(0, 1)]
    end(queue, start("a"), AttemptState.FAILED, JobState.WAITING)
    assert [(q.tries, q.attempts) for q in queue.head(1, time.time())] == [(1, 2)]


def test_starting_the_command_again_leaves_a_running_job_a_try(
    queue: Queue, start: Callable[[str], AttemptRecord]
) -> None:
    """It may have been killed together with its dispatcher, and must not fail for that, however often it happens."""
    queue.submit([job("a", retries=2)])
    for _ in range(2):
        end(queue, start("a"), AttemptState.FAILED, JobState.WAITING)
    start("a")
    for _ in range(2):
        queue.submit([job("a", retries=2)])
        assert queue.running()[0].queued.tries == 1


# --- adding to a queue that is worked off ------------------------------------------------------------------------


def test_adding_leaves_all_else_alone(queue: Queue, start: Callable[[str], AttemptRecord]) -> None:
    queue.submit([job("a"), job("b")])
    start("a")
    queue.add([job("c", needs=("a", "b")), job("d", needs=("c",))])
    assert queue.states() == {"a": "running", "b": "waiting", "c": "waiting", "d": "waiting"}
    assert queue.counts().total == 4
    assert [q.job.name for q in queue.head(9, time.time())] == ["b"]


def test_what_is_added_after_its_need_has_failed_is_cancelled_with_the_reason(
    queue: Queue, start: Callable[[str], AttemptRecord]
) -> None:
    queue.add([job("a")])
    end(queue, start("a"), AttemptState.FAILED, JobState.FAILED)
    queue.add([job("b", needs=("a",)), job("c", needs=("b",))])
    assert queue.states() == {"a": "failed", "b": "cancelled", "c": "cancelled"}
    assert queue.retry((), time.time()).jobs == ("a", "b", "c")
    assert [q.job.name for q in queue.head(9, time.time())] == ["a"]


def test_bad_needs_of_added_jobs_change_nothing(queue: Queue) -> None:
    queue.add([job("a"), job("b", needs=("a",), round=3)])
    for jobs, message in [
        ([job("c", needs=("zz",))], "needs 'zz', and there is no such job"),
        ([job("c"), job("c")], "two jobs are named 'c'"),
        ([job("a", needs=("b",), round=3)], "would need itself"),
        ([job("c", needs=("b",), round=2)], "of round 2 needs 'b' of round 3"),
    ]:
        with pytest.raises(UsageError, match=message):
            queue.add(jobs)
        assert queue.states() == {"a": "waiting", "b": "waiting"}


def test_the_lowest_round_that_has_not_ended_goes_first(queue: Queue, start: Callable[[str], AttemptRecord]) -> None:
    queue.add([job("x", round=2), job("a", round=1), job("b", round=1, priority=-5), job("cpu", gpus=0, round=1)])
    assert [q.job.name for q in queue.head(9, time.time())] == ["a", "b", "cpu"]
    queue.cancel(("cpu",), "me")
    record = start("a")
    end(queue, start("b"), AttemptState.FAILED, JobState.FAILED)
    assert queue.head(9, time.time()) == ()  # one of the round still runs
    end(queue, record, AttemptState.DONE, JobState.DONE)
    assert [q.job.name for q in queue.head(9, time.time())] == ["x"]


def test_a_job_of_a_later_round_waits_only_since_its_round_is_open(
    queue: Queue, start: Callable[[str], AttemptRecord]
) -> None:
    queue.add([job("a"), job("b", round=3), job("c", round=5)])
    opened = time.time() + 1000.0
    end(queue, start("a"), AttemptState.DONE, JobState.DONE, ended_at=opened)
    assert [(q.job.name, q.ready_at) for q in queue.head(9, time.time())] == [("b", opened)]
    queue.add([job("late")])  # of an earlier round: that of b is closed again
    assert [q.job.name for q in queue.head(9, time.time())] == ["late"]
    end(queue, start("late"), AttemptState.DONE, JobState.DONE, ended_at=opened + 500.0)
    assert [(q.job.name, q.ready_at) for q in queue.head(9, time.time())] == [("b", opened + 500.0)]
    before = time.time()
    queue.cancel(("b",), "me")
    (c,) = queue.head(9, time.time())
    assert (c.job.name, c.ready_at >= before) == ("c", True)
    assert [q.ready_at for q in queue.first_of_kinds(1, time.time())] == [c.ready_at]


def test_longest_first_is_by_priority_then_cost_then_age(queue: Queue) -> None:
    queue.add([job("a", cost=1), job("b"), job("c", cost=9), job("d", cost=9), job("e", priority=1)])
    assert [q.job.name for q in queue.head(9, time.time(), "longest")] == ["e", "c", "d", "a", "b"]
    assert [q.job.name for q in queue.head(9, time.time())] == ["e", "a", "b", "c", "d"]


@pytest.mark.parametrize("order", ["age", "longest"])
def test_the_head_is_found_by_an_index_in_either_order(queue: Queue, order: Order) -> None:
    index = {"age": "jobs_by_age", "longest": "jobs_by_rank"}[order]
    seen: list[str] = []
    queue.add([job("a")])
    queue._db.set_trace_callback(seen.append)
    queue.head(5, time.time(), order)
    queue._db.set_trace_callback(None)
    plans = [queue._db.execute(f"EXPLAIN QUERY PLAN {each}").fetchall() for each in seen]
    details = [row["detail"] for plan in plans for row in plan]
    assert sum(index in detail for detail in details) == 2
    assert "jobs_unfinished" in details[0]
    assert not any("TEMP B-TREE" in detail or detail.startswith("SCAN jobs") for detail in details[1:])


@pytest.mark.parametrize("order", ["age", "longest"])
def test_the_first_of_each_kind_are_found_by_an_index_in_either_order(queue: Queue, order: Order) -> None:
    queue.add([job(f"wide{number}", gpus=4, cost=number) for number in range(20)])
    queue.add([job(f"fat{number}", memory_mb=80_000, cost=number) for number in range(20)])
    queue.add([job("cpu", gpus=0), job("thin", memory_mb=10_000), job("shared", memory_mb=3_000, share=True)])
    seen: list[str] = []
    queue._db.set_trace_callback(seen.append)
    found = [q.job.name for q in queue.first_of_kinds(2, time.time(), order)]
    queue._db.set_trace_callback(None)
    first = {"age": ["fat0", "fat1", "fat2", "wide0"], "longest": ["fat19", "fat18", "fat17", "wide19"]}[order]
    assert found == ["thin", *first[:3], "shared", first[3]]
    details = [row["detail"] for each in seen for row in queue._db.execute(f"EXPLAIN QUERY PLAN {each}")]
    assert not any("TEMP B-TREE" in detail or detail.startswith("SCAN jobs") for detail in details[1:])
    index = {"age": "jobs_of_kind ", "longest": "jobs_of_kind_by_rank "}[order]
    assert sum(index in detail and "share=?" in detail and "priority" not in detail for detail in details) >= 4


def test_however_many_kinds_there_are_few_are_looked_at(queue: Queue) -> None:
    queue.add([job(f"j{number}", memory_mb=1 + number) for number in range(3 * MOST_KINDS)])
    found = [q.memory_mb for q in queue.first_of_kinds(0, time.time())]
    assert found == list(range(1, MOST_KINDS + 1))  # those that fit most easily


# --- what people do ----------------------------------------------------------------------------------------------


def test_a_cancelled_job_takes_those_that_need_it_along_and_brings_them_back(queue: Queue) -> None:
    queue.add([job("a"), job("b", needs=("a",)), job("c", needs=("b",)), job("d")])
    changed = queue.cancel(("a",), "alice")
    assert (changed.jobs, changed.along) == (("a",), ("b", "c"))
    assert queue.retry(("c",), 1.0).refused == ("c needs b, which is cancelled: retry that one too",)
    back = queue.retry(("a",), 1.0)
    assert (back.jobs, back.along) == (("a",), ("b", "c"))
    assert [q.job.name for q in queue.head(9, time.time())] == ["a", "d"]


def test_what_a_person_cancelled_does_not_come_back_with_another(queue: Queue) -> None:
    queue.add([job("a"), job("b", needs=("a",)), job("c", needs=("a", "b"))])
    queue.cancel(("b",), "alice")
    queue.cancel(("a",), "alice")
    assert queue.retry(("a",), 1.0).along == ()
    assert queue.states() == {"a": "waiting", "b": "cancelled", "c": "cancelled"}


def test_a_held_job_is_no_part_of_the_head(queue: Queue) -> None:
    queue.add([job("a"), job("b")])
    assert queue.pause(("a",), "alice", 0.0).jobs == ("a",)
    assert [q.job.name for q in queue.head(9, time.time())] == ["b"]
    assert queue.held() == 1
    assert queue.resume((), 0.0, time.time()).jobs == ("a",)
    assert [q.job.name for q in queue.head(9, time.time())] == ["a", "b"]


def test_a_running_job_that_is_cancelled_carries_the_mark_until_it_ends(
    queue: Queue, start: Callable[[str], AttemptRecord]
) -> None:
    queue.add([job("a"), job("b", needs=("a",))])
    record = start("a")
    queue.cancel(("a",), "alice")
    assert queue.running()[0].queued.cancelled_by == "alice"
    gone = end(queue, record, AttemptState.REQUEUED, JobState.CANCELLED, reason="cancelled by alice")
    assert gone == ("b",)
    assert queue.states() == {"a": "cancelled", "b": "cancelled"}


def test_reasons_to_pause_a_running_job_add_up(queue: Queue, start: Callable[[str], AttemptRecord]) -> None:
    queue.add([job("a")])
    record = start("a")
    assert queue.mark_paused(record.id, PauseReason.DISK, 10.0)
    assert not queue.mark_paused(record.id, PauseReason.DISK, 11.0)
    queue.pause(("a",), "alice", 12.0)
    assert queue.mark_resumed(record.id, PauseReason.DISK, 13.0)
    (found,) = queue.running()
    assert (found.paused, found.paused_mono, found.paused_s) == (frozenset({PauseReason.USER}), 10.0, 0.0)
    queue.resume(("a",), 15.0, time.time())
    (found,) = queue.running()
    assert (found.paused, found.paused_mono, found.paused_s) == (frozenset(), None, 5.0)


def test_another_priority(queue: Queue) -> None:
    queue.add([job("a"), job("b")])
    queue.set_priority(("b",), 4)
    assert [(q.job.name, q.job.priority) for q in queue.head(9, time.time())] == [("b", 4), ("a", 0)]


# --- what is learned ---------------------------------------------------------------------------------------------


def test_a_retry_may_ask_for_more_and_a_fresh_start_asks_as_at_first(
    queue: Queue, start: Callable[[str], AttemptRecord]
) -> None:
    queue.submit([job("a", memory_mb=100, share=True)])
    more = ResourceRequest(1, 5000, False)
    end(queue, start("a"), AttemptState.FAILED, JobState.WAITING, adapted=more, costs_try=False)
    (found,) = queue.head(1, time.time())
    assert (found.request, found.tries) == (more, 0)
    queue.end_run(1, time.time())
    queue.submit([job("a", memory_mb=100, share=True)])
    assert queue.head(1, time.time())[0].request == ResourceRequest(1, 100, True)


def test_the_highest_peak_of_a_family_is_kept(queue: Queue) -> None:
    for peak in (300, 900, 500):
        queue.learn("llama", peak)
    assert queue.families(["llama", "other"]) == {"llama": FamilyMemory(peak_mb=900)}
    queue.save_gpu_health({"GPU-a": "{}"})
    assert queue.gpu_health() == {"GPU-a": "{}"}


def test_ends_that_come_together_are_recorded_together_or_not_at_all(
    queue: Queue, start: Callable[[str], AttemptRecord]
) -> None:
    queue.add([job("a"), job("b")])
    records = [start("a"), start("b")]
    ends = [settled(record, AttemptState.DONE, JobState.DONE, 1.0, mono=2.0) for record in records]
    with pytest.raises(ImpossibleTransition):
        queue.record_ends([*ends, ends[0]])
    assert set(queue.states().values()) == {"running"}
    assert queue.record_ends(ends) == ((), ())
    assert set(queue.states().values()) == {"done"}


def test_attempts_come_in_the_order_of_their_starts_whatever_their_numbers(queue: Queue) -> None:
    queue.submit([job("a"), job("b")])
    run = queue.begin_run(time.time(), 0.0)
    a, b = queue.head(9, time.time())
    for number, queued, mono in ((8, b, 5.0), (7, a, 6.0)):  # the shell for a stood by before that for b
        record = attempt_of(queued, number, started_at=time.time(), started_mono=mono)
        queue.record_starts([StartRecord(record, 0.0, None)], run)
    assert [row.job for row in queue.attempts()] == ["b", "a"]
