"""The GPUs of a simulation, as the dispatcher of one user sees them: who uses each, and when it counts as free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuherd.gpus.idle import IdleRule
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.records import QueuedJob
from gpuherd.jobs.scheduler.memory import Tenant, shareable_mb
from gpuherd.jobs.scheduler.pool import Pool
from gpuherd.jobs.scheduler.types import GpuView
from gpuherd.simulate.options import TURNAROUND_S
from gpuherd.simulate.state import EventQueue
from gpuherd.simulate.workload import Machine

# Why a GPU is not free.
_EXTERNAL = "an external user is on it"
_SETTLING = "not yet free for long enough"
_HELD = "another user's job runs on it"
_KEPT = "it is another user's turn"
_OURS = "our own job runs on it"
_EXCLUDED = "left out for a while, because jobs failed on it"


@dataclass(slots=True, eq=False)
class SimulatedGpu:
    """A GPU and its users.

    Attributes:
        number: its number over all machines.
        machine: name of its machine, "" where there is only one.
        attempts: our attempts on it now; more than one where they share it.
        external_since: second since which an external user is on it; None without one.
        holder: the other user, with a gpuherd of their own, whose job is on it; "" without one.
        kept_for: the other user whose turn it is to take it; "" for no one.
        clean_since: second since which it has had no user.
        ours_left: its last user was a job of ours.
        excluded: no job is started on it for now.
    """

    number: int
    gpu: Gpu
    machine: str
    attempts: list[RunningAttempt] = field(default_factory=list)
    external_since: float | None = None
    holder: str = ""
    kept_for: str = ""
    clean_since: float = 0.0
    ours_left: bool = False
    excluded: bool = False

    @property
    def clean(self) -> bool:
        """Whether it has no user."""
        return not self.attempts and self.external_since is None and not self.holder

    @property
    def shareable_mb(self) -> int | None:
        """MB that may still be promised on it where only sharing jobs of ours run; None when no job may be added."""
        blocked = not self.attempts or self.external_since is not None or self.excluded
        if blocked or not all(attempt.shared for attempt in self.attempts):
            return None
        queued = [attempt.queued for attempt in self.attempts]
        return shareable_mb(self.gpu, [Tenant(each.job.name, each.memory_mb or 0) for each in queued])


@dataclass(slots=True, eq=False)
class RunningAttempt:
    """A running attempt; it may be paused for external users.

    Attributes:
        queued: the job as it was when it started.
        gpus: () on the CPU.
        started: second of its start.
        left_s, limit_left_s: time until its end and its time limit (None without one), from its start or last pause.
        failure: how it will fail, None for a success.
        shared: other attempts may be on its GPU.
        ends_at: second of its end; None while it is paused.
        over_at: second at which its time limit ends it; None without one, and while it is paused.
        over: it has ended.
    """

    queued: QueuedJob
    gpus: tuple[SimulatedGpu, ...]
    started: float
    left_s: float
    failure: FailureClass | None
    shared: bool
    limit_left_s: float | None = None
    ends_at: float | None = None
    over_at: float | None = None
    over: bool = False

    def pause(self, now: float) -> None:
        """Stops it until ``resume``."""
        if self.ends_at is not None:
            self.left_s = self.ends_at - now
            self.limit_left_s = None if self.over_at is None else self.over_at - now
            self.ends_at = self.over_at = None

    def resume(self, now: float) -> float:
        """Starts or continues it. Returns the second of its end."""
        if self.ends_at is None:
            self.ends_at = now + self.left_s
            self.over_at = None if self.limit_left_s is None else now + self.limit_left_s
        return self.ends_at


def free_at(rule: IdleRule, clean_since: float, ours_left: bool, polling_since: float) -> float:
    """The second at which a GPU is free for a job: the rule of ``gpus.idle`` and ``jobs.gpu.watch``, solved for time.

    A real dispatcher polls the GPUs while a job waits. A simulation knows when a GPU was left, so it computes which
    poll will be the one that finds it free. tests/simulate/test_idle.py steps through the real rule, poll by poll, and
    compares.

    Args:
        clean_since: it has had no user since then.
        ours_left: its last user was a job of ours.
        polling_since: polls have come every ``rule.look_s`` since then, without a gap.
    """
    late = polling_since - clean_since
    if ours_left and late <= max(rule.quiet_s, rule.hole_s):
        # One clean poll is enough. It comes at once after the end of our job, and at once when polling begins.
        return polling_since if late > 0 else clean_since + TURNAROUND_S
    polls = math.ceil(max(0.0, -late) / rule.look_s)
    return polling_since + polls * rule.look_s + rule.quiet_s


class SimulatedGpus:
    """All GPUs. It stands where a real dispatcher has its GPU manager; decisions are made elsewhere, over ``pool``.

    Attributes:
        all: the GPUs by number.
        pool: the GPUs as the policy sees them.
        changes: how often a GPU has become free, was excluded or came back.
    """

    def __init__(self, machines: Sequence[Machine], rule: IdleRule, events: EventQueue):
        names = [(gpu, f"machine {number}") for number, gpus in enumerate(machines) for gpu in gpus]
        self.all = [
            SimulatedGpu(number, gpu, name if len(machines) > 1 else "") for number, (gpu, name) in enumerate(names)
        ]
        self._rule = rule
        self.events = events
        self._by_uuid = {each.gpu.uuid: each for each in self.all}
        self.pool = Pool(GpuView(each.gpu, _SETTLING, node=each.machine) for each in self.all)
        self.changes = 0
        # Numbers of those that are clean, but not yet for long enough; and since when polls come.
        self._settling = set(range(len(self.all)))
        self._polling_since: float | None = None

    def get(self, uuid: str) -> SimulatedGpu:
        """The GPU with this UUID."""
        return self._by_uuid[uuid]

    def add_attempt(self, gpu: SimulatedGpu, attempt: RunningAttempt) -> None:
        """An attempt starts here."""
        gpu.attempts.append(attempt)
        self._settling.discard(gpu.number)
        self.update(gpu)

    def remove_attempt(self, gpu: SimulatedGpu, attempt: RunningAttempt) -> None:
        """An attempt has ended here."""
        gpu.attempts.remove(attempt)
        self._left(gpu, by_us=True)

    def add_external(self, gpu: SimulatedGpu) -> None:
        """An external user comes."""
        gpu.external_since = self.events.now
        self._settling.discard(gpu.number)
        self.update(gpu)

    def remove_external(self, gpu: SimulatedGpu) -> None:
        """An external user leaves."""
        gpu.external_since = None
        self._left(gpu, by_us=False)

    def hold(self, gpu: SimulatedGpu, holder: str) -> None:
        """A job of another user's gpuherd starts here."""
        gpu.holder, gpu.kept_for = holder, ""
        self._settling.discard(gpu.number)
        self.update(gpu)

    def let_go(self, gpu: SimulatedGpu) -> None:
        """The other user's jobs have left the GPU."""
        gpu.holder = ""
        self._left(gpu, by_us=False)

    def keep(self, users: Mapping[str, str]) -> None:
        """Keeps these GPUs, by UUID, for the users whose turn it is, and no others."""
        for gpu in self.all:
            user = users.get(gpu.gpu.uuid, "")
            if gpu.kept_for != user:
                gpu.kept_for = user
                self.changes += 1
                self.update(gpu)

    def is_free(self, gpu: SimulatedGpu) -> bool:
        """Whether it has been quiet for long enough, whoever's turn it is."""
        return gpu.clean and not gpu.excluded and gpu.number not in self._settling

    def set_excluded(self, uuid: str, excluded: bool) -> None:
        """Sets whether a GPU is left out: no job is started on it."""
        gpu = self._by_uuid[uuid]
        if gpu.excluded is not excluded:
            gpu.excluded = excluded
            self.changes += 1
            self.update(gpu)

    def poll(self, now: float, since: float) -> None:
        """Brings the pool up to date. ``since``: polls are made since then; earlier series don't count."""
        if since != self._polling_since:
            self._polling_since = since
            for gpu in self.all:
                if gpu.clean and gpu.number not in self._settling:
                    self._settling.add(gpu.number)
                    self.update(gpu)
        ready = [number for number in self._settling if self.free_at(self.all[number], since) <= now]
        for number in sorted(ready):
            self._settling.remove(number)
            self.update(self.all[number])
        self.changes += len(ready)
        if len(ready) > len(self._settling):
            # A set keeps the capacity that it ever had, and iterating over it takes as long.
            self._settling = set(self._settling)

    def update(self, gpu: SimulatedGpu) -> None:
        """Updates the GPU in the pool."""
        settling = gpu.number in self._settling
        busy = None
        if gpu.attempts:
            busy = _OURS
        elif gpu.excluded:
            busy = _EXCLUDED
        elif gpu.external_since is not None:
            busy = _EXTERNAL
        elif gpu.holder:
            busy = _HELD
        elif settling:
            busy = _SETTLING
        elif gpu.kept_for:
            busy = _KEPT
        self.pool.update(
            GpuView(
                gpu.gpu,
                busy,
                ours=bool(gpu.attempts),
                shareable_mb=gpu.shareable_mb,
                returning=settling and gpu.ours_left and not gpu.excluded,
                node=gpu.machine,
                over_at=next((attempt.over_at for attempt in gpu.attempts if not attempt.shared), None),
            )
        )

    def _left(self, gpu: SimulatedGpu, *, by_us: bool) -> None:
        """A user has left the GPU: plans a decision for when it is free again, while polls are made."""
        if gpu.clean:
            gpu.clean_since, gpu.ours_left = self.events.now, by_us
            self._settling.add(gpu.number)
        self.update(gpu)
        if gpu.clean and self._polling_since is not None:
            self.events.wake_at(self.free_at(gpu, self._polling_since))

    def free_at(self, gpu: SimulatedGpu, polling_since: float) -> float:
        """The second at which a clean GPU counts as free, with polls since then."""
        return free_at(self._rule, gpu.clean_since, gpu.ours_left, polling_since)
