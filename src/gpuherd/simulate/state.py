"""The state of a simulation: events in order, GPUs and who uses them, attempts, and each job's tries."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.gpus.idle import IdleRule
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.completion import NextTry
from gpuherd.jobs.job import Job
from gpuherd.jobs.scheduler.memory import Tenant, could_share, shareable_mb
from gpuherd.jobs.scheduler.ordering import rank
from gpuherd.jobs.scheduler.policy import GpuView, Pool, WaitingJob
from gpuherd.simulate.cluster import Machine

# What happens when in virtual time: events in order of their second, then of their entry.


class Agenda:
    """Events to come. ``now``: the second of the last that happened.

    >>> agenda = Agenda()
    >>> agenda.at(2.0, print, "two")
    >>> agenda.at(1.0, print, "one")
    >>> agenda.step()
    one
    >>> agenda.now
    1.0
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._counter = 0

    def __bool__(self) -> bool:
        return bool(self._events)

    def at(self, time: float, happen: Callable[..., None], *details: Any) -> None:
        """This happens then."""
        self._counter += 1
        heapq.heappush(self._events, (time, self._counter, happen, details))

    def wake(self, time: float | None) -> None:
        """Something may come out otherwise at this time, if it is one."""
        if time is not None:
            self.at(time, _nothing)

    def step(self) -> None:
        """All that happens in the next second in which anything does. Raises IndexError when nothing is to come."""
        self.now = self._events[0][0]
        while self._events and self._events[0][0] <= self.now:
            _, _, happen, details = heapq.heappop(self._events)
            happen(*details)


def _nothing() -> None:
    """An event that is there for the decision after it."""


# How a job stands in a simulation: what it asks for now, its tries, and where it failed.
#
# It is what ``retry.next_try`` wants to know of a job (``retry.Tried``), without a database's row behind it.


@dataclass(frozen=True, slots=True)
class Standing:
    """A job as it stands.

    Attributes:
        number: its place in the order of submission, from 0.
        job: as it was submitted.
        gpus, memory_mb, share: what it asks for now; MB on each GPU.
        ready_at: since when it could have run.
        tries: failures that count against ``job.retries``.
        attempts: starts so far.
        avoid: UUIDs of GPUs on which it failed.
    """

    number: int
    job: Job
    gpus: int
    memory_mb: int | None
    share: bool
    ready_at: float = 0.0
    tries: int = 0
    attempts: int = 0
    avoid: frozenset[str] = frozenset()

    @classmethod
    def of(cls, number: int, job: Job, *, share: bool) -> Standing:
        """A job that has just been submitted. ``share``: all that could share a GPU do; else those that say so."""
        return cls(number, job, job.gpus, job.memory_mb, could_share(job) if share else job.share)

    def started(self) -> Standing:
        """After one more start."""
        return self._with(attempts=self.attempts + 1)

    def ready(self, at: float) -> Standing:
        """It could run from this second on."""
        return self._with(ready_at=at)

    def for_next(self, try_: NextTry) -> Standing:
        """As it is tried again."""
        return Standing(
            self.number,
            self.job,
            try_.gpus,
            try_.memory_mb,
            try_.share,
            try_.not_before,
            self.tries + try_.costs_try,
            self.attempts,
            try_.avoid,
        )

    def waiting(self, timeout: float | None, arrived_s: float) -> WaitingJob:
        """What the policy is told of it. ``timeout``: the time limit of jobs that have none of their own."""
        limit_s = self.job.timeout_s or timeout
        place = rank(self.job.cost, arrived_s)
        return WaitingJob(
            self.number,
            self.gpus,
            self.memory_mb,
            self.job.priority,
            self.avoid,
            self.share,
            place,
            limit_s,
            self.job.nodes,
        )

    def _with(self, *, ready_at: float | None = None, attempts: int | None = None) -> Standing:
        # Not dataclasses.replace, which would take as long as all else that is done for a start.
        return Standing(
            self.number,
            self.job,
            self.gpus,
            self.memory_mb,
            self.share,
            self.ready_at if ready_at is None else ready_at,
            self.tries,
            self.attempts if attempts is None else attempts,
            self.avoid,
        )


# An attempt of a job in virtual time, and the GPUs on which it runs: each knows the other.
#
# An attempt may be paused for strangers, and knows when it will end.


