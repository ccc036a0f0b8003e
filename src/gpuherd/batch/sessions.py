"""The user's sessions (``gpuherd session``) as files: what ``list`` shows, and requests to keep one.

A folder of the user's own, on each machine: ``<pid>.json`` for a session, replaced by its watcher at every change, and
``<pid>.keep``, which asks it to go on. Files of sessions that are over mean nothing and are removed by the next one.
Nothing depends on a record: a session whose folder can't be written is watched all the same.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpuherd.engines.process_tree import SESSION_VARIABLE, ProcessId, boot_id
from gpuherd.errors import CannotWrite, UsageError, clean
from gpuherd.gpus.machine_dir import machine_dir, read_owned

_MOST_BYTES = 65_536
_LONGEST_S = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """A session.

    Attributes:
        pid, start_ticks, boot: its command's process, which is the one that the user has started.
        watcher, watcher_ticks: the process that ends it.
        name: what others see; ``command``: its words, shortened; ``gpus``: labels of its GPUs.
        since: wall-clock second of its start.
        idle_after_s, idle_s: how long it may go unused, and how long it has as of the last look.
        ends_in_s, ending: when it ends if it is not used any more, from ``looked_at`` on, and which end that is.
        looked_at: wall-clock second of the last look.
        warned: the user was warned of the end.
    """

    pid: int
    start_ticks: int
    boot: str
    watcher: int
    watcher_ticks: int
    name: str
    command: str
    gpus: tuple[str, ...]
    since: float
    idle_after_s: float
    idle_s: float = 0.0
    ends_in_s: float = 0.0
    ending: str = "idle"
    looked_at: float = 0.0
    warned: bool = False

    @property
    def is_watched(self) -> bool:
        """Whether its watcher lives: without it nobody ends the session."""
        return ProcessId(self.watcher, self.watcher_ticks, self.boot).is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether its command, or its watcher, is there."""
        return ProcessId(self.pid, self.start_ticks, self.boot).is_alive() or self.is_watched


def folder() -> Path:
    """The folder of the user's sessions on this machine, made if it is not there.

    Raises CannotWrite where it can't be made, or is not the user's alone.
    """
    try:
        place = machine_dir().make("sessions") / str(os.geteuid())
        place.mkdir(mode=0o700, exist_ok=True)
        state = place.lstat()
    except RuntimeError:
        raise CannotWrite("you have no home folder to keep a list of sessions in") from None
    except OSError as problem:
        raise CannotWrite(f"the list of your sessions can't be kept: {problem.strerror}") from None
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise CannotWrite(f"{place} is not your own folder; its owner or root should remove it")
    return place


def write(place: Path, record: SessionRecord) -> None:
    """Writes the record. A failure is ignored: the next change tries again."""
    temporary = place / f".{record.pid}.{os.getpid()}.tmp"
    try:
        temporary.write_text(json.dumps(asdict(record)), encoding="utf-8")
        temporary.replace(place / f"{record.pid}.json")
    except OSError:
        with suppress(OSError):
            temporary.unlink()


def remove(place: Path, pid: int) -> None:
    """Removes the files of a session that is over."""
    for ending in ("json", "keep"):
        with suppress(OSError):
            (place / f"{pid}.{ending}").unlink()


def remove_dead(place: Path) -> None:
    """Removes the files of all sessions that are over, and what is no record."""
    with suppress(OSError):
        # Records come before requests, which belong to none where there is no record.
        for path in sorted(place.iterdir(), key=lambda path: path.suffix != ".json"):
            if path.stem.isdecimal() and not _is_of_live_session(path):
                with suppress(OSError):
                    path.unlink()


def _is_of_live_session(path: Path) -> bool:
    record = _record(path.with_suffix(".json"))
    return record is not None and record.is_alive


def read(place: Path) -> tuple[SessionRecord, ...]:
    """The sessions that are alive, the oldest first. What is no record of the user's is passed over."""
    found = []
    with suppress(OSError):
        for path in sorted(place.glob("*.json")):
            record = _record(path)
            if record is not None and record.is_alive:
                found.append(record)
    return tuple(sorted(found, key=lambda record: record.since))


def _record(path: Path) -> SessionRecord | None:
    owned = read_owned(path, _MOST_BYTES)
    if owned is None or owned[0] != os.geteuid():
        return None
    try:
        values = json.loads(owned[1])
        return _checked(values) if values["boot"] == boot_id() and f"{values['pid']}.json" == path.name else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _checked(values: dict[str, Any]) -> SessionRecord:
    numbers = ("since", "idle_after_s", "idle_s", "ends_in_s", "looked_at")
    whole = ("pid", "start_ticks", "watcher", "watcher_ticks")
    if not all(isinstance(values[name], (int, float)) and abs(values[name]) < 1e11 for name in numbers):
        raise ValueError("a figure is absurd")
    if not all(type(values[name]) is int and 0 < values[name] < 1 << 62 for name in whole):
        raise ValueError("a number is absurd")
    words = {name: clean(str(values[name])) for name in ("name", "command", "boot", "ending")}
    labels = tuple(clean(str(label)) for label in values["gpus"])
    return SessionRecord(**values | words | {"gpus": labels, "warned": bool(values["warned"])})


# --- requests to keep a session ---------------------------------------------------------------------------------------


def keep(place: Path, record: SessionRecord, until_mono: float) -> None:
    """Asks the session's watcher not to end it before this second of ``clock.mono``. Raises CannotWrite."""
    temporary = place / f".{record.pid}.keep.{os.getpid()}.tmp"
    try:
        temporary.write_text(json.dumps({"boot": record.boot, "until": until_mono}), encoding="ascii")
        temporary.replace(place / f"{record.pid}.keep")
    except OSError as problem:
        with suppress(OSError):
            temporary.unlink()
        raise CannotWrite(f"the request can't be written into {place}: {problem.strerror}") from None


def kept_until(place: Path, pid: int, now: float) -> float:
    """Until when the session is to be kept, by ``clock.mono``; 0 without a request."""
    owned = read_owned(place / f"{pid}.keep", _MOST_BYTES)
    if owned is None or owned[0] != os.geteuid():
        return 0.0
    try:
        values = json.loads(owned[1])
        until = float(values["until"]) if values["boot"] == boot_id() else 0.0
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0.0
    return until if until < now + _LONGEST_S else 0.0


def chosen(records: tuple[SessionRecord, ...], pid: int | None) -> SessionRecord:
    """The session that a user means: by its pid, else the one that this process belongs to, else the only one.

    Raises UsageError where that is none, or not clear.
    """
    if pid is None and len(records) > 1:
        own = os.environ.get(SESSION_VARIABLE)
        records = tuple(record for record in records if tag_of(record.pid, record.start_ticks) == own) or records
    found = [record for record in records if pid in (None, record.pid)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{record.pid} ({record.command})" for record in records) or "none"
    if pid is not None:
        raise UsageError(f"there is no session with pid {pid}; your sessions on this machine: {there}")
    raise UsageError(f"say which session, by its pid; your sessions on this machine: {there}")


def tag_of(pid: int, start_ticks: int) -> str:
    """What a session's processes have in their environment."""
    return f"{pid}.{start_ticks}"
