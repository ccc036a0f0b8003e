"""The same model on every GPU, each with its part of the inputs: the default for what fits on one.

Layers on several GPUs are computed one after the other, so that a model that fits on one is faster as several copies.
Which inputs a replica takes, and which GPUs it sees, is pure; ``run_replicas`` starts a process for each and ends them
together. Without torch.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from gpuherd.errors import ExitCode, UsageError
from gpuherd.gpus.visible import narrowed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

REPLICA_VARIABLE = "GPUHERD_REPLICA"
GRACE_S = 10.0
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Replica:
    """One of several processes that do the same with different inputs: its number, from 0, and of how many."""

    number: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.of:
            raise UsageError(f"replica {self.number} of {self.of}: numbers go from 0 to one below how many there are")

    def shard(self, inputs: int) -> range:
        """Which of so many inputs, by number, this replica takes: every ``of``-th one.

        The parts of all replicas are all inputs, each once, and differ by one in number at most. Of inputs that are
        sorted by length, as batches want them, each gets as many long ones.

        >>> [list(Replica(number, 3).shard(7)) for number in range(3)]
        [[0, 3, 6], [1, 4], [2, 5]]
        """
        if inputs < 0:
            raise UsageError(f"{inputs} inputs; the least is 0")
        return range(self.number, inputs, self.of)


def this_replica(environment: Mapping[str, str]) -> Replica:
    """The replica that a process with this environment is; the only one where nothing says so.

    Raises UsageError for a variable that was set by hand to an impossible value.
    """
    word = environment.get(REPLICA_VARIABLE)
    if word is None:
        return Replica()
    number, _, of = word.partition("/")
    if not (number.isascii() and number.isdigit() and of.isascii() and of.isdigit()):
        raise UsageError(f"{REPLICA_VARIABLE}={word!r}: it is set by gpuherd, to 0/4, 1/4, ...")
    return Replica(int(number), int(of))


def groups_of(gpus: Sequence[str], each: int) -> tuple[tuple[str, ...], ...]:
    """So many GPUs for each replica, neighbours together; GPUs that make no whole group are left over.

    >>> groups_of(["0", "1", "2", "3", "4"], 2)
    (('0', '1'), ('2', '3'))
    """
    if each < 1:
        raise UsageError(f"{each} GPUs a replica; the least is 1")
    return tuple(tuple(gpus[start : start + each]) for start in range(0, len(gpus) - each + 1, each))


def environments(
    groups: Sequence[Sequence[str]], environment: Mapping[str, str], cores: int
) -> tuple[dict[str, str], ...]:
    """The environment of each replica: its number, its GPUs alone, and its share of the cores."""
    threads = str(max(1, cores // max(1, len(groups))))
    return tuple(
        {**narrowed(environment, gpus), REPLICA_VARIABLE: f"{number}/{len(groups)}", "OMP_NUM_THREADS": threads}
        for number, gpus in enumerate(groups)
    )


def run_replicas(
    argv: Sequence[str],
    settings: Sequence[Mapping[str, str]],
    *,
    grace_s: float = GRACE_S,
    tell: Callable[[str], None] | None = None,
) -> int:
    """Runs the command once in each of these environments, all at the same time, until the last has ended.

    When one fails the others are ended (SIGTERM, then SIGKILL after ``grace_s``): what they would do is of no use
    without its part. A signal that asks us to end is handed on to all of them.

    Returns:
        The exit code: that of the first that failed, 0 when none did; of one that a signal ended, 128 and its number.
    """
    if not settings:
        raise UsageError("no replica to run: there are fewer GPUs than one of them takes")
    running: dict[int, subprocess.Popen[bytes]] = {}
    with _forwarding_signals(running):
        try:
            for number, environment in enumerate(settings):
                running[number] = subprocess.Popen(list(argv), env=dict(environment))
            return _until_all_ended(running, grace_s, tell or (lambda _: None))
        finally:
            for process in running.values():
                if process.poll() is None:
                    process.kill()
                process.wait()


def _until_all_ended(
    running: Mapping[int, subprocess.Popen[bytes]], grace_s: float, tell: Callable[[str], None]
) -> int:
    ended: SimpleQueue[tuple[int, int]] = SimpleQueue()

    def wait(number: int) -> None:
        ended.put((number, running[number].wait()))

    for number in running:
        Thread(target=wait, args=(number,), daemon=True).start()
    left, first, kill_at = dict(running), int(ExitCode.OK), None
    while left:
        try:
            number, code = ended.get(timeout=None if kill_at is None else max(0.0, kill_at - time.monotonic()))
        except Empty:
            _signal(left, signal.SIGKILL)
            kill_at = None
            continue
        del left[number]
        if code and not first:
            first = 128 - code if code < 0 else code
            if left:
                tell(f"replica {number} ended with exit code {first}; the others are ended")
            kill_at = time.monotonic() + grace_s
            _signal(left, signal.SIGTERM)
    return first


def _signal(processes: Mapping[int, subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in list(processes.values()):
        with suppress(ProcessLookupError):
            process.send_signal(number)


@contextmanager
def _forwarding_signals(running: Mapping[int, subprocess.Popen[bytes]]) -> Iterator[None]:
    """Meanwhile signals that ask us to end go to the replicas; we end when they have."""

    def hand_on(number: int, _: FrameType | None) -> None:
        _signal(running, signal.Signals(number))

    before = {}
    for number in _STOPS:
        # What was ignored when we began (nohup) stays so, for the replicas too.
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, hand_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
