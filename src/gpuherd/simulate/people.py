"""The users of a simulated machine: from words, with the jobs of each, and what each of them got. Pure."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gpuherd.errors import UsageError
from gpuherd.options import did_you_mean
from gpuherd.simulate.options import number
from gpuherd.simulate.results import Ending, History, Waits, busy_spans, waits_of
from gpuherd.simulate.workload import Work
from gpuherd.units import amount, duration_s

MOST_USERS = 64

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,31}", re.ASCII)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class User:
    """A user who shares the machine.

    Attributes:
        weight: the share of the machine that is theirs, compared with the weights of the others.
        arrives_s: second at which their first jobs come.
        used_s: GPU-seconds that they have used of late, before the simulation begins.
    """

    name: str
    weight: float = 1.0
    arrives_s: float = 0.0
    used_s: float = 0.0


def users(word: str) -> tuple[User, ...]:
    """Users with their weights: ``alice:2,bob:1,carol``. Raises ValueError with a sentence.

    >>> users("alice:2,bob")
    (User(name='alice', weight=2.0, arrives_s=0.0, used_s=0.0), User(name='bob', weight=1.0, arrives_s=0.0, used_s=0.0))
    """
    found: dict[str, User] = {}
    for part in word.split(","):
        name, colon, weight = part.strip().partition(":")
        _check_name(name)
        if name in found:
            raise ValueError(f"{word!r} names {name} twice")
        message = f"{part!r}: a weight is a number above 0, at most 1000; write alice:2"
        found[name] = User(name, number(weight, lambda value: 0 < value <= 1000, message) if colon else 1.0)
    if len(found) > MOST_USERS:
        raise ValueError(f"{len(found)} users; at most {MOST_USERS} can be simulated")
    return tuple(found.values())


def by_user(word: str, parse: Callable[[str], T]) -> Mapping[str, T]:
    """A value for each user that the word names: ``bob=30m,carol=1h``. Raises ValueError with a sentence.

    >>> by_user("bob=30m,carol=1h", duration_s)
    {'bob': 1800.0, 'carol': 3600.0}
    """
    found: dict[str, T] = {}
    for part in word.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise ValueError(f"{part!r} gives no user a value; write {name or 'bob'}=…")
        _check_name(name)
        if name in found:
            raise ValueError(f"{word!r} names {name} twice")
        found[name] = parse(value)
    return found


def arrivals(word: str) -> Mapping[str, float]:
    """Seconds at which users come: ``bob=30m``."""
    return by_user(word, duration_s)


def hours_used(word: str) -> Mapping[str, float]:
    """GPU-seconds that users have used of late, from GPU-hours: ``alice=12.5``."""
    return {name: hours * 3600 for name, hours in by_user(word, amount).items()}


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a user; letters, digits and _.@- make one, 32 at most")


def with_histories(
    found: Sequence[User], arrives_s: Mapping[str, float], used_s: Mapping[str, float]
) -> tuple[User, ...]:
    """The users with what two further options say of some of them. Raises UsageError for users who are not there."""
    names = [user.name for user in found]
    for flag, given in (("--user-arrives", arrives_s), ("--user-hours", used_s)):
        for name in given:
            if name not in names:
                hint = did_you_mean(name, names, f"there are {', '.join(names)}")
                raise UsageError(f"{flag} {name}: there is no such user{hint}")
    return tuple(
        replace(user, arrives_s=arrives_s.get(user.name, 0.0), used_s=used_s.get(user.name, 0.0)) for user in found
    )


def works_of(jobs: Iterable[tuple[User, Sequence[Work]]]) -> tuple[Work, ...]:
    """The jobs of all users in the order of their arrival, each with its user's name."""
    together = [
        replace(work, user=user.name, arrives_s=work.arrives_s + user.arrives_s)
        for user, works in jobs
        for work in works
    ]
    return tuple(sorted(together, key=lambda work: work.arrives_s))


def with_expected_costs(works: Sequence[Work], seconds: float = 1.0) -> tuple[Work, ...]:
    """The jobs, each expected to run for so many seconds for each unit of its cost."""
    return tuple(work if work.job.cost is None else replace(work, expected_s=work.job.cost * seconds) for work in works)


# What each user got. A user's share is compared with the weights for the time in which they wait while others wait
# too: a user who has no more jobs waiting leaves the rest to the others.


