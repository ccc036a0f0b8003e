"""``Recorder``: what one process writes into the ledger: uses that go on, and those that have ended.

Order makes it safe against a kill at any instant: a use that has ended is first appended to the log, and only then left
out of the open file; whoever reads both counts the longer record of an id. What a process leaves open when it dies is
appended by the user's next recorder. Nothing is synced: a power cut may cost the last seconds.

Nothing raises: without space or rights what has ended is kept, in the open file if that can be written, and tried
again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path

from gpuherd.engines.process_tree import ProcessId, identify
from gpuherd.errors import CannotWrite
from gpuherd.gpus.machine_dir import machine_dir
from gpuherd.ledger import files
from gpuherd.ledger.reader import NAME, records_of
from gpuherd.ledger.records import Use, line_of, use_of

logger = logging.getLogger(__name__)

# What could not be written is tried again after so long.
AGAIN_S = 10.0
# More uses than this are not kept in memory while nothing can be written: the oldest are dropped.
_MOST_KEPT = 10_000
_MOST_NUMBERS = 100
# About 1,500 uses, read in a few milliseconds.
_RECENT_BYTES = 512 << 10
_APPEND = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Others may read a shared ledger, which holds no secrets.
_MODE = 0o644


class Recorder:
    """The records of this process. ``begin`` before the first one; ``close`` at the end.

    Args:
        folder: the ledger's; None for the one that is in use here and now, made when the first use is recorded.

    Attributes:
        trouble: why nothing can be written now, as a sentence; None while all is well.
        recovered: the uses, by id, that dead recorders of this user had left open when this one began.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.trouble: str | None = None
        self.recovered: Mapping[str, Use] = {}
        self._folder = folder
        self._process: ProcessId | None = None
        self._open: dict[str, Use] = {}
        self._ended: dict[str, Use] = {}
        self._path: Path | None = None
        self._log: tuple[str, Path] | None = None
        self._tried_at = -AGAIN_S
        self._warned = False

    @property
    def folder(self) -> Path | None:
        """Where it writes; None before it has, or where there is no such place."""
        return self._folder

    def begin(self) -> None:
        """Takes over what dead recorders of this user left. Cheap where there is nothing."""
        if self._process is None:
            self._process = identify(os.getpid())
            try:
                self._recover(self._place())
            except (OSError, CannotWrite) as problem:
                self._failed(problem)

    def sample(self, uses: Iterable[Use]) -> None:
        """The uses that go on now, in place of those of the last sample; tries again what could not be written."""
        self._open = {use.id: use for use in uses}
        if self._ended and not self._is_resting():
            self._append_ended()
        self._write_open()

    def end(self, uses: Iterable[Use]) -> None:
        """These uses have ended: they stand in the log when this returns, if it can be written."""
        for use in uses:
            self._open.pop(use.id, None)
            self._ended[use.id] = use
        while len(self._ended) > _MOST_KEPT:
            del self._ended[next(iter(self._ended))]
        if self._ended and not self._is_resting():
            self._append_ended()

    def close(self, ended: Iterable[Use] = ()) -> None:
        """The process ends: these uses have ended. Others that are still open go on without it: they stay in the open
        file, for the next recorder."""
        self.end(ended)
        self._tried_at = -AGAIN_S
        if self._ended:
            self._append_ended()
        self._write_open()

    def recent(self) -> tuple[frozenset[str], float | None]:
        """The ids in the last part of this user's logs, and the wall-clock second since which no other use stands in
        them; None where there is no log yet."""
        if self._folder is None:
            return frozenset(), None
        logs = [log for log in files.logs_in(self._folder) if log.uid == os.geteuid()]
        ids: set[str] = set()
        since: float | None = None
        left = _RECENT_BYTES
        for log in sorted(logs, key=lambda log: (log.month, log.number), reverse=True):
            with suppress(OSError):
                size = log.path.stat().st_size
                reader = files.LogReader(log.path, max(0, size - left))
                uses = [use for line in reader.lines() if (use := use_of(line)) is not None]
                ids.update(use.id for use in uses)
                since = min([use.until for use in uses] if since is None else [since, *(use.until for use in uses)])
                left -= size
            if left <= 0:
                break
        return frozenset(ids), since

    # --- writing ----------------------------------------------------------------------------------------------

    def _is_resting(self) -> bool:
        return self.trouble is not None and time.monotonic() - self._tried_at < AGAIN_S

    def _place(self) -> Path:
        if self._folder is None:
            try:
                self._folder = machine_dir().make(NAME)
            except RuntimeError:
                raise CannotWrite("you have no home folder, and this machine has no ledger of all users") from None
        return self._folder

    def _append_ended(self) -> None:
        try:
            by_month: dict[str, list[Use]] = {}
            for use in self._ended.values():
                by_month.setdefault(files.month_of(use.until), []).append(use)
            for month, uses in by_month.items():
                self._append(month, b"".join(line_of(use) for use in uses))
                for use in uses:
                    del self._ended[use.id]
        except (OSError, CannotWrite) as problem:
            self._failed(problem)
        else:
            self.trouble = None

    def _append(self, month: str, data: bytes) -> None:
        """One write at the end of the log; what a full disk cut off is written again, behind a new line's beginning."""
        fd = self._open_log(month)
        try:
            # Two processes of a user: neither may find the other's line half written and believe it cut off.
            fcntl.flock(fd, fcntl.LOCK_EX)
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                data = b"\n" + data
            written = os.write(fd, data)
            if written < len(data):
                os.write(fd, data[written:])  # says why
        finally:
            os.close(fd)

    def _open_log(self, month: str) -> int:
        """The first log of the month that is ours and not full."""
        place, uid = self._place(), os.geteuid()
        known = self._log[1] if self._log is not None and self._log[0] == month else None
        numbered = (files.log_path(place, uid, month, number) for number in range(_MOST_NUMBERS))
        for path in chain(() if known is None else (known,), numbered):
            fd = _own_file(path)
            if fd is not None:
                if os.fstat(fd).st_size < files.FULL_LOG:
                    self._log = (month, path)
                    return fd
                os.close(fd)
        raise CannotWrite(f"others have put files in the place of yours into {place}; remove them ({uid}.{month}.*)")

    def _write_open(self) -> None:
        lines = [line_of(use) for use in (*self._ended.values(), *self._open.values())]
        if self._path is None and not lines:
            return
        try:
            if not lines and self._path is not None:
                self._path.unlink(missing_ok=True)
                self._path = None
            else:
                self._replace(files.open_text(self._own_process(), lines)[: files.MOST_OF_OPEN])
        except (OSError, CannotWrite) as problem:
            self._failed(problem)
        else:
            if not self._ended:
                self.trouble = None

    def _own_process(self) -> ProcessId:
        self.begin()
        if self._process is None:
            raise CannotWrite("/proc does not show this process")
        return self._process

    def _replace(self, data: bytes) -> None:
        process, uid, place = self._own_process(), os.geteuid(), self._place()
        paths = (files.open_path(place, uid, process, number) for number in range(_MOST_NUMBERS))
        for path in paths if self._path is None else (self._path,):
            if self._path is None and not _is_ours_or_free(path):
                continue
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.unlink(missing_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
            try:
                try:
                    os.fchmod(fd, _MODE)
                    written = os.write(fd, data)
                    if written < len(data):
                        os.write(fd, data[written:])
                finally:
                    os.close(fd)
                temporary.replace(path)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise
            self._path = path
            return
        raise CannotWrite(f"others have put files in the place of yours into {place}; remove them")

    def _failed(self, problem: OSError | CannotWrite) -> None:
        reason = problem.strerror if isinstance(problem, OSError) else str(problem)
        self.trouble = f"what GPUs are used for can't be recorded: {reason}"
        self._tried_at = time.monotonic()
        if not self._warned:
            self._warned = True
            logger.warning("%s; it is tried again every %g s, and jobs run as ever", self.trouble, AGAIN_S)

    # --- what the dead have left --------------------------------------------------------------------------------

    def recover(self) -> None:
        """Appends what dead recorders of this user have left open since."""
        try:
            self._recover(self._place())
        except (OSError, CannotWrite) as problem:
            self._failed(problem)

    def _recover(self, place: Path) -> None:
        """Appends what dead recorders of ours left open. Two that do so at once append the same, which counts once."""
        dead = [file for file in files.open_files_in(place, os.geteuid()) if not file.is_live]
        if not dead:
            return
        recovered = {record.use.id: record.use for file in dead for record in records_of(file)}
        self.recovered = {**self.recovered, **recovered}
        mine, self._ended = self._ended, recovered
        try:
            self._append_ended()
            if not self._ended:
                for file in dead:
                    with suppress(OSError):
                        file.path.unlink()
        finally:
            # What could not be appended stays in the files of the dead.
            self._ended = mine


def _own_file(path: Path) -> int | None:
    """The log at this path, made if there is none; None where it is somebody else's, or no plain file with one name.

    Raises OSError where it can't be made.
    """
    try:
        fd = os.open(path, _APPEND)
    except FileNotFoundError:
        fd = os.open(path, _APPEND | os.O_CREAT, _MODE)
        os.fchmod(fd, _MODE)
    except OSError:
        if _is_ours_or_free(path):
            raise
        return None
    state = os.fstat(fd)
    if state.st_uid == os.geteuid() and stat.S_ISREG(state.st_mode) and state.st_nlink == 1:
        return fd
    os.close(fd)
    return None


def _is_ours_or_free(path: Path) -> bool:
    try:
        state = path.lstat()
    except OSError:
        return True
    return state.st_uid == os.geteuid() and stat.S_ISREG(state.st_mode)
