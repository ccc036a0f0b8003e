"""The files of reservations: one for each, of its owner's, in the folder that gpuherds of the machine share.

``<uid>-<digits>.reservation`` is written once, and ``<uid>-<digits>.used`` next to it, empty, is touched while the
owner's gpuherd uses the reservation. Both count only if they belong to the user whose uid their name has, by the
kernel. When they were last changed is the kernel's word too (ctime): no user can set it to an earlier time.

The second file is made first: once the name is known, nobody else can put something in its place (the folder is
sticky). What a reservation is worth is decided in ``gpuherd.gpus.reservations``.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuherd.atomic import replacing
from gpuherd.errors import CannotWrite, UsageError, clean
from gpuherd.gpus.lease_files import user_name
from gpuherd.gpus.leases import Holder
from gpuherd.gpus.machine_dir import MachineDir, machine_dir, read_owned, why_unsafe
from gpuherd.gpus.reservations import Reservation

FOLDER = "reservations"
_ENDING, _MARK = ".reservation", ".used"
_NAME = re.compile(r"(\d{1,10})-[0-9a-f]{4,8}", re.ASCII)
_UUID = re.compile(r"[A-Za-z0-9_:./-]{1,100}", re.ASCII)
_MOST_BYTES = 64 << 10
_MOST_GPUS = 1024
LONGEST_NAME = 60
# So many of one user's are read, the newest; and so many that have ended are kept, for the calendar.
MOST_OF_USER = 64
_MOST_ENDED = 24
_KEPT_S = 35 * 86400.0
_LATEST = 1e11  # seconds since 1970: a time beyond it is none
_TRIES = 20


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it was read: what identifies its state, and the reservation in it, None for one that means nothing."""

    state: tuple[int, int, int, int]
    reservation: Reservation | None


class ReservationFolder:
    """The folder of reservations. It remembers what it has read: a look at files that have not changed opens none.

    Attributes:
        shared: all users of the machine have the same one; else it is one's own.
    """

    def __init__(self, path: Path, *, shared: bool) -> None:
        self.path, self.shared = path, shared
        self._files: dict[str, _File] = {}
        self._names: tuple[str, ...] = ()
        self._listed: tuple[int, int] | None = None

    @staticmethod
    def existing() -> ReservationFolder | None:
        """The folder that is in use here, None where there is none yet or it can't be relied on."""
        try:
            place = machine_dir()
            state = (place.path / FOLDER).lstat()
        except (OSError, RuntimeError):
            return None
        return None if why_unsafe(state) is not None else ReservationFolder(place.path / FOLDER, shared=place.shared)

    @staticmethod
    def made() -> ReservationFolder:
        """The folder, made if it is not there. Raises CannotWrite."""
        try:
            place: MachineDir = machine_dir()
        except RuntimeError:
            raise CannotWrite("there is no home folder to keep a reservation in; set GPUHERD_MACHINE_DIR") from None
        return ReservationFolder(place.make(FOLDER), shared=place.shared)

    # --- reading --------------------------------------------------------------------------------------------------

    def read(self) -> tuple[Reservation, ...]:
        """All reservations, of each user the newest ``MOST_OF_USER``; () where the folder can't be read."""
        of_user: dict[int, list[Reservation]] = defaultdict(list)
        files: dict[str, _File] = {}
        for name in self._list():
            file = self._look_at(name)
            if file is not None:
                files[name] = file
                if file.reservation is not None:
                    of_user[file.reservation.uid].append(file.reservation)
        self._files = files
        newest = (
            sorted(each, key=lambda one: (one.made, one.id), reverse=True)[:MOST_OF_USER] for each in of_user.values()
        )
        return tuple(self._with_use(each) for some in newest for each in some)

    def _list(self) -> tuple[str, ...]:
        """The names of reservations, listed again when the folder has changed."""
        try:
            state = self.path.lstat()
            listed = (state.st_ino, state.st_mtime_ns)
            if listed != self._listed:
                with os.scandir(self.path) as entries:
                    names = (entry.name for entry in entries)
                    self._names = tuple(sorted(name for name in names if _is_reservation(name)))
                # A second change may come within the same tick of the clock.
                self._listed = listed if abs(state.st_mtime - _now()) > 1.0 else None
        except OSError:
            self._names, self._listed = (), None
        return self._names

    def _look_at(self, name: str) -> _File | None:
        path = self.path / name
        try:
            state = path.lstat()
        except OSError:
            return None
        uid = int(name.partition("-")[0])
        if state.st_uid != uid or not stat.S_ISREG(state.st_mode):
            return None
        identity = (state.st_ino, state.st_ctime_ns, state.st_size, state.st_nlink)
        known = self._files.get(name)
        if known is not None and known.state == identity:
            return known
        found = read_owned(path, _MOST_BYTES + 1)
        reservation = None
        if found is not None and found[0] == uid and len(found[1]) <= _MOST_BYTES:
            reservation = parse(found[1], name.removesuffix(_ENDING), uid, state.st_ctime)
        return _File(identity, reservation)

    def _with_use(self, each: Reservation) -> Reservation:
        with suppress(OSError):
            state = (self.path / f"{each.id}{_MARK}").lstat()
            # It was made just before the reservation, which is no use of it.
            used = state.st_ctime if state.st_ctime > each.made else 0.0
            if state.st_uid == each.uid and stat.S_ISREG(state.st_mode) and used >= each.since:
                return replace(each, used=used)
        return each

    # --- writing --------------------------------------------------------------------------------------------------

    def add(self, uuids: Iterable[str], since: float, until: float, name: str = "") -> Reservation:
        """Makes a reservation of one's own. Raises CannotWrite."""
        chosen = tuple(uuids)
        values = {"uuids": list(chosen), "since": since, "until": until, "name": name}
        data = json.dumps(values, indent=1).encode() + b"\n"
        uid = os.geteuid()
        for number in range(_TRIES):
            # Others may have put something under every short name.
            identity = f"{uid}-{os.urandom(2 if number < _TRIES // 2 else 4).hex()}"
            path, mark = self.path / f"{identity}{_ENDING}", self.path / f"{identity}{_MARK}"
            if os.path.lexists(path):
                continue
            try:
                os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
                try:
                    with replacing(path, 0o644) as file:
                        file.write(data)
                    return replace(
                        Reservation(identity, uid, len(chosen), chosen, since, until, name), made=path.stat().st_ctime
                    )
                except BaseException:
                    mark.unlink(missing_ok=True)
                    raise
            except FileExistsError:
                continue
            except OSError as problem:
                raise CannotWrite(f"the reservation can't be written to {self.path}: {problem.strerror}") from None
        raise CannotWrite(f"no name is left for a reservation in {self.path}; remove what others have put there")

    def remove(self, reservation: Reservation) -> None:
        """Removes a reservation. Raises CannotWrite where that is not allowed."""
        try:
            (self.path / f"{reservation.id}{_ENDING}").unlink(missing_ok=True)
            (self.path / f"{reservation.id}{_MARK}").unlink(missing_ok=True)
        except OSError as problem:
            raise CannotWrite(f"reservation {reservation.id} can't be removed: {problem.strerror}") from None

    def mark_used(self, reservation: Reservation) -> None:
        """Marks that its owner, who is this user, uses it now. Raises OSError."""
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        path = self.path / f"{reservation.id}{_MARK}"
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            # Removed by root, or by hand. No mark comes back to a reservation that was cancelled meanwhile.
            if not (self.path / f"{reservation.id}{_ENDING}").exists():
                return
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.utime(fd)
        finally:
            os.close(fd)

    def tidy(self, now: float) -> None:
        """Removes what this user needs no more: reservations that ended long ago, marks without one, broken writes."""
        uid = os.geteuid()
        own = [each for each in self.read() if each.uid == uid]
        ended = sorted((each for each in own if each.until < now), key=lambda each: -each.until)
        for number, each in enumerate(ended):
            if number >= _MOST_ENDED or each.until < now - _KEPT_S:
                with suppress(CannotWrite):
                    self.remove(each)
        kept = set(self._names)
        with suppress(OSError):
            for path in self.path.glob(f".{uid}-*.tmp"):
                _remove_own(path, uid, before=now - 3600.0)
            for path in self.path.glob(f"{uid}-*{_MARK}"):
                if f"{path.name.removesuffix(_MARK)}{_ENDING}" not in kept:
                    _remove_own(path, uid, before=now - 3600.0)


