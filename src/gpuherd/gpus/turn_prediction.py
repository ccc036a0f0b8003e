"""When a gpuherd that waits will have its turn: the rule of ``gpuherd.gpus.turns``, stepped through expected ends.

A prediction is computed from the GPUs that are held with the expected ends of their jobs, the tickets with the expected
lengths of theirs, and the loads. It lets each GPU come free at its expected end, gives it to the ticket for which
``assign`` means it, and so on, until one's own ticket has its GPUs. Users who come later are not foreseen, nor jobs
that fail.

Pure: the caller passes times in seconds of one clock.

>>> tickets = [Ticket("bob", uid=2, since=0.0, job_s=60.0), Ticket("me", uid=1, since=5.0)]
>>> held = [HeldGpu("GPU-0", uid=3, until=100.0), HeldGpu("GPU-1", uid=3)]
>>> predict_start("me", tickets, held, {3: Load(held=2)}, now=10.0)
Prediction(at=160.0, gpus=('GPU-0',), before={'bob': 1}, unknown=('GPU-1',))
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gpuherd.gpus.turns import RULES, Assignment, Load, Ticket, TurnRules, assign, decayed, goes_on

# A prediction gives up after so many events, or so far ahead.
MOST_STEPS = 5_000
HORIZON_S = 30 * 86400.0
# An event lies this much after the moment at which a GPU is no longer kept, so that it is surely past it.
_AFTER_S = 1e-3


@dataclass(frozen=True, slots=True)
class HeldGpu:
    """A GPU in use.

    Attributes:
        uuid, uid: the GPU and its holder.
        until: when its job is expected to end; None where that is not known, also for people without gpuherd. One that
            is past is expected to end now.
        ticket: key of the ticket whose gpuherd holds it; None counts as the first ticket of its user.
    """

    uuid: str
    uid: int
    until: float | None = None
    ticket: str | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """When a ticket gets its GPUs, as far as that can be known.

    Attributes:
        at: the second; None where it depends on ends that are not known, or lies too far ahead.
        gpus: UUIDs of the GPUs with which it is served then; () without a time.
        before: how many GPUs the tickets of others get before, by key, in the order of their first.
        unknown: UUIDs of held GPUs whose end is not known: if they come back sooner, its turn may come earlier.
    """

    at: float | None
    gpus: tuple[str, ...] = ()
    before: Mapping[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


def predict_start(
    me: str,
    tickets: Iterable[Ticket],
    held: Iterable[HeldGpu],
    loads: Mapping[int, Load],
    *,
    now: float,
    free: Mapping[str, float] | None = None,
    nth: int = 1,
    quiet_s: float = 0.0,
    rules: TurnRules = RULES,
) -> Prediction:
    """When one's own ticket has been given its ``nth`` GPU, counted from now; at least those of its smallest job.

    Args:
        me: the key of one's own ticket, which is one of ``tickets``.
        tickets: of all users who wait, with ``job_s`` and ``jobs`` as far as they are known.
        held: GPUs in use that could come free.
        loads: by uid, with ``held`` as in ``assign``; a user who is missing has had nothing.
        free: by UUID, the time since which a GPU was seen free.
        nth: for a job further back in the queue the GPUs of the jobs before it, and its own.
        quiet_s: how long a GPU that another user's job left must be quiet.

    Raises KeyError when there is no such ticket.
    """
    course = _Course(tickets, held, loads, free or {}, now, quiet_s, rules)
    return course.run(me, nth)


def grown(load: Load, seconds: float, half_life_s: float) -> Load:
    """The load after so many seconds more in which its GPUs are held.

    >>> round(grown(Load(used_s=100.0, held=2), 60.0, 7 * 86400.0).used_s, 1)
    220.0
    """
    kept, each_s = _growth(seconds, half_life_s)
    return Load(load.used_s * kept + load.held * each_s, load.held, load.weight)


def _growth(seconds: float, half_life_s: float) -> tuple[float, float]:
    """What is kept of a load after so many seconds, and the GPU-seconds that a GPU held meanwhile adds."""
    return decayed(1.0, seconds, half_life_s), half_life_s / math.log(2) * -math.expm1(
        -seconds * math.log(2) / half_life_s
    )


@dataclass(slots=True)
class _Waiting:
    """A ticket while time passes: how many jobs still wait, and for how many GPUs there is room within its limits."""

    ticket: Ticket
    jobs: int
    room: int
    taken: int = 0

    def now(self) -> Ticket | None:
        """The ticket as it is now; None while none of its jobs could start."""
        gpus = min(self.room, self.jobs * self.ticket.smallest)
        if gpus < self.ticket.smallest:
            return None
        if gpus != self.ticket.gpus:
            self.ticket = replace(self.ticket, gpus=gpus)
        return self.ticket


class _Course:
    """What will happen, one event after the other."""

    def __init__(
        self,
        tickets: Iterable[Ticket],
        held: Iterable[HeldGpu],
        loads: Mapping[int, Load],
        free: Mapping[str, float],
        now: float,
        quiet_s: float,
        rules: TurnRules,
    ):
        self._now, self._quiet_s, self._rules = now, quiet_s, rules
        self._waiting = {
            ticket.key: _Waiting(ticket, max(ticket.jobs, ticket.gpus // max(1, ticket.smallest)), ticket.gpus)
            for ticket in tickets
            if 0 < ticket.smallest <= ticket.gpus
        }
        self._loads = dict(loads)
        self._free = dict(free)
        # By which user a GPU that has come free was left, when, and from when on others may take it.
        self._quiet: dict[str, tuple[int, float, float]] = {}
        self._held: dict[str, HeldGpu] = {}
        self._events: list[tuple[float, str]] = []
        self._before: dict[str, int] = {}
        firsts: dict[int, str] = {}
        for key, waiting in self._waiting.items():
            firsts.setdefault(waiting.ticket.uid, key)
        for gpu in held:
            self._hold(gpu if gpu.ticket is not None else replace(gpu, ticket=firsts.get(gpu.uid)))

    def run(self, me: str, nth: int) -> Prediction:
        """Runs until the ticket has its GPUs."""
        mine = self._waiting[me]
        needed = max(nth, mine.ticket.smallest)
        end = self._now + HORIZON_S
        for _ in range(MOST_STEPS):
            gpus = self._give(me)
            if mine.taken >= needed:
                return Prediction(self._now, tuple(gpus), self._others(me), self._unknown(gpus))
            if not self._events or self._events[0][0] > end:
                break
            self._step()
        return Prediction(None, (), self._others(me), self._unknown(()))

    def _others(self, me: str) -> dict[str, int]:
        return {key: gpus for key, gpus in self._before.items() if key != me}

    def _unknown(self, mine: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted({gpu.uuid for gpu in self._held.values() if gpu.until is None}.difference(mine)))

    def _hold(self, gpu: HeldGpu) -> None:
        self._held[gpu.uuid] = gpu
        if gpu.until is not None:
            heapq.heappush(self._events, (max(gpu.until, self._now), gpu.uuid))

    def _step(self) -> None:
        """Goes on to the next event: an end, or a moment from which on a free GPU may be taken by others."""
        at = self._events[0][0]
        kept, each_s = _growth(at - self._now, self._rules.half_life_s)
        for uid, load in self._loads.items():
            self._loads[uid] = Load(load.used_s * kept + load.held * each_s, load.held, load.weight)
        self._now = at
        while self._events and self._events[0][0] <= at:
            _, uuid = heapq.heappop(self._events)
            gpu = self._held.get(uuid)
            if gpu is not None and gpu.until is not None and gpu.until <= at:
                self._end(gpu)

    def _end(self, gpu: HeldGpu) -> None:
        del self._held[gpu.uuid]
        self._free[gpu.uuid] = self._now
        self._add_held(gpu.uid, -1)
        if gpu.ticket in self._waiting:
            self._waiting[gpu.ticket].room += 1
        ready = self._now + self._quiet_s
        self._quiet[gpu.uuid] = (gpu.uid, self._now, ready)
        if self._quiet_s > 0:
            heapq.heappush(self._events, (ready, gpu.uuid))

    def _add_held(self, uid: int, more: int) -> None:
        load = self._loads.get(uid, Load())
        self._loads[uid] = replace(load, held=max(0, load.held + more))

    def _give(self, me: str) -> list[str]:
        """Lets the tickets take what is meant for them now. Returns the GPUs that the ticket ``me`` takes."""
        if not self._free:
            return []
        tickets = [ticket for each in self._waiting.values() if (ticket := each.now()) is not None]
        given = assign(self._free, tickets, self._loads, now=self._now, held=self._held.keys(), rules=self._rules)
        mine = self._go_on(given, me)
        left = set(self._free)
        for ticket in given.order:
            meant = given.to[ticket.key] & self._free.keys()
            left -= meant
            taken = self._take(ticket, meant)
            if ticket.key == me:
                mine += taken
            if not taken and meant:
                heapq.heappush(self._events, (given.until[ticket.key] + _AFTER_S, ""))
        if left and not mine and (ticket := self._waiting[me].now()) is not None:
            # Those for whom these were kept have let them go; nothing lapses for one's own ticket.
            lapsed = {uuid: self._free[uuid] for uuid in left}
            own = assign(lapsed, [ticket], self._loads, now=self._now, me=me, rules=self._rules)
            mine = self._take(ticket, own.to[me])
        return mine

    def _go_on(self, given: Assignment, me: str) -> list[str]:
        """Lets users go on with GPUs that their own jobs leave now, where the rule has them do so though the GPUs are
        meant for others. Returns those that the ticket ``me`` takes."""
        mine: list[str] = []
        meant_for = {uuid: ticket.uid for ticket in given.order for uuid in given.to[ticket.key]}
        left_by: dict[int, list[str]] = {}
        for uuid, (uid, left_at, _) in self._quiet.items():
            if left_at == self._now and meant_for.get(uuid, uid) != uid:
                left_by.setdefault(uid, []).append(uuid)
        for ticket in given.order:
            more = len(given.to[ticket.key])
            on: list[str] = []
            for uuid in sorted(left_by.pop(ticket.uid, ())):
                load, other = (self._loads.get(uid, Load()) for uid in (ticket.uid, meant_for[uuid]))
                if (ticket.usable is None or uuid in ticket.usable) and goes_on(load, other, more, self._rules):
                    on.append(uuid)
                    more += 1
            taken = self._take(ticket, on)
            mine += taken if ticket.key == me else []
        return mine

    def _take(self, ticket: Ticket, meant: Iterable[str]) -> list[str]:
        """The ticket's gpuherd starts jobs on as many of these GPUs as are quiet and make whole jobs."""
        waiting = self._waiting[ticket.key]
        current = waiting.now()
        ready = sorted(uuid for uuid in meant if self._is_ready(uuid, ticket.uid))
        most = 0 if current is None else min(len(ready), current.gpus)
        taken = ready[: most // ticket.smallest * ticket.smallest]
        if not taken:
            return []
        # What a ticket says is the word of a stranger.
        is_known = ticket.job_s is not None and 0 <= ticket.job_s < HORIZON_S
        until = self._now + (ticket.job_s or 0.0) if is_known else None
        for uuid in taken:
            del self._free[uuid]
            self._quiet.pop(uuid, None)
            self._hold(HeldGpu(uuid, ticket.uid, until, ticket.key))
        self._add_held(ticket.uid, len(taken))
        waiting.ticket = replace(waiting.ticket, since=self._now)
        waiting.jobs -= len(taken) // ticket.smallest
        waiting.room -= len(taken)
        waiting.taken += len(taken)
        self._before[ticket.key] = waiting.taken
        return taken

    def _is_ready(self, uuid: str, uid: int) -> bool:
        left_by, _, ready_at = self._quiet.get(uuid, (uid, 0.0, 0.0))
        return left_by == uid or ready_at <= self._now