class Slot:
    """A GPU, by its number over all machines, and who is on it.

    ``left``: who used it last was a job of ours. ``attempts``: ours on it now; more than one when they share it.
    ``left_out``: nothing of ours is started on it for now.
    """

    __slots__ = ("attempts", "clean_since", "gpu", "left", "left_out", "machine", "number", "stranger")

    def __init__(self, number: int, gpu: Gpu, machine: str):
        self.number = number
        self.gpu = gpu
        self.machine = machine
        self.attempts: list[Attempt] = []
        self.stranger = False
        self.clean_since = 0.0
        self.left = False
        self.left_out = False

    @property
    def clean(self) -> bool:
        """Whether nobody uses it."""
        return not self.attempts and not self.stranger


class Attempt:
    """A running attempt.

    Attributes:
        standing: the job as it was when it started.
        slots: its GPUs; () on the CPU.
        started: second of its start.
        failure: how it will end, None for a success.
        ends_at: when it will end; None while it is paused.
        shared: others that share may be on its GPU.
        over_at: when its time limit ends it at the latest; None without one, and while it is paused.
        over: it has ended.
    """

    __slots__ = (
        "_left_s",
        "_limit_s",
        "ends_at",
        "failure",
        "over",
        "over_at",
        "shared",
        "slots",
        "standing",
        "started",
    )

    def __init__(
        self,
        standing: Standing,
        slots: tuple[Slot, ...],
        now: float,
        seconds: float,
        failure: FailureClass | None,
        *,
        shared: bool,
        limit_s: float | None = None,
    ):
        self.standing = standing
        self.shared = shared
        self.slots = slots
        self.started = now
        self.failure = failure
        self.ends_at: float | None = now + seconds
        self.over = False
        self.over_at = None if limit_s is None else now + limit_s
        self._left_s = seconds
        self._limit_s = limit_s

    def pause(self, now: float) -> None:
        """It stands still from now on."""
        if self.ends_at is not None:
            self._left_s = self.ends_at - now
            self._limit_s = None if self.over_at is None else self.over_at - now
            self.ends_at = self.over_at = None

    def resume(self, now: float) -> float:
        """It goes on. Returns when it will end."""
        if self.ends_at is None:
            self.ends_at = now + self._left_s
            self.over_at = None if self._limit_s is None else now + self._limit_s
        return self.ends_at


# From when a GPU counts as free in a simulation: the rule of ``gpus.idle`` and ``jobs.gpuwatch``, solved for time.
#
# A real dispatcher looks again and again while a job waits. A simulation knows when the GPU was left, so that it can
# say at once which look will be the one that finds it free. tests/simulate/test_quiet.py steps through the real rule,
# look by look, and compares.

# From a job's end to the next start on its GPU, as measured (benchmarks/dispatch.py): the look that finds it clean, the
# lease, the look under the lease, the start.
TURNAROUND_S = 0.005


@dataclass(frozen=True, slots=True)
class Quiet:
    """When a GPU is free by this rule."""

    rule: IdleRule

    def free_at(self, clean_since: float, ours_left: bool, looking_since: float) -> float:
        """The second at which the GPU is free for a job.

        Args:
            clean_since: nobody has used it since then.
            ours_left: who left it then was a job of ours.
            looking_since: looks have come every ``rule.look_s`` since then, without a hole.
        """
        late = looking_since - clean_since
        if ours_left and late <= max(self.rule.quiet_s, self.rule.hole_s):
            # One clean look is enough. Looks come at once after our own job's end, and at once when looking begins.
            return looking_since if late > 0 else clean_since + TURNAROUND_S
        looks = math.ceil(max(0.0, -late) / self.rule.look_s)
        return looking_since + looks * self.rule.look_s + self.rule.quiet_s


# The GPUs of a simulation: who uses each, since when one is clean, and the pool that the policy decides on.
#
# It stands where a real dispatcher has its ``GpuWatch``. It knows no events: the simulation tells it what happens
# when.

_STRANGER = "someone uses it"
_SETTLING = "not yet free for long enough"
_OURS = "our own job runs on it"
_LEFT_OUT = "left out for a while, because jobs failed on it"


