"""What is held against GPUs, in the queue's file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuherd.jobs.attempts.failures import Diagnosis, FailureClass
from gpuherd.jobs.gpu.health import GpuHealth
from gpuherd.jobs.job import Job
from gpuherd.jobs.queue.store import Queue

FAULT = Diagnosis(FailureClass.GPU_FAULT, "Xid 79", retry=True, elsewhere=True)
JOB = Job(name="j", argv=("true",))
AHEAD_S = 30_000.0  # the clock was set back by so much


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "queue.sqlite") as made:
        yield made


def fault(book: GpuHealth, at: float) -> None:
    book.failed(["GPU-a"], JOB, FAULT, now=at, machine=["GPU-a"], in_use=lambda _: True)


def success(book: GpuHealth, started_at: float) -> None:
    book.succeeded(["GPU-a"], JOB, started_at=started_at, now=time.time())


def test_after_the_clock_was_set_back_a_success_still_clears_a_gpu(queue: Queue) -> None:
    book = GpuHealth(queue)
    fault(book, time.time() + AHEAD_S)
    assert book.excluded(time.time())
    # Of a job that was at work when it was set back: nothing says that it came after the failure.
    success(book, started_at=time.time() - 1.0)
    assert book.excluded(time.time())
    success(book, started_at=time.time())
    assert not book.excluded(time.time())
    assert not GpuHealth(queue).excluded(time.time())


def test_a_success_that_was_started_before_the_failure_clears_nothing(queue: Queue) -> None:
    book = GpuHealth(queue)
    fault(book, time.time() - 5.0)
    success(book, started_at=time.time() - 10.0)
    assert book.excluded(time.time())
    success(book, started_at=time.time() - 1.0)
    assert not book.excluded(time.time())


def test_a_book_that_is_no_good_is_forgotten_and_the_rest_of_it_kept(queue: Queue) -> None:
    fault(GpuHealth(queue), time.time())
    queue.save_gpu_health({"GPU-b": "[]", "GPU-c": "no JSON"})
    assert GpuHealth(queue).excluded(time.time()).keys() == {"GPU-a"}


def test_what_is_left_out_is_news_once_and_again_when_it_is_left_out_anew(queue: Queue) -> None:
    book = GpuHealth(queue)
    now = time.time()
    assert book.fetch_news(now) == {}
    fault(book, now)
    assert "left out for 10 min more: GPU fault" in book.fetch_news(now)["GPU-a"]
    assert book.fetch_news(now) == {}
    fault(book, now + 1000.0)
    assert "left out for 20 min more" in book.fetch_news(now + 1000.0)["GPU-a"]


def test_the_return_of_what_was_told_of_is_news_once(queue: Queue) -> None:
    book = GpuHealth(queue)
    now = time.time()
    fault(book, now)
    assert book.fetch_returned(now) == {}
    book.fetch_news(now)
    assert book.fetch_returned(now + 599.0) == {} and book.fetch_news(now + 700.0) == {}
    assert book.fetch_returned(now + 700.0) == {"GPU-a": "used again: the time is over"}
    assert book.fetch_returned(now + 700.0) == {}
    fault(book, now)
    book.fetch_news(now)
    success(book, started_at=now + 1.0)
    assert book.fetch_returned(now + 1.0) == {"GPU-a": "used again: a job has succeeded on it"}


def test_crashes_are_kept_over_a_restart_and_successes_that_clear_them(queue: Queue) -> None:
    crash = Diagnosis(FailureClass.CRASH, "ValueError: x", retry=True, elsewhere=True)
    for number in range(3):
        job = Job(name=f"j{number}", argv=("true",))
        book = GpuHealth(queue)
        book.failed(["a"], job, crash, now=time.time(), machine=["a", "b"], in_use=lambda _: True)
    assert GpuHealth(queue).excluded(time.time()).keys() == {"a"}
    later = time.time() + 100.0
    assert GpuHealth(queue).is_on_trial(["a"], later)
    GpuHealth(queue).succeeded(["a"], JOB, started_at=later, now=later)
    assert not GpuHealth(queue).is_on_trial(["a"], later)
