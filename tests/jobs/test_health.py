"""What is held against GPUs, in the queue's file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuherd.jobs.failures import Diagnosis, FailureClass
from gpuherd.jobs.health import HealthBook
from gpuherd.jobs.queue import Queue

FAULT = Diagnosis(FailureClass.GPU_FAULT, "Xid 79", retry=True, elsewhere=True)
AHEAD_S = 30_000.0  # the clock was set back by so much


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "queue.sqlite") as made:
        yield made


def fault(book: HealthBook, at: float) -> None:
    book.failed(["GPU-a"], "j", FAULT, now=at, machine=["GPU-a"])


def test_after_the_clock_was_set_back_a_success_still_clears_a_gpu(queue: Queue) -> None:
    book = HealthBook(queue)
    fault(book, time.time() + AHEAD_S)
    assert book.excluded(time.time())
    # Of a job that was at work when it was set back: nothing says that it came after the failure.
    book.succeeded(["GPU-a"], started_at=time.time() - 1.0)
    assert book.excluded(time.time())
    book.succeeded(["GPU-a"], started_at=time.time())
    assert not book.excluded(time.time())
    assert not HealthBook(queue).excluded(time.time())


def test_a_success_that_was_started_before_the_failure_clears_nothing(queue: Queue) -> None:
    book = HealthBook(queue)
    fault(book, time.time() - 5.0)
    book.succeeded(["GPU-a"], started_at=time.time() - 10.0)
    assert book.excluded(time.time())
    book.succeeded(["GPU-a"], started_at=time.time() - 1.0)
    assert not book.excluded(time.time())


def test_a_book_that_is_no_good_is_forgotten_and_the_rest_of_it_kept(queue: Queue) -> None:
    fault(HealthBook(queue), time.time())
    queue.save_gpu_health({"GPU-b": "[]", "GPU-c": "no JSON"})
    assert HealthBook(queue).excluded(time.time()).keys() == {"GPU-a"}
