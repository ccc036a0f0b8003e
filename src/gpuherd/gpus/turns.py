"""Whose turn it is to take the GPUs that are free: the rule that all gpuherds of a machine follow, without a daemon.

Every gpuherd that waits for GPUs leaves a ticket (``gpuherd.gpus.tickets``). Before it takes a GPU it computes by
``assign`` for whom the free ones are meant, from the same facts as all others: the tickets, who holds which GPU, and
how much each user has used of late (``gpuherd.ledger``). It leaves alone the GPUs that are meant for others. Two
gpuherds may see slightly different facts; then a GPU stays free for the grace at most, and the leases still let only
one of them take it.

Pure: the caller passes times in seconds of one clock.

The rule
1. Users, not tickets, have turns. The next GPU goes to the user with the lowest ``load``: the GPU-seconds used of late,
   plus ``quantum_s`` for each GPU held or assigned already, divided by the user's weight. Of equals the one goes first
   who has waited longer.
2. A ticket gets GPUs in units of its smallest job.
3. GPUs are kept free for another user's ticket for ``grace_s`` only, counted from when the last of a unit became free
   and the ticket was there: it may wait for something else.
4. Where too few GPUs are free for a ticket's smallest job, and others hold the missing ones, the free ones are kept for
   it in the last ``keep_share`` of each period in which its waiting time doubles. These windows grow with the waiting
   time, so that large jobs are not starved however long the jobs of others are, and GPUs are kept idle for a ticket
   during no more than ``keep_share`` of the time that it waits. All gpuherds see the same windows.
5. A user whose own job has just left a GPU may keep it while the user's load is less than ``slice_s`` GPU-seconds
   above that of whose turn it is (``goes_on``): a GPU that changes hands stands still for the quiet time, which short
   jobs would otherwise pay for one by one.
6. A user alone has everything at once, and GPUs are never kept for one ticket of a user from another of the same user.

>>> tickets = [Ticket("a", uid=1, since=0.0, gpus=4), Ticket("b", uid=2, since=5.0, gpus=4)]
>>> loads = {1: Load(used_s=7200.0), 2: Load()}
>>> given = assign({"GPU-0": 0.0, "GPU-1": 0.0}, tickets, loads, now=10.0)
>>> sorted(given.to["b"]), sorted(given.to["a"])
(['GPU-0', 'GPU-1'], [])
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

HALF_LIFE_S = 7 * 86400.0
# Without a grace the first window of rule 4 would be endlessly short.
_SHORTEST_WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class TurnRules:
    """The rule's constants; an administrator sets them in the machine's policy.

    Attributes:
        half_life_s: after so many seconds GPU time counts half.
        grace_s: how long a GPU is kept for another user who could take it. Longer than the quiet time after which a
            free GPU is taken.
        keep_share: GPUs are kept for a job that needs more than are free during this share of the time it waits.
        quantum_s: what a GPU that is held counts, in GPU-seconds, in addition to the time for which it has been held.
        slice_s: by so many GPU-seconds a user may be ahead and go on with a GPU that the user's own job has left.
    """

    half_life_s: float = HALF_LIFE_S
    grace_s: float = 30.0
    keep_share: float = 0.2
    quantum_s: float = 300.0
    slice_s: float = 60.0


RULES = TurnRules()


@dataclass(frozen=True, slots=True)
class Ticket:
    """A gpuherd that waits for GPUs.

    Attributes:
        key: unique among the tickets.
        uid: of its user, by the kernel.
        since: when it began to wait, or last took a GPU.
        gpus: the most GPUs that it could put to use now.
        smallest: the fewest with which one of its jobs could start.
        usable: UUIDs of the GPUs that it could use; None for any.
        job_s: expected seconds of one of its jobs, for predictions only; None where that is not known.
        jobs: how many jobs wait, for predictions only. It counts as at least as many as could start on ``gpus``.
    """

    key: str
    uid: int
    since: float
    gpus: int = 1
    smallest: int = 1
    usable: frozenset[str] | None = None
    job_s: float | None = None
    jobs: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What a user has had: GPU-seconds, decayed (``decayed``), GPUs that the user holds now, and the user's weight."""

    used_s: float = 0.0
    held: int = 0
    weight: float = 1.0

    def value(self, more: int, rules: TurnRules) -> float:
        """The load with ``more`` further GPUs, in GPU-seconds for a weight of 1: the lowest goes first."""
        return (self.used_s + rules.quantum_s * (self.held + more)) / self.weight


@dataclass(frozen=True, slots=True)
class Assignment:
    """For whom free GPUs are meant.

    Attributes:
        to: UUIDs by ticket; () for a ticket that gets none.
        order: the tickets in the order of their users' loads before anything was assigned.
        until: by ticket that gets any, when the first of them are kept for it no longer; ``inf`` for one's own.
    """

    to: Mapping[str, frozenset[str]]
    order: tuple[Ticket, ...] = ()
    until: Mapping[str, float] = field(default_factory=dict)

    def ahead_of(self, key: str) -> tuple[Ticket, ...]:
        """The tickets of other users for which GPUs are kept, in order."""
        mine = self._uid_of(key)
        return tuple(ticket for ticket in self.order if self.to[ticket.key] and ticket.uid != mine)

    def kept_for_others(self, key: str) -> dict[str, Ticket]:
        """By UUID, the tickets of other users for which the GPUs are kept that this ticket must leave alone."""
        return {uuid: ticket for ticket in self.ahead_of(key) for uuid in self.to[ticket.key]}

    def allowed(self, key: str, free: Iterable[str]) -> frozenset[str]:
        """Which of the free GPUs this ticket may take: those that are meant for no other user."""
        return frozenset(free) - self.kept_for_others(key).keys()

    def _uid_of(self, key: str) -> int | None:
        return next((ticket.uid for ticket in self.order if ticket.key == key), None)


