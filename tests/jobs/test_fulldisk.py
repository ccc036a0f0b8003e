"""A full disk in SQLite's words, and what is taken back."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from gpuherd.errors import CannotWrite
from gpuherd.jobs import DispatchOptions, Job, Queue, RunDirectory, run_jobs
from gpuherd.jobs.attempts.failures import Diagnosis, FailureClass
from gpuherd.jobs.attempts.preempt import DiskGuard
from gpuherd.jobs.gpu.health import GpuHealth
from gpuherd.jobs.queue.schema import cannot_write, is_full
from gpuherd.jobs.scheduler.memory import FamilyMemory


def error(code: int) -> sqlite3.OperationalError:
    problem = sqlite3.OperationalError("x")
    problem.sqlite_errorcode = code
    return problem


def test_both_words_for_it_are_known_and_others_are_not_taken_for_it() -> None:
    grow = 4874  # SQLITE_IOERR_SHMSIZE
    assert is_full(error(sqlite3.SQLITE_FULL)) and is_full(error(grow))
    assert not is_full(error(sqlite3.SQLITE_BUSY)) and not is_full(error(sqlite3.SQLITE_ERROR))
    assert "the disk is full (x); free some space and go on" in str(cannot_write(Path("q"), error(grow), "go on"))
    assert "full" not in str(cannot_write(Path("q"), error(sqlite3.SQLITE_BUSY), "go on"))


def test_a_transaction_that_sqlite_ended_by_itself_is_not_taken_for_done(tmp_path: Path) -> None:
    with Queue(tmp_path / "q.sqlite") as queue:
        with pytest.raises(sqlite3.OperationalError) as caught, queue.transaction():
            queue.learn("f", 5)
            queue._db.execute("ROLLBACK")
        assert is_full(caught.value)
        assert queue.families(["f"]) == {}
        queue.learn("f", 5)
        assert queue.families(["f"]) == {"f": FamilyMemory(peak_mb=5)}


def test_what_is_held_against_a_gpu_goes_with_its_transaction(tmp_path: Path) -> None:
    fault = Diagnosis(FailureClass.GPU_FAULT, "Xid 79", retry=True, elsewhere=True)
    job = Job(name="j", argv=("true",))
    with Queue(tmp_path / "q.sqlite") as queue:
        book = GpuHealth(queue)
        for _ in range(3):
            with pytest.raises(RuntimeError), book.unless_taken_back(), queue.transaction():
                book.failed(["GPU-a"], job, fault, now=100.0, machine=["GPU-a"], in_use=bool)
                raise RuntimeError
        assert book.excluded(101.0) == {} == GpuHealth(queue).excluded(101.0)
        with book.unless_taken_back(), queue.transaction():
            book.failed(["GPU-a"], job, fault, now=100.0, machine=["GPU-a"], in_use=bool)
        # Once, and not for the fourth time: 10 minutes.
        assert set(book.returns(101.0).values()) == {700.0} == set(GpuHealth(queue).returns(101.0).values())


def test_another_limit_for_the_disk_holds_from_the_next_look(tmp_path: Path) -> None:
    guard = DiskGuard((tmp_path,), 0)
    assert (guard.look(1.0), guard.due_at) == (False, None)
    guard.change(10**9)
    assert guard.due_at == 0.0
    assert [guard.look(at) for at in (2.0, 3.0)] == [True, False]
    assert "must be free (--min-disk)" in str(guard.low)
    guard.change(0)
    assert guard.look(4.0)
    assert str(guard.low) == str(guard.due_at) == "None"


def test_a_queue_that_may_not_grow_refuses_what_is_submitted_and_holds_nothing_of_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    with Queue(run.queue) as queue:
        queue.add([Job(name="old", argv=("true",), gpus=0)])
        limit = queue._db.execute("PRAGMA page_count").fetchone()[0] + 2
        queue._db.execute(f"PRAGMA max_page_count = {limit}")
        many = [Job(name=f"j{i}", argv=("true", "x" * 500), gpus=0) for i in range(500)]
        with pytest.raises(sqlite3.OperationalError) as caught:
            queue.add(many)
        assert is_full(caught.value)
        assert set(queue.states()) == {"old"}
    assert run_jobs([Job(name="old", argv=("true",), gpus=0)], DispatchOptions(), run).done == 1


def test_an_error_that_a_user_can_act_on() -> None:
    assert isinstance(cannot_write(Path("q"), error(sqlite3.SQLITE_FULL), "go on"), CannotWrite)