class Floor:
    """All GPUs. ``pool``: what the policy is told of them; ``slots``: by number; ``news``: how often one has become
    free, or was left out."""

    def __init__(self, machines: Sequence[Machine], quiet: Quiet):
        self.slots = [
            Slot(0, gpu, "" if len(machines) == 1 else f"machine {number}")
            for number, gpus in enumerate(machines)
            for gpu in gpus
        ]
        self._quiet = quiet
        self._by_uuid: dict[str, Slot] = {}
        for number, slot in enumerate(self.slots):
            slot.number = number
            self._by_uuid[slot.gpu.uuid] = slot
        self.pool = Pool(GpuView(slot.gpu, _SETTLING, machine=slot.machine) for slot in self.slots)
        # Clean, but not yet for long enough; and since when looks are made, on which all verdicts rest.
        self._settling = set(range(len(self.slots)))
        self.news = 0
        self._looking_since: float | None = None

    def slot(self, uuid: str) -> Slot:
        """The GPU with this UUID."""
        return self._by_uuid[uuid]

    def take(self, slot: Slot, attempt: Attempt) -> None:
        """An attempt of ours begins to run here."""
        slot.attempts.append(attempt)
        self._settling.discard(slot.number)
        self._show(slot)

    def leave(self, slot: Slot, attempt: Attempt, now: float) -> float | None:
        """An attempt of ours has ended here. Returns when the GPU is free again if looks are made, else None."""
        slot.attempts.remove(attempt)
        return self._left(slot, now, by_us=True)

    def come(self, slot: Slot) -> None:
        """A stranger begins to use it."""
        slot.stranger = True
        self._settling.discard(slot.number)
        self._show(slot)

    def go(self, slot: Slot, now: float) -> float | None:
        """The stranger has left it. Returns as ``leave``."""
        slot.stranger = False
        return self._left(slot, now, by_us=False)

    def look(self, now: float, since: float) -> None:
        """Brings the pool up to date. ``since``: looks are made since then; those of an earlier row count no more."""
        if since != self._looking_since:
            self._looking_since = since
            for slot in self.slots:
                if slot.clean and slot.number not in self._settling:
                    self._settling.add(slot.number)
                    self._show(slot)
        ready = [number for number in self._settling if self._free_at(self.slots[number]) <= now]
        for number in sorted(ready):
            self._settling.remove(number)
            self._show(self.slots[number])
        self.news += len(ready)
        if len(ready) > len(self._settling):
            # A set stays as large as it ever was, and to go through it takes as long.
            self._settling = set(self._settling)

    def show(self, slots: Sequence[Slot]) -> None:
        """Tells the pool what has changed for the attempts on these GPUs."""
        for slot in slots:
            self._show(slot)

    def leave_out(self, slot: Slot, left_out: bool) -> None:
        """Nothing of ours is started on it from now on, or may be again."""
        slot.left_out = left_out
        self.news += 1
        self._show(slot)

    def _left(self, slot: Slot, now: float, *, by_us: bool) -> float | None:
        if slot.clean:
            slot.clean_since, slot.left = now, by_us
            self._settling.add(slot.number)
        self._show(slot)
        return self._free_at(slot) if slot.clean and self._looking_since is not None else None

    def _free_at(self, slot: Slot) -> float:
        return self._quiet.free_at(slot.clean_since, slot.left, self._looking_since or 0.0)

    def _show(self, slot: Slot) -> None:
        """Tells the pool of it."""
        settling = slot.number in self._settling
        busy = None
        if slot.attempts:
            busy = _OURS
        elif slot.left_out:
            busy = _LEFT_OUT
        elif slot.stranger or settling:
            busy = _STRANGER if slot.stranger else _SETTLING
        self.pool.update(
            GpuView(
                slot.gpu,
                busy,
                ours=bool(slot.attempts),
                shareable_mb=_shareable_mb(slot) if slot.attempts else None,
                returning=settling and slot.left and not slot.left_out,
                machine=slot.machine,
                over_at=_over_at(slot),
            )
        )


def _over_at(slot: Slot) -> float | None:
    """When the attempt that has the GPU for itself is over at the latest, by its time limit."""
    alone = [attempt for attempt in slot.attempts if not attempt.shared]
    return alone[0].over_at if alone else None


def _shareable_mb(slot: Slot) -> int | None:
    """MB that may still be promised on a GPU where only sharing jobs of ours run; None when nothing may be added."""
    if slot.stranger or slot.left_out or not all(attempt.shared for attempt in slot.attempts):
        return None
    tenants = [Tenant(a.standing.job.name, a.standing.memory_mb or 0) for a in slot.attempts]
    return shareable_mb(slot.gpu, tenants)
