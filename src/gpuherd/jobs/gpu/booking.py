"""Making and cancelling reservations: which GPUs a new one gets, and why it can't be made.

``choose_gpus`` decides, purely; ``make`` writes the file and looks whether another was faster. ``reserved`` keeps to
them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuherd.errors import CannotWrite, ExitCode, GpuherdError, UsageError, clean
from gpuherd.gpus.lease_files import user_name
from gpuherd.gpus.reservation_files import LONGEST_NAME, MOST_OF_USER, ReservationFolder, find
from gpuherd.gpus.reservations import Reservation, Standing, State, free_between, standings, when, why_refused
from gpuherd.gpus.state import Gpu
from gpuherd.gpus.visible import find as find_gpus
from gpuherd.gpus.visible import is_named
from gpuherd.jobs.gpu.reserved import standings_now
from gpuherd.jobs.settings import NO_SETTINGS, Settings
from gpuherd.units import counted, duration

# So many others may be faster before it is given up.
_TRIES = 5
# The kernel's times of files have ticks: what is written after this one has a later time than ours.
_TICK_S = 0.02
# What was meant as "now" is a moment ago when it is checked.
_JUST_NOW_S = 60.0
# Of one user's reservations that have not ended; ended ones are kept for the calendar.
_MOST_OPEN = MOST_OF_USER // 2


class CannotReserve(GpuherdError):
    """The GPUs are reserved by others at that time, or there are not so many."""

    exit_code = ExitCode.BUSY


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be reserved.

    Attributes:
        gpus: how many GPUs.
        gpu_ids: which, by the ids that people give; () for any.
        since, until: seconds since 1970.
        name: for people.
    """

    gpus: int
    since: float
    until: float
    gpu_ids: tuple[str, ...] = ()
    name: str = ""


def reservable(gpus: Sequence[Gpu], settings: Settings = NO_SETTINGS) -> tuple[Gpu, ...]:
    """The GPUs that can be reserved: those that jobs can use, and that the policy does not keep from gpuherd."""
    excluded = settings.policy.exclude_gpus
    return tuple(gpu for gpu in gpus if not gpu.mig_instances and gpu.problem is None and not is_named(gpu, excluded))


def choose_gpus(
    request: Request, gpus: Sequence[Gpu], found: Sequence[Standing], settings: Settings, *, uid: int, now: float
) -> tuple[Gpu, ...]:
    """The GPUs for a new reservation.

    Args:
        gpus: all of the machine.
        found: all reservations, as they stand now.

    Raises:
        UsageError: it is beyond the user's limits, in the past, or names a GPU that is not there.
        CannotReserve: too few GPUs are free for the whole time. The message says who has them.
    """
    name = user_name(uid)
    rules, limits = settings.policy.reservation_rules, settings.policy.reservation_limits(name)
    if not rules.enabled:
        raise UsageError(f"reservations are turned off on this machine, by {settings.policy.path}")
    if request.since < now - _JUST_NOW_S:
        raise UsageError(f"{when(request.since, now)} is in the past; let the reservation begin now or later")
    if request.until <= request.since:
        raise UsageError("the reservation ends before it begins")
    if sum(each.reservation.uid == uid and each.is_open(now) for each in found) >= _MOST_OPEN:
        raise UsageError(f"you have {_MOST_OPEN} reservations, which is the most; cancel some first")
    there = reservable(gpus, settings)
    if request.gpu_ids:
        there = find_gpus(there, request.gpu_ids)
        request = replace(request, gpus=len(there))
    whole = [gpu for gpu in there if gpu.mig_parent is None]
    candidates = list(there) if request.gpu_ids or not whole else whole
    if request.gpus > len(candidates):
        raise CannotReserve(f"{counted(request.gpus, 'GPU')} can't be reserved; this machine has {len(candidates)}")
    # As every other gpuherd will judge it.
    draft = Reservation("", uid, request.gpus, ("",) * request.gpus, request.since, request.until, made=now)
    problem = why_refused(draft, limits)
    if problem is None:
        fresh = [f"new {number}" for number in range(request.gpus)]
        draft = replace(
            draft, id="new", uuids=tuple(fresh), made=max(now, *(each.reservation.made for each in found), 0)
        )
        own = [each.reservation for each in found if each.reservation.uid == uid]
        judged = standings([*own, draft], now=now, rules=rules, limits_of=lambda _: limits)
        problem = next(each.problem for each in judged if each.reservation is draft)
    if problem is not None:
        raise UsageError(f"the reservation {problem}, for {name} on this machine")
    free = free_between(found, [gpu.uuid for gpu in candidates], request.since, request.until, now)
    if len(free) < request.gpus:
        raise CannotReserve(_who_has(request, candidates, found, free, now))
    by_uuid = {gpu.uuid: gpu for gpu in candidates}
    chosen = [by_uuid[uuid] for uuid in free[: request.gpus]]
    return tuple(sorted(chosen, key=lambda gpu: [each.uuid for each in there].index(gpu.uuid)))


