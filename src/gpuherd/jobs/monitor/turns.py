"""Whose turn it is, for people: who waits for this machine's GPUs, and when a gpuherd's next job is expected to start.

Read from tickets, leases and the ledger by whoever looks, also where their own gpuherd does not run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import GpuherdError, clean
from gpuherd.gpus.lease_files import base_name, names_in, user_name
from gpuherd.gpus.leases import LeaseFolder
from gpuherd.gpus.tickets import ENDING
from gpuherd.gpus.turn_prediction import HeldGpu, Prediction, predict_start
from gpuherd.gpus.turns import Ticket
from gpuherd.jobs import clock
from gpuherd.jobs.dispatcher_state import DispatcherState
from gpuherd.jobs.gpu.turns import Line, line_now
from gpuherd.jobs.settings import NO_SETTINGS, Settings, load
from gpuherd.units import counted, duration

# A prediction lets a GPU that another user's job left be quiet for so long: the default quiet time.
_QUIET_S = 9.0
# Holds GPUs of which no one can say who does.
_NOBODY = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingUser:
    """A user whose gpuherds wait for GPUs.

    Attributes:
        user, uid: by the kernel.
        gpus: how many they could put to use now.
        smallest: with how many the first of their jobs could start.
        waited_s: for how long they wait, or since they last took one.
        held: GPUs that they hold.
        used_h: GPU-hours used of late, older ones counting less.
        weight: by the machine's policy.
    """

    user: str
    uid: int
    gpus: int
    smallest: int
    waited_s: float
    held: int
    used_h: float
    weight: float

    @property
    def sentence(self) -> str:
        """For people.

        >>> WaitingUser(
        ...     user="bob", uid=7, gpus=2, smallest=1, waited_s=240.0, held=1, used_h=3.24, weight=1.0
        ... ).sentence
        'bob (2 GPUs, for 4 min; holds 1, 3.2 GPU-hours of late)'
        """
        weight = "" if self.weight == 1 else f", weight {self.weight:g}"
        at_once = f" at least {self.smallest} at once," if self.smallest > 1 else ""
        return (
            f"{clean(self.user)} ({counted(self.gpus, 'GPU')},{at_once} for {duration(self.waited_s, parts=1)};"
            f" holds {self.held}, {self.used_h:.1f} GPU-hours of late{weight})"
        )


def waiting_users(line: Line | None) -> tuple[WaitingUser, ...]:
    """The users who wait, in the order of their turns."""
    if line is None:
        return ()
    of_user: dict[int, list[Ticket]] = {}
    for ticket in line.tickets:
        if ticket.gpus >= ticket.smallest:
            of_user.setdefault(ticket.uid, []).append(ticket)
    return tuple(
        WaitingUser(
            user=user_name(uid),
            uid=uid,
            gpus=sum(ticket.gpus for ticket in tickets),
            smallest=min(ticket.smallest for ticket in tickets),
            waited_s=max(0.0, line.at - min(ticket.since for ticket in tickets)),
            held=line.loads[uid].held,
            used_h=line.loads[uid].used_s / 3600,
            weight=line.loads[uid].weight,
        )
        for uid, tickets in of_user.items()
    )


def read_line(settings: Settings | None = None) -> Line | None:
    """Who waits on this machine now, None for no one, and where that can't be read: for views, which go on without."""
    try:
        folder = LeaseFolder.existing()
        # Cheap where no one waits, as for most of the time.
        if folder is None or not any(name.endswith(ENDING) for name in names_in(folder.path)):
            return None
        return line_now(_settings() if settings is None else settings, folder)
    except (GpuherdError, OSError):
        return None


def _settings() -> Settings:
    try:
        return load()
    except GpuherdError:  # a wrong settings file prevents starting jobs, but not looking
        return NO_SETTINGS


