"""A question that is asked by a thread of its own."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from gpuherd.jobs.remote.tracker import BackgroundQuery


@pytest.fixture
def aside() -> Iterator[BackgroundQuery[int]]:
    with closing(BackgroundQuery[int]()) as made:
        yield made


def wait(aside: BackgroundQuery[int]) -> None:
    assert select.select([aside], [], [], 60)[0]
    aside.drain()


def test_the_answer_comes_once_and_wakes_who_waits(aside: BackgroundQuery[int]) -> None:
    may_answer = threading.Event()
    aside.begin(lambda: 7 if may_answer.wait(60) else 0)
    assert (aside.busy, aside.has_answer, aside.fetch()) == (True, False, None)
    may_answer.set()
    wait(aside)
    assert (aside.busy, aside.has_answer) == (True, True)
    answer = aside.fetch()
    assert answer is not None and answer.result() == 7
    assert (aside.busy, aside.fetch()) == (False, None)
    assert not select.select([aside], [], [], 0)[0]


def test_what_is_raised_there_is_raised_here(aside: BackgroundQuery[int]) -> None:
    aside.begin(lambda: 1 // 0)
    wait(aside)
    answer = aside.fetch()
    assert answer is not None
    with pytest.raises(ZeroDivisionError):
        answer.result()
    aside.begin(lambda: 3)  # and it can be asked again
    wait(aside)
    assert aside.has_answer


def test_one_question_at_a_time(aside: BackgroundQuery[int]) -> None:
    aside.begin(lambda: 1)
    with pytest.raises(ValueError, match="one question"):
        aside.begin(lambda: 2)
    wait(aside)
    with pytest.raises(ValueError, match="one question"):
        aside.begin(lambda: 2)  # the answer has not been fetched


def test_an_answer_that_comes_after_the_end_disturbs_nobody() -> None:
    may_answer, asked = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def ask() -> int:
        threads.append(threading.current_thread())
        asked.set()
        may_answer.wait(60)
        return 1

    aside = BackgroundQuery[int]()
    aside.begin(ask)
    asked.wait(60)
    aside.close()
    may_answer.set()
    threads[0].join(60)
    assert not threads[0].is_alive()