def _who_has(
    request: Request, candidates: Sequence[Gpu], found: Sequence[Standing], free: Sequence[str], now: float
) -> str:
    labels = {gpu.uuid: gpu.label for gpu in candidates}
    having = []
    for each in found:
        one = each.reservation
        theirs = [labels[uuid] for uuid in labels if uuid in each.uuids]
        if theirs and each.is_open(now) and one.since < request.until and each.until > request.since:
            name = f", {one.name}" if one.name else ""
            span = f"from {when(one.since, now)} until {when(one.until, now)}"
            having.append(f"{user_name(one.uid)} has GPU {', '.join(theirs)} {span} ({one.id}{name})")
    wanted = "these GPUs are" if request.gpu_ids else f"{counted(request.gpus, 'GPU')} are"
    span = f"from {when(request.since, now)} until {when(request.until, now)}"
    return f"{wanted} not free {span}: {len(free)} of {len(candidates)} are; {'; '.join(having)}"


def make(request: Request, gpus: Sequence[Gpu], settings: Settings, now: float) -> tuple[Standing, ReservationFolder]:
    """Makes a reservation of this user's. Returns it, and the folder that it is in.

    Raises as ``choose_gpus``, and CannotWrite.
    """
    uid = os.geteuid()
    folder = ReservationFolder.made()
    folder.tidy(now)
    for _ in range(_TRIES):
        chosen = choose_gpus(request, gpus, standings_now(settings.policy, now, folder), settings, uid=uid, now=now)
        name = clean(request.name)[:LONGEST_NAME]
        made = folder.add([gpu.uuid for gpu in chosen], request.since, request.until, name)
        time.sleep(_TICK_S)
        for each in standings_now(settings.policy, now, folder):
            if each.reservation.id == made.id and each.problem is None:
                return each, folder
        # Another user's was made at the same moment, and first.
        folder.remove(made)
    raise CannotWrite(f"the reservation could not be made in {folder.path}: others were faster each time; try again")


def cancel(wanted: str) -> Reservation:
    """Cancels a reservation of this user's; root any. Returns it. Raises UsageError, and CannotWrite for another's."""
    folder = ReservationFolder.existing()
    uid = os.geteuid()
    reservation = find(() if folder is None else folder.read(), wanted, uid)
    if folder is None or uid not in (0, reservation.uid):
        raise CannotWrite(
            f"reservation {reservation.id} is {user_name(reservation.uid)}'s; only they and root can cancel"
        )
    folder.remove(reservation)
    return reservation


def labels_of(standing: Standing, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """The labels of its GPUs, in the machine's order; the UUIDs of those that the machine has no more."""
    there = {gpu.uuid: gpu.label for gpu in gpus}
    uuids = standing.uuids or frozenset(standing.reservation.uuids)
    return (*(there[uuid] for uuid in there if uuid in uuids), *sorted(uuids - there.keys()))


def state_words(standing: Standing, now: float) -> str:
    """Its state for people.

    ``in force, used 3 min ago``, ``lapsed Fri 18:30: unused``, ``not honoured: lasts 9 d 0 h; …``.
    """
    one, state = standing.reservation, standing.state(now)
    words: str = state.value
    if state is State.LAPSED:
        words = f"lapsed {when(standing.until, now)}: unused"
    elif state is State.IN_FORCE:
        words += ", not used yet" if one.used is None else f", used {duration(max(0.0, now - one.used), parts=1)} ago"
    elif state is State.TO_COME:
        words = f"in {duration(one.since - now)}"
    return words if standing.problem is None else f"{words}: {standing.problem}"


def as_json(standing: Standing, gpus: Sequence[Gpu], now: float) -> Mapping[str, Any]:
    """A reservation as plain data; the schema is in docs/reservations.md."""
    one = standing.reservation
    return {
        "id": one.id,
        "user": user_name(one.uid),
        "uid": one.uid,
        "name": one.name or None,
        "gpus": len(standing.uuids),
        "labels": list(labels_of(standing, gpus)),
        "uuids": sorted(standing.uuids),
        "requested": one.gpus,
        "since": one.since,
        "until": one.until,
        "state": standing.state(now).value.replace(" ", "_"),
        "problem": standing.problem,
        "used_at": one.used,
        "lapsed_at": standing.lapsed_at,
    }
