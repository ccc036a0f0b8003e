"""A parcel in a worker process of Ray: leads the attempt there, and stops when it has to.

Ray wakes a task that is cancelled only if it runs Python at the time: it sets a flag in the interpreter and sends no
signal, so that a task which waits in the kernel sleeps on. The descriptor of ``signal.set_wakeup_fd`` does become
readable; a thread reads it, and keeps the parcel's time limit.

The worker lives on after the task and takes the next one: all changes made here are undone. Imported by Ray's workers,
so it imports little.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from gpuherd.engines.world import NodeFailure, Others, Stop, World

if TYPE_CHECKING:
    from gpuherd.engines.ray.tasks import TaskGroup

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BREAKPOINT = "PYTHONBREAKPOINT"


def work(
    lead: Callable[..., int],
    manifest: str,
    index: int,
    handle: str,
    turn_s: float | None,
    span: TaskGroup | None = None,
) -> Iterator[str | tuple[int, bool]]:
    """The task: yields the node's name as soon as it runs, and when the attempt has ended its leader's exit code and
    whether its time was up.

    ``span``: the group of an attempt over several nodes, whose first this is.
    """
    yield os.uname().nodename
    began = time.monotonic()
    others: Others | None = None
    if span is not None:
        from gpuherd.engines.ray.tasks import Companions

        others = Companions(span, manifest, index, handle)
    with stop_requests(turn_s) as stop:
        code = lead(manifest, index, stop, handle=handle, others=others)
    yield int(code), turn_s is not None and time.monotonic() >= began + turn_s


def join_in(join: Callable[..., NodeFailure | None], manifest: str, index: int, world: World) -> NodeFailure | None:
    """The task on another node of an attempt over several."""
    with stop_requests(None) as stop:
        return join(manifest, index, world, stop)


def imports(lead: Callable[..., int]) -> str:
    """Shows that this worker can import the leader: Ray has done so when this runs. Returns the node's name."""
    return os.uname().nodename if callable(lead) else ""


@contextmanager
def stop_requests(turn_s: float | None) -> Iterator[Stop]:
    """A ``Stop`` that is set when Ray cancels the task or ends the worker, or when its time is up.

    For the main thread. A SIGTERM is passed on to Ray's own handler afterwards.
    """
    terminated = False

    def note(number: int, _frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = terminated or number == signal.SIGTERM
        stop.ask()

    with Stop() as stop:
        read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before: dict[int, Any] = {number: signal.signal(number, note) for number in _SIGNALS}
        breakpoint_hook = os.environ.pop(_BREAKPOINT, None)  # Ray's debugger, not for the job
        # Ray blocks SIGINT in its workers, and a job would inherit that.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        fd_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        watch = threading.Thread(target=_watch, args=(read_end, stop, turn_s), daemon=True)
        watch.start()
        try:
            yield stop
        finally:
            signal.set_wakeup_fd(fd_before)
            os.write(write_end, b"\0")
            watch.join()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for number, handler in before.items():
                signal.signal(number, handler)
            if breakpoint_hook is not None:
                os.environ[_BREAKPOINT] = breakpoint_hook
            os.close(write_end)
            os.close(read_end)
    if terminated:
        signal.raise_signal(signal.SIGTERM)


def _watch(read_end: int, stop: Stop, turn_s: float | None) -> None:
    """Sets the stop on a signal's byte, or when the time is up; a zero byte ends the watch."""
    ready = select.poll()
    ready.register(read_end, select.POLLIN)
    wait_ms = None if turn_s is None else 1000 * turn_s
    while True:
        if not ready.poll(wait_ms):
            stop.ask(time_up=True)
            wait_ms = None
            continue
        received = os.read(read_end, 64)
        if any(byte in received for byte in _SIGNALS):
            stop.ask()
        if 0 in received:
            return