@dataclass(frozen=True, kw_only=True, slots=True)
class UserFigures:
    """The figures of a user.

    Attributes:
        name, weight: as given.
        arrives_s: when the first of their jobs came.
        jobs, done: numbers of jobs.
        gpu_hours: hours for which their jobs held GPUs; a shared GPU counts once.
        share: the part of all users' GPU-hours; None when nothing ran on a GPU.
        contended_gpu_hours: those during which they and others had jobs that waited for GPUs.
        due_gpu_hours: what the weights of those who waited would have given them of the same GPUs.
        waits: None when nothing started.
        first_gpu_s: when they got their first GPU; None when they never did.
        predicted_s: when that was predicted at the moment they began to wait; None when it could not be.
    """

    name: str
    weight: float
    arrives_s: float
    jobs: int
    done: int
    gpu_hours: float
    share: float | None
    contended_gpu_hours: float
    due_gpu_hours: float
    waits: Waits | None
    first_gpu_s: float | None
    predicted_s: float | None

    @property
    def of_due(self) -> float | None:
        """What they got while others waited too, as a multiple of what was due; None where nobody else waited."""
        return self.contended_gpu_hours / self.due_gpu_hours if self.due_gpu_hours > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; docs/what-if.md describes it."""
        return {
            "name": self.name,
            "weight": self.weight,
            "arrives_seconds": round(self.arrives_s, 3),
            "jobs": self.jobs,
            "done": self.done,
            "gpu_hours": round(self.gpu_hours, 6),
            "share": _rounded(self.share, 4),
            "contended_gpu_hours": round(self.contended_gpu_hours, 6),
            "due_gpu_hours": round(self.due_gpu_hours, 6),
            "of_due": _rounded(self.of_due, 4),
            "wait_seconds": None if self.waits is None else self.waits.to_dict(),
            "first_gpu_seconds": _rounded(self.first_gpu_s, 3),
            "predicted_seconds": _rounded(self.predicted_s, 3),
        }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def user_figures(history: History, works: Sequence[Work]) -> tuple[UserFigures, ...]:
    """The figures of each user of a run of these works, in the order of the users."""
    spans = {
        user.name: [
            span
            for gpu in busy_spans(
                replace(history, attempts=tuple(each for each in history.attempts if works[each.job].user == user.name))
            ).values()
            for span in gpu
        ]
        for user in history.users
    }
    hours = {name: sum(end - start for start, end in each) / 3600 for name, each in spans.items()}
    total = sum(hours.values())
    had, due = _contended(history, spans)
    waits: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    done: dict[str, int] = defaultdict(int)
    first: dict[str, float] = {}
    for attempt in history.attempts:
        name = works[attempt.job].user
        waits[name][attempt.job] += attempt.wait_s
        done[name] += attempt.ending is Ending.DONE
        if attempt.gpus:
            first[name] = min(first.get(name, math.inf), attempt.start)
    return tuple(
        UserFigures(
            name=user.name,
            weight=user.weight,
            arrives_s=min((work.arrives_s for work in works if work.user == user.name), default=0.0),
            jobs=sum(work.user == user.name for work in works),
            done=done[user.name],
            gpu_hours=hours[user.name],
            share=hours[user.name] / total if total > 0 else None,
            contended_gpu_hours=had[user.name] / 3600,
            due_gpu_hours=due[user.name] / 3600,
            waits=waits_of(list(waits[user.name].values())),
            first_gpu_s=first.get(user.name),
            predicted_s=user.predicted_s,
        )
        for user in history.users
    )


def _contended(
    history: History, spans: Mapping[str, Sequence[tuple[float, float]]]
) -> tuple[dict[str, float], dict[str, float]]:
    """GPU-seconds that each user had, and those due by the weights, while they and others waited for GPUs."""
    events: list[tuple[float, int, str, int]] = []
    for user in history.users:
        for start, end in user.waiting:
            events += [(start, 0, user.name, 1), (end, 0, user.name, -1)]
        for start, end in spans[user.name]:
            events += [(start, 1, user.name, 1), (end, 1, user.name, -1)]
    weights = {user.name: user.weight for user in history.users}
    waiting, held = dict.fromkeys(weights, 0), dict.fromkeys(weights, 0)
    had, due = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)
    before = 0.0
    for time, kind, name, change in sorted(events):
        contenders = [each for each, waits in waiting.items() if waits]
        if time > before and len(contenders) > 1:
            gpus = sum(held[each] for each in contenders)
            weight = sum(weights[each] for each in contenders)
            for each in contenders:
                had[each] += held[each] * (time - before)
                due[each] += gpus * weights[each] / weight * (time - before)
        (held if kind else waiting)[name] += change
        before = time
    return had, due
