"""The run folders that the pages show: the user's own queues, and the folders that were named when the page started.

An address names a folder by its key, and keys are given to folders that were found here: no path comes from a browser.
A named folder that is no run itself stands for the runs in it. A folder may belong to another user and hold anything;
so the only file that is read here is the head of ``run.json``, and only where it is a plain file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpuherd.atomic import without_waiting
from gpuherd.batch.user_queue import folder as own_folder
from gpuherd.batch.user_queue import in_use
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import GpuherdError, clean
from gpuherd.gpus.lease_files import user_name
from gpuherd.jobs.dispatcher_state import engine_name
from gpuherd.jobs.run_dir import RunDirectory

# A folder of runs is searched so deep (outputs/name/date is two), and not without end.
_DEEPEST = 3
_MOST_LOOKED_AT = 5000
_MOST_RUNS = 500
_KEPT_S = 10.0
_RECORD_BYTES = 4_000_000
_LONGEST_SLUG = 40


class Results(StrEnum):
    """What results a run folder holds, in the words of the page."""

    SPECTRA = "spectra"
    ANSWERS = "answers"
    POSTTRAIN = "post-training"
    TRAINING = "training"


# "kind" in run.json. The rooms that write it import numpy, which this process should not pay for.
_KINDS = {"qa": Results.ANSWERS, "posttrain": Results.POSTTRAIN, "train": Results.TRAINING}
_TABLE_OF_SPECTRA = "esd_results_summary.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A run folder.

    Attributes:
        key: its name in addresses: the same for the same folder, whoever asks.
        title: one printable line.
        uid: its owner, as the kernel names it.
        trusted: it is this user's, and no stranger may write in it: requests may be sent to its queue.
        engine: of the user's own queues, the engine that works it off; None for a run folder.
        has_queue: there was a queue when it was found.
        results: what results it holds; None for none.
        changed_at: wall-clock second of its last change.
    """

    key: str
    folder: Path
    title: str
    uid: int
    trusted: bool
    engine: str | None = None
    has_queue: bool = True
    results: Results | None = None
    changed_at: float = 0.0

    @property
    def run(self) -> RunDirectory:
        """Its paths."""
        return RunDirectory(self.folder)

    @property
    def owner(self) -> str:
        """The owner's name."""
        return clean(user_name(self.uid))

    @property
    def why_not_trusted(self) -> str:
        """A sentence for people whose requests are refused."""
        if self.uid != os.geteuid():
            return f"this run belongs to {self.owner}: you can look at it, and only its owner can change it"
        return (
            f"others may write in {clean(str(self.folder))}, so that its queue can't be relied on; run: chmod o-w on it"
        )


class Places:
    """All folders that the pages show. Safe to use from several threads.

    Args:
        named: folders that the user named.
    """

    def __init__(self, named: Sequence[Path] = ()):
        self._named = tuple(path.absolute() for path in named)
        self._found: tuple[Place, ...] = ()
        self._next = 0.0
        self._one_at_a_time = threading.Lock()

    def all(self) -> tuple[Place, ...]:
        """The user's own queues, then the folders that were named or lie in them, the latest first. Searched anew after
        some seconds."""
        with self._one_at_a_time:
            if time.monotonic() >= self._next:
                self._found = tuple(_unique([*_own(), *_in(self._named)]))
                self._next = time.monotonic() + _KEPT_S
            return self._found

    def find(self, key: str) -> Place | None:
        """The folder with this key, as it stands now; None where there is none."""
        known = next((place for place in self.all() if place.key == key), None)
        return None if known is None else _place(known.folder, known.title, engine=known.engine, must_be=True)

    def forget(self) -> None:
        """Has the next call search anew: a queue was made, or results."""
        with self._one_at_a_time:
            self._next = 0.0


def _own() -> Iterator[Place]:
    with suppress(GpuherdError):  # a user without a home folder
        for engine in dict.fromkeys((LOCAL, *in_use())):
            title = "My queue" if engine == LOCAL else f"My queue for {engine_name(engine)}"
            found = _place(own_folder(engine), title, engine=engine)
            if found is not None and found.has_queue:
                yield found


