"""Jobs that an engine has before what they need has succeeded, in the queue's rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.jobs.attempts import attempt_of, settled

from gpuherd.engines.registry import LOCAL
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.queue.store import ImpossibleTransition, Overtaken, Queue
from gpuherd.jobs.records import AttemptState, Begun, Handed, StartRecord

NOW = 1_000.0


class Book:
    """A queue whose jobs are handed to an engine without one."""

    def __init__(self, path: Path):
        self.queue = Queue(path)
        self.run = 0
        self.number = 0

    def add(self, *names: str, **needs: tuple[str, ...]) -> None:
        jobs = [Job(name=name, argv=("true",)) for name in names]
        self.queue.add([*jobs, *(Job(name=name, argv=("true",), needs=need) for name, need in needs.items())])
        self.run = self.queue.begin_run(NOW, 1.0, "slurm")

    def hand_over(self, name: str, engine: str = "slurm", *, heard: bool = True) -> int:
        self.number += 1
        found = self.queue.job(name)
        assert found is not None
        handed = None if engine == LOCAL else Handed(engine, f"batch{self.number}", 0)
        process = attempt_of(found[0], 1).process if engine == LOCAL else None
        record = attempt_of(found[0], self.number, handed=handed, process=process, started_at=NOW)
        self.queue.record_starts([StartRecord(record, 0.0, None)], self.run)
        if heard and engine != LOCAL:
            self.queue.record_handles({self.number: f"h{self.number}"})
        return self.number

    def end(self, attempt: int, job_state: JobState, at: float = NOW + 10) -> tuple[str, ...]:
        state = {JobState.DONE: AttemptState.DONE, JobState.WAITING: AttemptState.REQUEUED}.get(
            job_state, AttemptState.FAILED
        )
        return self.queue.record_ends([settled(attempt, state, job_state, at)])[0]

    def following(self) -> dict[str, tuple[str, ...]]:
        return {
            queued.job.name: tuple(each.handle for each in after)
            for queued, after in self.queue.following("slurm", 99, NOW)
        }

    def head(self) -> list[str]:
        return [queued.job.name for queued in self.queue.head(99, NOW)]


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    made = Book(tmp_path / "queue.sqlite")
    yield made
    made.queue.close()


def test_only_what_the_engine_has_can_be_followed(book: Book) -> None:
    book.add("a", "x", b=("a",), c=("a", "x"), d=("b",))
    assert book.following() == {}
    book.hand_over("a", heard=False)
    assert book.following() == {}
    book.queue.record_handles({1: "h1"})
    assert book.following() == {"b": ("h1",)}
    book.hand_over("x")
    assert book.following() == {"b": ("h1",), "c": ("h1", "h2")}
    book.hand_over("b")
    assert book.following() == {"c": ("h1", "h2"), "d": ("h3",)}
    assert book.queue.following("ray", 99, NOW) == ()
    book.queue.pause(["c"], "me", 1.0)
    book.queue.cancel(["b"], "me")
    assert book.following() == {}
    with pytest.raises(Overtaken):
        book.hand_over("d")


def test_what_has_succeeded_is_followed_no_more(book: Book) -> None:
    book.add("a", "x", c=("a", "x"))
    book.end(book.hand_over("a"), JobState.DONE)
    book.hand_over("x")
    assert book.following() == {"c": ("h2",)}


def test_nobody_follows_on_this_machine(book: Book) -> None:
    book.add("a", b=("a",))
    book.hand_over("a", LOCAL)
    assert book.following() == {}
    for engine in (LOCAL, "slurm"):
        with pytest.raises(Overtaken):
            book.hand_over("b", engine)
    with pytest.raises(ImpossibleTransition):
        book.hand_over("a")


@pytest.mark.parametrize("heard_in_order", [True, False])
def test_a_follower_waits_for_nothing_else_from_the_success_on(book: Book, heard_in_order: bool) -> None:
    book.add("a", b=("a",))
    first, second = book.hand_over("a"), book.hand_over("b")
    begun = Begun(attempt=second, node="n1", gpus=("n1:0",), labels=("n1:0",), at=NOW + 60, mono=61.0)
    if not heard_in_order:
        book.queue.record_begun([begun])
    book.end(first, JobState.DONE, at=NOW + 50)
    assert book.queue.orphaned() == frozenset()
    if heard_in_order:
        book.queue.record_begun([begun])
    book.end(second, JobState.DONE, at=NOW + 70)
    (wait_s,) = [attempt.wait_s for attempt in book.queue.attempts() if attempt.job == "b"]
    assert wait_s == 10


def test_a_follower_may_end_before_what_it_followed_is_recorded(book: Book) -> None:
    book.add("a", b=("a",))
    first, second = book.hand_over("a"), book.hand_over("b")
    book.end(second, JobState.WAITING)
    assert book.head() == []  # it waits for a again
    book.end(first, JobState.DONE)
    assert book.head() == ["b"]


def test_followers_are_stranded_by_a_failure_and_by_another_try(book: Book) -> None:
    book.add("a", b=("a",), c=("b",))
    first, second, third = book.hand_over("a"), book.hand_over("b"), book.hand_over("c")
    assert book.queue.orphaned() == frozenset()
    book.end(first, JobState.WAITING)
    assert book.queue.orphaned() == {second}
    book.hand_over("a")
    assert book.queue.orphaned() == {second}  # it followed the first try
    book.end(second, JobState.WAITING)
    assert book.queue.orphaned() == {third}
    book.end(third, JobState.WAITING)
    assert book.following() == {"b": ("h4",)}


def test_what_needs_a_failure_is_cancelled_once_it_has_come_back(book: Book) -> None:
    book.add("a", b=("a",), c=("b",), d=("c",))
    first, second, third = book.hand_over("a"), book.hand_over("b"), book.hand_over("c")
    assert book.end(first, JobState.FAILED) == ("d",)
    assert book.queue.orphaned() == {second}
    book.end(second, JobState.WAITING)
    assert book.queue.cascade_failures() == (("a", JobState.FAILED, ("b",)),)
    assert book.queue.orphaned() == {third}
    book.end(third, JobState.WAITING)
    # The failure itself is named, and not the job between, which was cancelled for it.
    assert book.queue.cascade_failures() == (("a", JobState.FAILED, ("c",)),)
    assert book.queue.cascade_failures() == ()
    book.queue.retry(["a"], NOW)
    assert set(book.queue.states().values()) == {"waiting"}
    assert book.head() == ["a"]


def test_the_attempts_of_open_batches_are_found_in_their_order(book: Book) -> None:
    book.add("a", "b", "c")
    for place, name in enumerate(("a", "b")):
        found = book.queue.job(name)
        assert found is not None
        record = attempt_of(found[0], 10 - place, handed=Handed("slurm", "one", place), process=None)
        book.queue.record_starts([StartRecord(record, 0.0, None)], book.run)
    book.number = 20
    book.end(book.hand_over("c"), JobState.DONE)
    book.end(10, JobState.DONE)
    assert book.queue.open_batches() == {"one": (10, 9)}


def test_a_batch_is_needed_for_as_long_as_one_that_may_follow_it_is_out(book: Book) -> None:
    """Also when all of its own have ended: on their reports depends whether the other one may begin."""
    book.add("a", "x", b=("a",), c=("b",))
    first, alone = book.hand_over("a"), book.hand_over("x")
    second = book.hand_over("b")
    book.end(first, JobState.DONE)
    book.end(alone, JobState.DONE)
    assert book.queue.followed() == {f"batch{second}": {first}}
    assert book.queue.open_batches() == {f"batch{first}": (first,), f"batch{second}": (second,)}
    third = book.hand_over("c")
    book.end(second, JobState.WAITING)
    assert book.queue.followed() == {}  # it was no success
    assert book.queue.open_batches() == {f"batch{third}": (third,)}
