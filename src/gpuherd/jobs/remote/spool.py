"""The spool folder: manifests for the nodes, and their claims and reports. Read during a run, and kept small.

Files that keep an attempt from beginning again stay: a claim is removed after the manifest, without which no agent
begins, and files of a batch of which we have claimed an attempt ourselves stay for a while, since the engine may be
about to start it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuherd.atomic import atomic_write
from gpuherd.engines.process_tree import boot_id
from gpuherd.jobs import clock
from gpuherd.jobs.remote import SPOOL_LONGEST_S, SPOOL_SHORTEST_S, SWEEP_AGE_S
from gpuherd.jobs.remote.outcome import LOOKS, Gone, RemoteAttempt
from gpuherd.jobs.remote.protocol import NOT_NOW, claim_on_node, present, read_claim, read_ended
from gpuherd.jobs.run_dir import RunDirectory

logger = logging.getLogger(__name__)

# The name of a batch (``QueueFile.batch_name``), with which all its files begin.
_BATCH = re.compile(r"gpuherd-[0-9a-f]+\.[0-9]+-([0-9]+)")
# At most this part of the time is spent on reading.
_SHARE = 0.05
# More than any second of a clock.
_MOST_S = 1e15


@dataclass(slots=True)
class _Batch:
    """A batch whose files are needed: all its attempts, those that they depend on, and whether we have claimed one."""

    attempts: tuple[int, ...]
    after: frozenset[int]
    voided: bool = False


class Spool:
    """Reads the nodes' files, and removes those that are not needed any more.

    Attributes:
        due_at: when ``look`` is to be called next (by ``clock.mono``).
    """

    def __init__(self, run: RunDirectory):
        self._run = run
        self._batches: dict[str, _Batch] = {}
        self._gone: dict[int, Gone] | None = None  # as in the file; None before the first write
        self._every_s = SPOOL_SHORTEST_S
        self.due_at = 0.0

    def opened(self, batch: str, attempts: Iterable[int], after: Iterable[int] = ()) -> None:
        """A batch was submitted: all its attempts, and the attempts that they depend on."""
        self._batches[batch] = _Batch(tuple(attempts), frozenset(after))

    def look(self, followed: Mapping[int, RemoteAttempt], now: float) -> list[RemoteAttempt]:
        """The attempts with a new file: a claim, or a report of the end."""
        began = time.monotonic()
        names = self.names()
        reported = (followed[number] for number in _numbers(names) if number in followed)
        changed = [each for each in reported if self.read(each, names)]
        cost_s = time.monotonic() - began
        self._every_s = SPOOL_SHORTEST_S if changed else min(SPOOL_LONGEST_S, 1.5 * self._every_s)
        self.due_at = now + max(self._every_s, cost_s / _SHARE)
        return changed

    def names(self) -> frozenset[str]:
        """The names in the folder now; none where it can't be read."""
        try:
            return present(self._run.handover)
        except OSError as problem:
            logger.warning("can't read %s: %s", self._run.handover, problem.strerror)
            return frozenset()

    def read(self, followed: RemoteAttempt, names: Collection[str] | None = None) -> bool:
        """Reads the files of one attempt; whether there was something new. ``names``: the names in the folder, if
        known: over a network file system each attempt to open one of thousands of files would cost a round trip."""
        number, before = followed.record.id, (followed.claim, followed.further, followed.report)
        claim, ended = self._run.attempt_claim(number), self._run.attempt_ended(number)
        try:
            if followed.claim is None and (names is None or claim.name in names):
                followed.claim = read_claim(claim)
            for rank in range(1, followed.record.queued.job.nodes if followed.has_begun else 1):
                part = claim_on_node(claim, rank)
                if rank not in followed.further and (names is None or part.name in names):
                    other = read_claim(part)
                    followed.further = followed.further if other is None else {**followed.further, rank: other}
            if followed.report is None and (names is None or ended.name in names):
                followed.report = read_ended(ended)
        except OSError as problem:
            logger.warning("can't read the files of attempt %d: %s", number, problem)
        return (followed.claim, followed.further, followed.report) != before

    def recall_gone(self, followed: Mapping[int, RemoteAttempt]) -> None:
        """Restores since when an earlier dispatcher has missed these, so that its wait and ours count together."""
        for number, gone in _read_gone(self._run.gone).items():
            if number in followed:
                followed[number].gone_before = gone

    def keep_gone(self, followed: Iterable[RemoteAttempt]) -> None:
        """Records for the next dispatcher since when the engine has missed which of the open attempts: all of these."""
        known = ((each.record.id, each.gone_before or each.gone) for each in followed)
        wanted = {number: gone for number, gone in known if gone is not None and gone.looks}
        if wanted == self._gone:
            return
        # The machine's own clock is exact, but it restarts with each boot and differs between machines.
        wall = clock.wall() - clock.mono()
        attempts = {number: [gone.since, wall + gone.since, gone.looks] for number, gone in wanted.items()}
        try:
            if wanted:
                atomic_write(self._run.gone, json.dumps({"boot": boot_id(), "attempts": attempts}).encode())
            else:
                self._run.gone.unlink(missing_ok=True)
        except OSError as problem:
            logger.warning("can't write %s, trying again: %s", self._run.gone, problem.strerror)
            return
        self._gone = wanted

    def voided(self, batch: str) -> None:
        """We have claimed an attempt of this batch, so that it never begins."""
        if batch in self._batches:
            self._batches[batch].voided = True

    def tidy(self, still_open: set[int]) -> None:
        """Removes the files of the batches of which no attempt is still open, unless an open attempt depends on one of
        theirs: its agent reads there that it can begin."""
        out = (each for each in self._batches.values() if not still_open.isdisjoint(each.attempts))
        needed = still_open.union(*(each.after for each in out))
        for name in [name for name, each in self._batches.items() if needed.isdisjoint(each.attempts)]:
            batch = self._batches.pop(name)
            if not batch.voided:
                self._remove(name, batch.attempts)

    def highest(self) -> int:
        """The highest number of an attempt, or of a batch's first attempt, that has a file; 0 for none."""
        names = self.names()
        heads = (name.partition(".")[0] for name in names)
        found = [int(head) for head in heads if _is_number(head)]
        return max(found + [int(batch[1]) for batch in map(_BATCH.match, names) if batch is not None], default=0)

    def sweep(self, now: float, is_ours: Callable[[str], bool]) -> None:
        """Removes files that earlier runs left of batches that are over. ``now``: wall-clock second.

        Batches that this queue does not know must not begin here: another queue has submitted them, whose folder was
        copied or that was in this folder before; or the queue is older than the folder. ``is_ours`` recognises a batch
        of this queue by its name.
        """
        kept = {number for each in self._batches.values() for number in each.attempts}
        names = self.names() - {self._run.engine_options.name, self._run.gone.name}
        manifests = {name for name in names if name.endswith(".json")}
        gone = True
        for name in sorted(names, key=lambda name: name not in manifests):
            batch, head, path = _BATCH.match(name), name.partition(".")[0], self._run.handover / name
            if name not in manifests and not gone:
                return  # manifests first: without one no agent begins, whatever else is gone
            if batch is not None and name in manifests and not is_ours(batch[0]):
                gone &= _unlink(path)
            elif (batch is None or batch[0] not in self._batches) and not (_is_number(head) and int(head) in kept):
                gone &= _remove_old(path, now - SWEEP_AGE_S)

    def _remove(self, batch: str, attempts: Collection[int]) -> None:
        if not _unlink(self._run.manifest(batch)):
            return  # an agent could begin again an attempt whose claim is gone
        for place, number in enumerate(attempts):
            _unlink(self._run.attempt_claim(number))
            _unlink(self._run.attempt_ended(number))
            _unlink(self._run.attempt_recalled(number))
            output = self._run.engine_output(batch, place)
            with suppress(OSError):
                if output.stat().st_size == 0:
                    output.unlink()


