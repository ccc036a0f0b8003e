"""The folder in which nodes are told of attempts, and tell of them: read while a run goes on, and kept small.

What may still keep an attempt from beginning again stays: a claim goes after the manifest without which no leader
begins, and of a batch of which we have claimed something ourselves nothing goes for a while, for the engine may be
about to start it.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from gpuherd.jobs.handover.followed import Followed
from gpuherd.jobs.handover.reports import present, read_claim, read_ended
from gpuherd.jobs.rundir import RunDirectory

logger = logging.getLogger(__name__)

# How a batch is called (``QueueFile.batch_name``), and what all its files begin with.
_BATCH = re.compile(r"gpuherd-[0-9a-f]+\.[0-9]+-[0-9]+")
_QUIET_S = 600.0
_SHORTEST_S, _LONGEST_S = 0.2, 1.0
# At most so much of the time is spent on looking.
_SHARE = 0.05


class Folder:
    """Reads what nodes tell, and removes what is read.

    Attributes:
        due_at: when ``look`` is to be called next (by ``clock.mono``).
    """

    def __init__(self, run: RunDirectory):
        self._run = run
        self._open: dict[str, set[int]] = {}
        self._all: dict[str, tuple[int, ...]] = {}
        self._voided: set[str] = set()
        self._every_s = _SHORTEST_S
        self.due_at = 0.0

    def opened(self, batch: str, attempts: Collection[int], still_open: Collection[int]) -> None:
        """A batch is out: these attempts in all, of which some have no end yet."""
        self._all[batch] = tuple(attempts)
        self._open[batch] = set(still_open)

    def look(self, followed: Mapping[int, Followed], now: float) -> list[Followed]:
        """The attempts of which there is something new: a claim, or a report of the end."""
        began = time.monotonic()
        names = self.names()
        told = (followed[number] for number in _numbers(names) if number in followed)
        changed = [each for each in told if self.read(each, names)]
        cost_s = time.monotonic() - began
        self._every_s = _SHORTEST_S if changed else min(_LONGEST_S, 1.5 * self._every_s)
        self.due_at = now + max(self._every_s, cost_s / _SHARE)
        return changed

    def names(self) -> frozenset[str]:
        """What lies there now; nothing where that can't be read."""
        try:
            return present(self._run.handover)
        except OSError as problem:
            logger.warning("can't read %s: %s", self._run.handover, problem.strerror)
            return frozenset()

    def read(self, followed: Followed, names: Collection[str] | None = None) -> bool:
        """Reads what is told of one attempt; whether there was something new. ``names``: what is there, where that is
        known: who asks for each of thousands of files over a network waits for each."""
        number, before = followed.record.id, (followed.claim, followed.ended)
        claim, ended = self._run.attempt_claim(number), self._run.attempt_ended(number)
        try:
            if followed.claim is None and (names is None or claim.name in names):
                followed.claim = read_claim(claim)
            if followed.ended is None and (names is None or ended.name in names):
                followed.ended = read_ended(ended)
        except OSError as problem:
            logger.warning("can't read what is told of attempt %d: %s", number, problem)
        return (followed.claim, followed.ended) != before

    def voided(self, batch: str) -> None:
        """We have claimed an attempt of this batch ourselves."""
        self._voided.add(batch)

    def closed(self, batch: str, attempt: int) -> None:
        """The end of an attempt is in the queue. With the last of its batch the files go."""
        left = self._open.get(batch)
        if left is None:
            return
        left.discard(attempt)
        if not left:
            del self._open[batch]
            attempts = self._all.pop(batch)
            if batch not in self._voided:
                self._remove(batch, attempts)
            self._voided.discard(batch)

    def highest(self) -> int:
        """The highest number of an attempt of which there is a file, 0 for none."""
        heads = (name.partition(".")[0] for name in self.names())
        return max((int(head) for head in heads if _is_number(head)), default=0)

    def sweep(self, now: float, is_ours: Callable[[str], bool]) -> None:
        """Removes what earlier runs left of batches that are out no more. ``now``: wall-clock second.

        What another queue has handed over must not begin here: its folder was copied, or it lay in this one before.
        ``is_ours`` tells a batch of this queue by its name.
        """
        kept = {number for numbers in self._all.values() for number in numbers}
        # Manifests first: without one no leader begins, whatever else is gone.
        for name in sorted(self.names() - {self._run.engine_options.name}, key=lambda name: not name.endswith(".json")):
            batch, head = _BATCH.match(name), name.partition(".")[0]
            if batch is not None and name.endswith(".json") and not is_ours(batch[0]):
                _unlink(self._run.handover / name)
            elif (batch is None or batch[0] not in self._all) and not (_is_number(head) and int(head) in kept):
                _remove_old(self._run.handover / name, now - _QUIET_S)

    def _remove(self, batch: str, attempts: Collection[int]) -> None:
        _unlink(self._run.manifest(batch))
        for place, number in enumerate(attempts):
            _unlink(self._run.attempt_claim(number))
            _unlink(self._run.attempt_ended(number))
            _unlink(self._run.attempt_recalled(number))
            output = self._run.engine_output(batch, place)
            with suppress(OSError):
                if output.stat().st_size == 0:
                    output.unlink()


def _numbers(names: Collection[str]) -> list[int]:
    """The attempts that told something, in order."""
    heads = (name.partition(".")[0] for name in names if name.endswith((".claim", ".ended")))
    return sorted({int(head) for head in heads if _is_number(head)})


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit()


def _remove_old(path: Path, before: float) -> None:
    with suppress(OSError):
        found = os.lstat(path)
        if found.st_mtime < before and not (path.suffix == ".out" and found.st_size):
            path.unlink()


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
