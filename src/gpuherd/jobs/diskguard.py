"""Is there space on the disks of a run? Asked every few seconds while jobs run or wait; below the limit nothing starts.

One question to the file system a folder, and the answer as a sentence. What is done about it is the dispatcher's
business.
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
                found = f"{free} MB are free in {folder}; {self._min_mb} must be (--min-disk)"
                break
        self.low = found
        return was != (found is not None)

    def look_for(self, job: Job, now: float) -> bool:
        """Looks also where a job that has failed works and writes; from now on always, if that is full."""
        places = [Path(place) for place in (job.cwd, job.result and str(Path(job.result).parent)) if place]
        full = [place for place in places if (free := free_mb(place)) is not None and free < self._min_mb]
        self._folders = tuple(dict.fromkeys((*self._folders, *full)))
        return self.look(now)


def free_mb(folder: Path) -> int | None:
    """Free space in MB (2^20 bytes) that we may use, None where nobody can say."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize // _MB
