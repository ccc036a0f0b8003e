"""A query that runs in a thread of its own."""

from __future__ import annotations

import threading

import pytest

from gpuherd.jobs.remote.tracker import in_background


def test_the_answer_comes_once_and_wakes_who_waits() -> None:
    may_answer, has_come = threading.Event(), threading.Event()
    answer = in_background(lambda: 7 if may_answer.wait(60) else 0, has_come.set)
    assert not answer.done() and not has_come.is_set()
    may_answer.set()
    assert has_come.wait(60) and answer.done() and answer.result() == 7


def test_what_is_raised_there_is_raised_here() -> None:
    has_come = threading.Event()
    answer = in_background(lambda: 1 // 0, has_come.set)
    assert has_come.wait(60)
    with pytest.raises(ZeroDivisionError):
        answer.result()
