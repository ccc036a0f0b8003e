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
3. A GPU is kept free for another user's ticket for ``grace_s`` only, counted from when both were there: it may wait for
   something else.
4. Where too few GPUs are free for a ticket's smallest job, and others hold the missing ones, the free ones are kept for
   it for longer, in proportion to its waiting time (``keep_share``): so large jobs are not starved, and the time in
   which GPUs are kept idle is bounded.
5. A user alone has everything at once.

>>> tickets = [Ticket("a", uid=1, since=0.0, gpus=4), Ticket("b", uid=2, since=5.0, gpus=4)]
>>> loads = {1: Load(used_s=7200.0), 2: Load()}
>>> given = assign({"GPU-0": 0.0, "GPU-1": 0.0}, tickets, loads, now=10.0)
>>> sorted(given.to["b"]), sorted(given.to["a"])
(['GPU-0', 'GPU-1'], [])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

HALF_LIFE_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class TurnRules:
    """The rule's constants; an administrator sets them in the machine's policy.

    Attributes:
        half_life_s: after so many seconds GPU time counts half.
        grace_s: how long a GPU is kept for another user who could take it. Longer than the quiet time after which a
            free GPU is taken.
        keep_share: a GPU is kept for a job that needs more than are free for this share of the time it has waited.
        quantum_s: what a GPU that is held counts, in GPU-seconds, beside the time for which it has been held.
    """

    half_life_s: float = HALF_LIFE_S
    grace_s: float = 30.0
    keep_share: float = 0.1
    quantum_s: float = 3600.0


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
    """

    to: Mapping[str, frozenset[str]]
    order: tuple[Ticket, ...] = ()

    def ahead_of(self, key: str) -> tuple[Ticket, ...]:
        """The tickets of others for which GPUs are kept, in order."""
        return tuple(ticket for ticket in self.order if ticket.key != key and self.to[ticket.key])

    def allowed(self, key: str, free: Iterable[str]) -> frozenset[str]:
        """Which of the free GPUs this ticket may take: those that are meant for no other."""
        kept = frozenset[str]().union(*(gpus for other, gpus in self.to.items() if other != key))
        return frozenset(free) - kept


@dataclass(slots=True)
class _Turn:
    """A ticket while GPUs are assigned."""

    ticket: Ticket
    given: set[str] = field(default_factory=set)
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
    turns = [_Turn(ticket) for ticket in tickets if ticket.gpus > 0 and ticket.smallest <= ticket.gpus]
    left = dict(free)
    assigned: dict[int, int] = {}

    def place(turn: _Turn) -> tuple[float, float, str]:
        ticket = turn.ticket
        load = loads.get(ticket.uid, Load())
        return load.value(assigned.get(ticket.uid, 0), rules), ticket.since, ticket.key

    order = tuple(turn.ticket for turn in sorted(turns, key=place))
    while left and (open_turns := [turn for turn in turns if not turn.over]):
        turn = min(open_turns, key=place)
        chosen = _next_gpus(turn, left, open_turns, now, held, rules, mine=turn.ticket.key == me)
        if chosen:
            for uuid in chosen:
                del left[uuid]
            turn.given.update(chosen)
            assigned[turn.ticket.uid] = assigned.get(turn.ticket.uid, 0) + len(chosen)
        if len(chosen) < turn.ticket.smallest or len(turn.given) + turn.ticket.smallest > turn.ticket.gpus:
            turn.over = True
    to = {turn.ticket.key: frozenset(turn.given) for turn in turns}
    return Assignment(to, order)


def _next_gpus(
    turn: _Turn,
    left: Mapping[str, float],
    others: Iterable[_Turn],
    now: float,
    held: AbstractSet[str],
    rules: TurnRules,
    *,
    mine: bool,
) -> list[str]:
    """The GPUs of the ticket's next unit, fewer where they are kept until the others come, [] where it gets none."""
    ticket = turn.ticket

    def kept_s(uuid: str) -> float:
        return now - max(left[uuid], ticket.since)

    usable = turn.usable(left)
    fitting = usable if mine else [uuid for uuid in usable if kept_s(uuid) < rules.grace_s]
    if len(fitting) >= ticket.smallest:
        # First those that the fewest others could use.
        def wanted(uuid: str) -> tuple[int, str]:
            return sum(uuid in other.usable([uuid]) for other in others), uuid

        return sorted(fitting, key=wanted)[: ticket.smallest]
    if turn.given or len(usable) + len(turn.usable(held)) < ticket.smallest or len(usable) >= ticket.smallest:
        return []
    patience_s = max(rules.grace_s, rules.keep_share * (now - ticket.since))
    return [uuid for uuid in usable if mine or kept_s(uuid) < patience_s]


def decayed(used_s: float, age_s: float, half_life_s: float) -> float:
    """GPU-seconds that ended ``age_s`` ago, as they count now.

    >>> decayed(100.0, 7 * 86400.0, 7 * 86400.0)
    50.0
    """
    return float(used_s * 2.0 ** (-max(0.0, age_s) / half_life_s))
