"""SHA-256 of whole files, however large, kept from one command to the next.

A hash is kept in the user's cache, a file of its own for each path. It holds while size, modification time, change time
and inode stay as they were: the change time shows a rewrite that sets the modification time back. A cache that is
damaged or can't be written costs another reading, never a wrong answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from gpuherd.atomic import atomic_write
from gpuherd.jobs.settings import user_cache
from gpuherd.models.checkpoints.stored import FileStamp, opened, unchanged
from gpuherd.report.progress import of_bytes

# hashlib lets other threads run: with several files at once neither a disk nor a core is what the others wait for.
_AT_ONCE = 4
_PIECE = 8 << 20
_SMALL = 1 << 20  # read again as fast as its hash is looked up
# File systems keep times as coarsely as to two seconds: a file that was just written can change again unseen.
_SETTLED_NS = 3_000_000_000
_HASH = re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger(__name__)


def hashes_of(paths: Sequence[Path], title: str = "reading the model's files to identify it") -> dict[Path, str]:
    """The SHA-256 of each file's content, in hex; with a progress bar of this title on standard error where that takes
    long.

    Raises MissingModel, BadModel where a file can't be read or changes while it is read.
    """
    looks = {path: _looked(path) for path in paths}
    found = {path: kept for path, (stamp, changed_ns) in looks.items() if (kept := _kept(stamp, changed_ns))}
    missing = [stamp for path, (stamp, _) in looks.items() if path not in found]
    if not missing:
        return found
    total = sum(stamp.size for stamp in missing)
    ended = threading.Event()
    with (
        of_bytes(Console(stderr=True), total, title) as advance,
        ThreadPoolExecutor(min(_AT_ONCE, len(missing))) as pool,
    ):

        def read(stamp: FileStamp) -> str:
            return _hash(stamp, looks[stamp.path][1], advance, ended)

        try:
            made = list(pool.map(read, missing))
        finally:
            ended.set()  # after an interrupt, or a file that can't be read, the other threads read no further
    return found | {stamp.path: each for stamp, each in zip(missing, made, strict=True)}


def _looked(path: Path) -> tuple[FileStamp, int]:
    """The file's stamp, and its change time in nanoseconds."""
    with opened(path) as (descriptor, stamp):
        return stamp, os.fstat(descriptor).st_ctime_ns


def _hash(stamp: FileStamp, changed_ns: int, advance: Callable[[int], None], ended: threading.Event) -> str:
    began = time.time_ns()
    whole = hashlib.sha256()
    with unchanged(stamp) as descriptor, os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
        while not ended.is_set() and (piece := file.read(_PIECE)):
            whole.update(piece)
            advance(len(piece))
    if not ended.is_set() and stamp.size > _SMALL and max(stamp.modified_ns, changed_ns) < began - _SETTLED_NS:
        _keep(stamp, changed_ns, whole.hexdigest())
    return whole.hexdigest()


# ---- the cache -------------------------------------------------------------------------------------------------------


def _kept(stamp: FileStamp, changed_ns: int) -> str | None:
    """The hash that was made of the file as it looks now, None where there is none that can be trusted."""
    if stamp.size <= _SMALL:
        return None
    try:
        record = json.loads(_place(stamp.path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, Mapping):
        return None
    made = record.get("sha256")
    same = all(record.get(name) == value for name, value in _values(stamp, changed_ns).items())
    return made if same and isinstance(made, str) and _HASH.fullmatch(made) else None


def _keep(stamp: FileStamp, changed_ns: int, made: str) -> None:
    place = _place(stamp.path)
    record = _values(stamp, changed_ns) | {"sha256": made}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(place, json.dumps(record).encode())
    except OSError as problem:
        _log.debug("hashes are not kept in %s: %s", place.parent, problem.strerror)


def _values(stamp: FileStamp, changed_ns: int) -> dict[str, str | int]:
    return {
        "path": os.path.realpath(stamp.path),
        "size": stamp.size,
        "mtime_ns": stamp.modified_ns,
        "ctime_ns": changed_ns,
        "inode": stamp.inode,
    }


def _place(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return user_cache("hashes") / f"{name}.json"
