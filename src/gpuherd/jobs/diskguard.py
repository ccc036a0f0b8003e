"""Is there space on the disks of a run? Checked every few seconds while jobs run or wait; below the limit nothing
starts. And is there space where one job works and writes? Checked for a job that ran out of it; that job alone waits.

One call to the file system a folder, and the answer as a sentence. The dispatcher decides what to do about it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gpuherd.jobs.job import Job

EVERY_S = 2.0
_MB = 1 << 20
# So much more than the limit must be free before work goes on: else it would stop and go with every log line.
_AGAIN = 1.1


class DiskGuard:
    """``low`` is a sentence while there is too little space, else None.

    ``due_at`` is when to call ``look`` (again), None for never.
    """

    def __init__(self, folders: Sequence[Path], min_mb: int):
        self._folders = tuple(dict.fromkeys(folders))
        self._min_mb = min_mb
        self.low: str | None = None
        self.due_at: float | None = 0.0 if min_mb else None

    def change(self, min_mb: int) -> None:
        """So much must be free from now on; to be seen at the next look."""
        self._min_mb = min_mb
        if self.due_at is None and min_mb:
            self.due_at = 0.0

    def look(self, now: float) -> bool:
        """Looks at all folders; returns whether there is too little space in one where there was enough, or reverse."""
        was = self.low is not None
        if not self._min_mb:
            self.low, self.due_at = None, None
            return was
        self.due_at = now + EVERY_S
        wanted = self._min_mb * (_AGAIN if was else 1.0)
        found = None
        for folder in self._folders:
            free = free_mb(folder)
            if free is not None and free < wanted:
                found = self._sentence(folder, free)
                break
        self.low = found
        return was != (found is not None)

    def lacking_for(self, job: Job) -> str | None:
        """A sentence while there is too little space where this job works or writes its result, else None.

        A file system that could never have so much free, since it is read-only or too small, does not count.
        """
        for folder in (job.cwd, job.result and str(Path(job.result).parent)) if self._min_mb else ():
            found = None if not folder else _statvfs(Path(folder))
            if found is None or found.f_flag & os.ST_RDONLY or _mb(found, found.f_blocks) < self._min_mb * _AGAIN:
                continue
            free = _mb(found, found.f_bavail)
            if free < self._min_mb * _AGAIN:
                return self._sentence(Path(str(folder)), free)
        return None

    def _sentence(self, folder: Path, free: int) -> str:
        return f"{free} MB are free in {folder}; at least {self._min_mb} MB must be free (--min-disk)"


def free_mb(folder: Path) -> int | None:
    """Free space in MB (2^20 bytes) that we may use, None where it is unknown."""
    found = _statvfs(folder)
    return None if found is None else _mb(found, found.f_bavail)


def _statvfs(folder: Path) -> os.statvfs_result | None:
    try:
        return os.statvfs(folder)
    except OSError:
        return None


def _mb(found: os.statvfs_result, blocks: int) -> int:
    return blocks * found.f_frsize // _MB
