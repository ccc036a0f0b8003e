"""A task in a worker of Ray is asked to stop in whatever way Ray does it, and leaves the worker as it was."""

from __future__ import annotations

import _thread
import os
import select
import signal
import threading
from collections.abc import Iterator

import pytest

from gpuherd.engines.ray.worker import join_in, stop_requests, work
from gpuherd.engines.world import NodeFailure, Stop, World


def sleeps_until(stop: Stop) -> bool:
    """Waits in the kernel, as a leader does. Whether it was woken."""
    poll = select.poll()
    poll.register(stop.fileno(), select.POLLIN)
    return bool(poll.poll(30_000))


@pytest.fixture
def terminations() -> Iterator[list[int]]:
    """SIGTERMs that came to the handler that was there before, as Ray has one."""
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    yield told
    signal.signal(signal.SIGTERM, before)


def test_rays_cancel_wakes_a_leader_that_waits_in_the_kernel() -> None:
    with stop_requests(None) as stop:
        # So Ray does it, from another thread: no signal is sent.
        threading.Timer(0.2, _thread.interrupt_main).start()
        assert sleeps_until(stop)
    assert stop.asked


def test_a_sigterm_asks_first_and_then_goes_on_to_who_was_there(terminations: list[int]) -> None:
    with stop_requests(None) as stop:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert sleeps_until(stop)
        assert terminations == []
    assert terminations == [signal.SIGTERM]


def test_a_turn_that_is_up_asks(terminations: list[int]) -> None:
    with stop_requests(0.1) as stop:
        assert sleeps_until(stop)
    assert terminations == []


def test_nobody_asks_and_nothing_is_asked() -> None:
    with stop_requests(30.0) as stop:
        assert not stop.asked
    assert not stop.asked


def test_the_worker_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace")
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as in a worker of Ray
    try:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        with stop_requests(5.0):
            assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
            assert "PYTHONBREAKPOINT" not in os.environ
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        assert os.environ["PYTHONBREAKPOINT"] == "ray.util.rpdb.set_trace"
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def test_a_task_tells_its_node_at_once_and_then_its_leaders_exit_code() -> None:
    def lead(manifest: str, index: int, stop: Stop, *, handle: str, others: object) -> int:
        assert (manifest, index, handle, others, stop.asked) == ("m", 3, "b-3", None, False)
        return 7

    task = work(lead, "m", 3, "b-3", None)
    assert next(task) == os.uname().nodename
    assert next(task) == (7, False)
    assert next(task, None) is None


def test_another_nodes_task_answers_with_its_failure() -> None:
    world = World(1, 2, "10.0.0.1", 20_000)
    failure = NodeFailure(1, "n2", 7)
    assert join_in(lambda manifest, index, where, stop: failure if where == world else None, "m", 0, world) == failure