def _now() -> float:
    import time

    return time.time()


def _is_reservation(name: str) -> bool:
    return name.endswith(_ENDING) and _NAME.fullmatch(name.removesuffix(_ENDING)) is not None


def _remove_own(path: Path, uid: int, before: float) -> None:
    with suppress(OSError):
        state = path.lstat()
        if state.st_uid == uid and state.st_mtime < before:
            path.unlink()


def parse(data: bytes, identity: str, uid: int, made: float) -> Reservation | None:
    """The reservation of a file's content; None for a content that is none."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    uuids, since, until = values.get("uuids"), _time(values.get("since")), _time(values.get("until"))
    if since is None or until is None or since >= until or not isinstance(uuids, list):
        return None
    if not all(isinstance(uuid, str) and _UUID.fullmatch(uuid) for uuid in uuids):
        return None
    if not 0 < len(set(uuids)) == len(uuids) <= _MOST_GPUS:
        return None
    name = values.get("name", "")
    shown = clean(name)[:LONGEST_NAME] if isinstance(name, str) else ""
    return Reservation(identity, uid, len(uuids), tuple(uuids), since, until, shown, made)


def _time(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LATEST:
        return None
    return float(value) if math.isfinite(value) else None


def find(reservations: Iterable[Reservation], wanted: str, uid: int) -> Reservation:
    """The reservation of this id; the digits after the uid do for one of this user's own.

    Raises UsageError if there is none.
    """
    there = tuple(reservations)
    for each in there:
        if each.id == wanted or (each.uid == uid and each.id == f"{uid}-{wanted}"):
            return each
    own = ", ".join(each.id for each in there if each.uid == uid)
    raise UsageError(f"there is no reservation {wanted!r}" + (f"; yours are {own}" if own else "; you have none"))


def leases_since(reservations: Iterable[Reservation], holders: Mapping[str, Holder]) -> dict[str, float]:
    """By id, since when a reservation's owner holds a GPU of it by a lease; without those where none is held.

    ``holders``: who holds each GPU, by UUID.
    """
    found: dict[str, float] = {}
    for each in reservations:
        owner = user_name(each.uid)
        times = [
            holder.since
            for uuid in each.uuids
            if (holder := holders.get(uuid)) is not None and holder.user == owner and holder.since is not None
        ]
        if times:
            found[each.id] = min(times)
    return found