def _read_gone(path: Path) -> dict[int, Gone]:
    """The record of ``keep_gone``, in the machine's own time; nothing where it can't be read. The wall clock, which can
    be set, counts only after a boot or on another machine; if it was set back, the wait begins anew."""
    now, wall = clock.mono(), clock.wall()
    found = {}
    try:
        raw = json.loads(path.read_bytes())
        same_boot = raw["boot"] == boot_id()
        for number, (mono, at, looks) in raw["attempts"].items():
            if not all(-_MOST_S < value < _MOST_S for value in (mono, at)) or looks not in range(1, LOOKS + 1):
                continue
            found[int(number)] = Gone(min(now, mono) if same_boot else now - max(0.0, wall - at), int(looks))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        logger.warning("can't read %s, waiting anew for what is gone: %r", path, problem)
        return {}
    return found


def _numbers(names: Collection[str]) -> list[int]:
    """The attempts with a claim or a report, in order."""
    heads = (name.partition(".")[0] for name in names if name.endswith((".claim", ".ended")))
    return sorted({int(head) for head in heads if _is_number(head)})


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit()


def _remove_old(path: Path, before: float) -> bool:
    """Removes a file that is older than that; False where it can't be removed."""
    try:
        found = os.lstat(path)
    except OSError as problem:
        return problem.errno in NOT_NOW
    if found.st_mtime >= before or (path.suffix == ".out" and found.st_size):
        return True
    return _unlink(path)


def _unlink(path: Path) -> bool:
    """Whether it is gone."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        return True
    return False