def _in(named: Iterable[Path]) -> list[Place]:
    """The named folders, or the runs in them."""
    found: list[Place] = []
    for top in named:
        title = clean(top.name or str(top))
        this = _place(top, title)
        if this is not None and (this.has_queue or this.results is not None):
            found.append(this)
        elif this is not None:
            found += _below(top, title)
    return sorted(found, key=lambda place: -place.changed_at)


def _below(top: Path, title: str) -> list[Place]:
    """The runs in a folder, without a look into runs, behind links, or into hidden folders."""
    found: list[Place] = []
    looked_at, level = 0, [(top, title)]
    for _ in range(_DEEPEST):
        deeper: list[tuple[Path, str]] = []
        for folder, above in level:
            for path in _folders(folder):
                looked_at += 1
                if looked_at > _MOST_LOOKED_AT or len(found) >= _MOST_RUNS:
                    return found
                here = f"{above}/{clean(path.name)}"
                place = _place(path, here)
                if place is not None and (place.has_queue or place.results is not None):
                    found.append(place)
                else:
                    deeper.append((path, here))
        level = deeper
    return found


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            found = [Path(each.path) for each in entries if not each.name.startswith(".") and _is_folder(each)]
    except OSError:
        return []
    return sorted(found)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _place(folder: Path, title: str, *, engine: str | None = None, must_be: bool = False) -> Place | None:
    """The folder as it stands; None for what is no folder. ``must_be``: one that is gone is described all the same."""
    try:
        state = folder.stat()
    except (OSError, ValueError):
        if not must_be:
            return None
        return Place(
            key=key_of(folder),
            folder=folder,
            title=title,
            uid=os.geteuid(),
            trusted=False,
            engine=engine,
            has_queue=False,
        )
    if not stat.S_ISDIR(state.st_mode):
        return None
    queue = _state(folder / "queue.sqlite")
    record = _state(folder / "run.json")
    uids = {state.st_uid, *(each.st_uid for each in (queue,) if each is not None)}
    writable = [each for each in (state, queue) if each is not None and each.st_mode & stat.S_IWOTH]
    return Place(
        key=key_of(folder),
        folder=folder,
        title=title,
        uid=state.st_uid,
        trusted=uids == {os.geteuid()} and not writable,
        engine=engine,
        has_queue=queue is not None,
        results=results_of(folder),
        changed_at=max(each.st_mtime for each in (state, queue, record) if each is not None),
    )


def results_of(folder: Path) -> Results | None:
    """What results a folder holds, by its ``run.json``, or by the table that ``gpuherd esd`` writes."""
    record = _record(folder / "run.json")
    kind = record.get("kind")
    if isinstance(kind, str) and kind in _KINDS:
        return _KINDS[kind]
    if _state(folder / _TABLE_OF_SPECTRA) is not None:
        return Results.SPECTRA
    # Unfinished, or imported: there is no table of all models yet.
    is_spectra = (folder / "stats").is_dir() and (bool(record) or (folder / "coverage").is_dir())
    return Results.SPECTRA if is_spectra else None


def _record(path: Path) -> dict[str, object]:
    """``run.json``; an empty one where that is no plain file, or too long, or damaged."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode) or state.st_size > _RECORD_BYTES:
                return {}
            found = json.loads(file.read(_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _state(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def key_of(folder: Path) -> str:
    """The key of a folder: readable, and never the same for two.

    >>> key_of(Path("/data/My Runs/esd")).rpartition("-")[0]
    'esd'
    """
    slug = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")[:_LONGEST_SLUG].strip("-")
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return f"{slug or 'run'}-{digest}"


def _unique(places: Iterable[Place]) -> Iterator[Place]:
    seen = set()
    for place in places:
        if place.key not in seen:
            seen.add(place.key)
            yield place