@dataclass(slots=True)
class _Turn:
    """A ticket while GPUs are assigned."""

    ticket: Ticket
    given: set[str] = field(default_factory=set)
    until: float = math.inf
    over: bool = False

    def usable(self, free: Iterable[str]) -> list[str]:
        usable = self.ticket.usable
        return [uuid for uuid in free if usable is None or uuid in usable]


def assign(
    free: Mapping[str, float],
    tickets: Iterable[Ticket],
    loads: Mapping[int, Load],
    *,
    now: float,
    me: str | None = None,
    held: AbstractSet[str] = frozenset(),
    rules: TurnRules = RULES,
) -> Assignment:
    """For whom each free GPU is meant.

    Args:
        free: by UUID, the time since which it was seen free.
        tickets: of all users who wait, one's own too.
        loads: by uid; a user who is missing has had nothing.
        me: the key of one's own ticket, for which nothing lapses.
        held: GPUs that gpuherds hold, and that will come back one day.
    """
    turns = [_Turn(ticket) for ticket in tickets if 0 < ticket.smallest <= ticket.gpus]
    left = dict(free)
    wanted = {uuid: len({turn.ticket.uid for turn in turns if turn.usable([uuid])}) for uuid in free}
    assigned: dict[int, int] = {}

    def place(turn: _Turn) -> tuple[float, float, int, str]:
        ticket = turn.ticket
        load = loads.get(ticket.uid, Load())
        return load.value(assigned.get(ticket.uid, 0), rules), ticket.since, ticket.uid, ticket.key

    order = tuple(turn.ticket for turn in sorted(turns, key=place))
    open_turns = turns
    while left and open_turns:
        turn = min(open_turns, key=place)
        chosen, until = _next_gpus(turn, left, wanted, now, held, rules, mine=turn.ticket.key == me)
        if chosen:
            for uuid in chosen:
                del left[uuid]
            turn.given.update(chosen)
            turn.until = min(turn.until, until)
            assigned[turn.ticket.uid] = assigned.get(turn.ticket.uid, 0) + len(chosen)
        if len(chosen) < turn.ticket.smallest or len(turn.given) + turn.ticket.smallest > turn.ticket.gpus:
            turn.over = True
            open_turns = [each for each in open_turns if not each.over]
    to = {turn.ticket.key: frozenset(turn.given) for turn in turns}
    return Assignment(to, order, {turn.ticket.key: turn.until for turn in turns if turn.given})


def _next_gpus(
    turn: _Turn,
    left: Mapping[str, float],
    wanted: Mapping[str, int],
    now: float,
    held: AbstractSet[str],
    rules: TurnRules,
    *,
    mine: bool,
) -> tuple[list[str], float]:
    """The GPUs of the ticket's next unit, and until when they are kept for it. Fewer where they are kept until others
    give the missing ones back, [] where it gets none. ``wanted``: by UUID, how many users could use it."""
    ticket = turn.ticket
    usable = turn.usable(left)
    if len(usable) >= ticket.smallest:
        lapses = {uuid: math.inf if mine else max(left[uuid], ticket.since) + rules.grace_s for uuid in usable}
        # What it could have had for longer than the grace it did not want. With one more GPU it may want it after all.
        if now >= max(lapses.values()):
            return [], now
        # First those that the fewest users could use.
        chosen = sorted(usable, key=lambda uuid: (now >= lapses[uuid], wanted[uuid], uuid))[: ticket.smallest]
        return chosen, max(lapses[uuid] for uuid in chosen)
    if turn.given or not usable or len(usable) + len(turn.usable(held)) < ticket.smallest:
        return [], now
    until = math.inf if mine else window_end(now - ticket.since, rules)
    return ([], now) if until is None else (usable, ticket.since + until)


def window_end(waited_s: float, rules: TurnRules = RULES) -> float | None:
    """When a ticket that has waited for so long is in a window in which GPUs are kept for a job that needs more than
    are free: the waiting time at which the window ends. None between two windows.

    The first lasts for the grace; then it is the last ``keep_share`` of each period that doubles the waiting time.

    >>> rules = TurnRules(grace_s=30.0, keep_share=0.2)
    >>> [window_end(waited, rules) for waited in (10.0, 40.0, 55.0, 100.0, 110.0, 230.0)]
    [30.0, None, 60.0, None, 120.0, 240.0]
    """
    if waited_s < rules.grace_s:
        return rules.grace_s
    first_s = max(rules.grace_s, _SHORTEST_WINDOW_S)
    begin = first_s * 2.0 ** math.floor(math.log2(max(1.0, waited_s / first_s)))
    return 2 * begin if waited_s >= (2 - rules.keep_share) * begin else None


def goes_on(mine: Load, other: Load, more: int, rules: TurnRules = RULES) -> bool:
    """Whether a user may take again a GPU that the user's own job has just left, though it is another user's turn.

    ``more``: how many others the user goes on with at the same time.

    >>> goes_on(Load(used_s=1050.0), Load(used_s=1000.0), 0), goes_on(Load(used_s=1070.0), Load(used_s=1000.0), 0)
    (True, False)
    """
    return mine.value(more, rules) - rules.slice_s / mine.weight <= other.value(0, rules)


def decayed(used_s: float, age_s: float, half_life_s: float) -> float:
    """GPU-seconds that ended ``age_s`` ago, as they count now.

    >>> decayed(100.0, 7 * 86400.0, 7 * 86400.0)
    50.0
    """
    return float(used_s * 2.0 ** (-max(0.0, age_s) / half_life_s))
