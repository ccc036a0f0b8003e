"""Reports of runs: the file that is served, and ``gpuherd report`` where there is none yet.

A report is a page with scripts, made by whoever owns the run folder: perhaps a stranger who has put something else in
its place. So it is opened in a sandbox without an origin (``POLICY``): its scripts draw charts, and can read no cookie,
ask this server for nothing, send nothing anywhere, and reach no page around it. The report's own policy, which names
its scripts by their hashes, holds besides.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from gpuherd.errors import clean
from gpuherd.web.actions import Forbidden
from gpuherd.web.places import Place

NAME = "report.html"
POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: "
    "blob:; font-src data:; connect-src 'none'; form-action 'none'; base-uri 'none'; frame-ancestors 'self'"
)
# In place of the headers of all other pages, which may not be framed.
HEADERS: Mapping[str, str] = {"content-security-policy": POLICY, "x-frame-options": "SAMEORIGIN"}
# Ours have 10 MB at most.
MOST_BYTES = 64 * 2**20
# What a run writes last, or into, when it has further results.
_RESULTS = ("run.json", "done.json", "esd_results_summary.csv", "stats", "results", "models", "scores", "evaluations")
_BLOCK = 262_144
_MAKE_S = 1800.0
_MOST_ERRORS = 20_000


@dataclass(frozen=True, slots=True)
class Report:
    """A run's report, or the want of one.

    Attributes:
        made_at: wall-clock second; None where there is none that can be shown. ``size``: its bytes.
        is_old: the run has changed since.
        making_since: wall-clock second since when it is being made; None while it is not.
        problem: why there is none, or why it could not be made the last time.
    """

    made_at: float | None = None
    size: int = 0
    is_old: bool = False
    making_since: float | None = None
    problem: str | None = None


class ReportFile:
    """An open report, closed with its last block.

    Raises FileNotFoundError where there is none that may be shown: no plain file, not of the run's owner (a link to
    somebody else's), or too long.
    """

    def __init__(self, place: Place):
        self._fd = -1
        fd = os.open(place.folder / NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self.state = os.fstat(fd)
            is_plain = stat.S_ISREG(self.state.st_mode) and self.state.st_uid == place.uid
            if not is_plain or self.state.st_size > MOST_BYTES:
                raise FileNotFoundError(f"{place.folder / NAME} is no report that can be shown")
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def blocks(self) -> Iterator[bytes]:
        """Its content, as long as it was when it was opened; closes it."""
        try:
            at = 0
            while at < self.state.st_size:
                block = os.pread(self._fd, min(_BLOCK, self.state.st_size - at), at)
                if not block:
                    return
                at += len(block)
                yield block
        finally:
            self.close()

    def close(self) -> None:
        """Closes it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()  # of a response that was never begun


class ReportMaker:
    """Makes reports by ``gpuherd report``, one after the other, each in a process of its own: it loads libraries of
    hundreds of MB. Those that run end with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._since: dict[str, float] = {}
        self._problems: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def look(self, place: Place) -> Report:
        """The report of a run as it stands."""
        made_at, size, problem = None, 0, self._problems.get(place.key)
        try:
            file = ReportFile(place)
            made_at, size = file.state.st_mtime, file.state.st_size
            file.close()
        except FileNotFoundError as missing:
            problem = problem or (None if missing.errno else str(missing))
        except OSError as unreadable:
            problem = problem or f"{place.folder / NAME} can't be opened: {unreadable.strerror}"
        is_old = made_at is not None and _changed_at(place) > made_at + 1
        return Report(made_at, size, is_old, self._since.get(place.key), None if problem is None else clean(problem))

    def make(self, place: Place) -> bool:
        """Begins to make it; False if that is going on already. Raises Forbidden for a folder that is not the user's
        own."""
        if not place.trusted:
            raise Forbidden(place.why_not_trusted)
        with self._lock:
            if place.key in self._since:
                return False
            self._since[place.key] = time.time()
            self._problems.pop(place.key, None)
        threading.Thread(target=self._make, args=(place,), daemon=True, name="gpuherd-web-report").start()
        return True

    def _make(self, place: Place) -> None:
        try:
            with self._turn:
                problem = self._run(place)
        except OSError as failed:
            problem = f"gpuherd report could not be started: {failed.strerror}"
        with self._lock:
            self._since.pop(place.key, None)
            if problem is not None:
                self._problems[place.key] = problem

    def _run(self, place: Place) -> str | None:
        """Why it could not be made; None where it was."""
        words = [sys.executable, "-m", "gpuherd", "report", str(place.folder), "--open", "no", "--json"]
        politely = ["nice", "-n", "10"] if shutil.which("nice") else []
        self._process = subprocess.Popen(
            [*politely, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            _, errors = self._process.communicate(timeout=_MAKE_S)
        except subprocess.TimeoutExpired:
            self.close()
            return f"gpuherd report has not ended after {_MAKE_S / 60:g} minutes"
        if self._process.returncode == 0:
            return None
        last = errors[-_MOST_ERRORS:].decode("utf-8", "replace").strip().splitlines()[-1:]
        return last[0] if last else f"gpuherd report ended with exit code {self._process.returncode}"

    def close(self) -> None:
        """Ends the process that makes one."""
        process = self._process
        if process is not None and process.poll() is None:
            with suppress(OSError):
                process.terminate()


def _changed_at(place: Place) -> float:
    """When results were last written. Not the folder's time, which a report changes."""
    times = [0.0]
    for name in _RESULTS:
        with suppress(OSError):
            times.append((place.folder / name).stat().st_mtime)
    return max(times)