# --- when a gpuherd's next job starts ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Where a gpuherd stands among all that wait.

    Attributes:
        users: all who wait, in the order of their turns; one's own user too.
        uid: one's own.
        starts_at: the second since 1970 at which the job is expected to start; None where that can't be said.
        before: GPUs that other users get before that, by name.
        unknown: how many GPUs in use have no known end, so that the start may come sooner.
    """

    users: tuple[WaitingUser, ...]
    uid: int
    starts_at: float | None = None
    before: Mapping[str, int] | None = None
    unknown: int = 0

    @property
    def ahead(self) -> tuple[WaitingUser, ...]:
        """The users whose turn comes before one's own."""
        mine = next((place for place, user in enumerate(self.users) if user.uid == self.uid), len(self.users))
        return self.users[:mine]

    @property
    def others(self) -> tuple[WaitingUser, ...]:
        """The other users who wait."""
        return tuple(user for user in self.users if user.uid != self.uid)

    def start_sentence(self, now: float) -> str:
        """When the job is expected to start, for people; ``now``: seconds since 1970."""
        if self.starts_at is None:
            why = f"the end of {counted(self.unknown, 'job')} on GPUs is not known" if self.unknown else "too far ahead"
            return f"when it starts can't be predicted: {why}"
        form = "%H:%M" if self.starts_at - now < 12 * 3600 else "%a %H:%M"
        at = time.strftime(form, time.localtime(self.starts_at))
        first = [f"{clean(user)} has got {counted(gpus, 'GPU')}" for user, gpus in (self.before or {}).items()]
        after = f", after {' and '.join(first)}" if first else ""
        return f"starts at about {at}, in {duration(max(0.0, self.starts_at - now))}{after}"

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "starts_at": self.starts_at,
            "before": dict(self.before or {}),
            "unknown_ends": self.unknown,
            "waiting": users_as_json(self.users),
        }


def users_as_json(users: tuple[WaitingUser, ...]) -> list[dict[str, Any]]:
    """Users who wait as plain data, in the order of their turns; times in seconds, usage in GPU-hours."""
    names = ("user", "uid", "gpus", "smallest", "waited_s", "held", "used_h", "weight")
    return [{name: _rounded(getattr(user, name)) for name in names} for user in users]


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def turn_of(pid: int, state: DispatcherState | None, nth: int = 1, line: Line | None = None) -> Turn | None:
    """Where the gpuherd with this pid stands; None where no other user waits, or it does not wait for GPUs.

    Args:
        state: its last state, with the GPUs that it may use.
        nth: for a job further back in its queue the GPUs of the jobs before it, and its own.
        line: who waits, where that was read already.
    """
    line = line or read_line()
    if line is None or not line.policy.enabled:
        return None
    mine = next((ticket for ticket in line.tickets if ticket.key.split(".")[1] == str(pid)), None)
    users = waiting_users(line)
    if mine is None or mine.gpus < mine.smallest or all(user.uid == mine.uid for user in users):
        return None
    found = _predict(line, mine, state, nth)
    names = {ticket.key: user_name(ticket.uid) for ticket in line.tickets}
    before: Counter[str] = Counter()
    for key, gpus in found.before.items():
        before[names[key]] += gpus
    at = None if found.at is None else clock.wall() + found.at - line.at
    return Turn(users=users, uid=mine.uid, starts_at=at, before=before, unknown=len(found.unknown))


def _predict(line: Line, mine: Ticket, state: DispatcherState | None, nth: int) -> Prediction:
    uuids = {base_name(gpu.uuid): gpu for gpu in (() if state is None else state.gpus)}
    began = _began(list(line.holders))
    lengths = {ticket.uid: ticket.job_s for ticket in reversed(line.tickets) if ticket.job_s is not None}
    held = []
    for name, uid in line.holders.items():
        job_s = None if uid is None else lengths.get(uid)
        since = began.get(name)
        until = None if job_s is None or since is None else since + job_s
        uuid = uuids[name].uuid if name in uuids else name
        held.append(HeldGpu(uuid, _NOBODY if uid is None else uid, until, mine.key if uid == mine.uid else None))
    free = {gpu.uuid: line.at for gpu in uuids.values() if gpu.busy is None or gpu.kept}
    free = {uuid: since for uuid, since in free.items() if base_name(uuid) not in line.holders}
    return predict_start(
        mine.key,
        line.tickets,
        held,
        line.loads,
        now=line.at,
        free=free,
        nth=nth,
        quiet_s=_QUIET_S,
        rules=line.policy.rules,
    )


def _began(names: list[str]) -> dict[str, float]:
    """Since when each GPU is held, in seconds since boot, by the notes of their leases."""
    folder = LeaseFolder.existing()
    if folder is None:
        return {}
    shift = clock.mono() - clock.wall()
    holders = folder.holders(names)
    return {name: holder.since + shift for name, holder in holders.items() if holder.since is not None}
