"""The folder in which nodes are told of attempts, and tell of them: read while a run goes on, and kept small.

What may still keep an attempt from beginning again stays: a claim goes after the manifest without which no leader
begins, and of a batch of which we have claimed something ourselves nothing goes for a while, for the engine may be
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
from pathlib import Path

from gpuherd.atomic import atomic_write
from gpuherd.engines.process_tree import boot_id
from gpuherd.jobs import clock
from gpuherd.jobs.remote.outcome import LOOKS, Gone, RemoteAttempt
from gpuherd.jobs.remote.protocol import NOT_NOW, claim_on_node, present, read_claim, read_ended
from gpuherd.jobs.run_dir import RunDirectory

logger = logging.getLogger(__name__)

# How a batch is called (``QueueFile.batch_name``), and what all its files begin with.
_BATCH = re.compile(r"gpuherd-[0-9a-f]+\.[0-9]+-([0-9]+)")
_QUIET_S = 600.0
_SHORTEST_S, _LONGEST_S = 0.2, 1.0
# At most so much of the time is spent on looking.
_SHARE = 0.05
# More than any second of a clock.
_MOST_S = 1e15


class Spool:
    """Reads what nodes tell, and removes what is read.

    Attributes:
        due_at: when ``look`` is to be called next (by ``clock.mono``).
    """

    def __init__(self, run: RunDirectory):
        self._run = run
        self._open: dict[str, set[int]] = {}
        self._all: dict[str, tuple[int, ...]] = {}
        self._voided: set[str] = set()
        self._after: dict[str, frozenset[int]] = {}
        self._gone: dict[int, Gone] | None = None  # as in the file; None before anything was written
        self._every_s = _SHORTEST_S
        self.due_at = 0.0

    def opened(
        self, batch: str, attempts: Collection[int], still_open: Collection[int], after: Collection[int] = ()
    ) -> None:
        """A batch is out: these attempts in all, of which some have no end yet, and which follow those of ``after``."""
        self._all[batch] = tuple(attempts)
        self._open[batch] = set(still_open)
        if after:
            self._after[batch] = frozenset(after)

    def look(self, followed: Mapping[int, RemoteAttempt], now: float) -> list[RemoteAttempt]:
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

    def read(self, followed: RemoteAttempt, names: Collection[str] | None = None) -> bool:
        """Reads what is told of one attempt; whether there was something new. ``names``: what is there, where that is
        known: who asks for each of thousands of files over a network waits for each."""
        number, before = followed.record.id, (followed.claim, followed.further, followed.report)
        claim, ended = self._run.attempt_claim(number), self._run.attempt_ended(number)
        try:
            if followed.claim is None and (names is None or claim.name in names):
                followed.claim = read_claim(claim)
            for rank in range(1, followed.record.queued.job.nodes if followed.has_begun else 1):
                part = claim_on_node(claim, rank)
                if rank not in followed.further and (names is None or part.name in names):
                    told = read_claim(part)
                    followed.further = followed.further if told is None else {**followed.further, rank: told}
            if followed.report is None and (names is None or ended.name in names):
                followed.report = read_ended(ended)
        except OSError as problem:
            logger.warning("can't read what is told of attempt %d: %s", number, problem)
        return (followed.claim, followed.further, followed.report) != before

    def recall_gone(self, followed: Mapping[int, RemoteAttempt]) -> None:
        """Since when an earlier follower has missed these, so that its patience and ours are one."""
        for number, gone in _read_gone(self._run.gone).items():
            if number in followed:
                followed[number].gone_before = gone

    def keep_gone(self, followed: Iterable[RemoteAttempt]) -> None:
        """Writes down for the next follower since when the engine misses which of these: all that are out."""
        known = ((each.record.id, each.gone_before or each.gone) for each in followed)
        wanted = {number: gone for number, gone in known if gone is not None and gone.looks}
        if wanted == self._gone:
            return
        # The machine's own clock is exact, but it begins anew with each boot and differs between machines.
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
        """We have claimed an attempt of this batch ourselves."""
        self._voided.add(batch)

    def closed(self, batch: str, attempt: int) -> None:
        """The end of an attempt is in the queue. With the last of its batch the files go, unless another that is out
        may follow one of these: its leader reads there that it can begin."""
        left = self._open.get(batch)
        if left is None:
            return
        left.discard(attempt)
        if left:
            return
        self._after.pop(batch, None)
        needed = frozenset().union(*self._after.values())
        for each in [each for each, left in self._open.items() if not left and needed.isdisjoint(self._all[each])]:
            del self._open[each]
            attempts = self._all.pop(each)
            if each not in self._voided:
                self._remove(each, attempts)
            self._voided.discard(each)

    def highest(self) -> int:
        """The highest number of an attempt, or of a batch's first, of which there is a file; 0 for none."""
        names = self.names()
        heads = (name.partition(".")[0] for name in names)
        found = [int(head) for head in heads if _is_number(head)]
        return max(found + [int(batch[1]) for batch in map(_BATCH.match, names) if batch is not None], default=0)

    def sweep(self, now: float, is_ours: Callable[[str], bool]) -> None:
        """Removes what earlier runs left of batches that are out no more. ``now``: wall-clock second.

        What this queue knows nothing of must not begin here: another has handed it over, whose folder was copied or
        that lay in this one before; or the queue is an older one than the folder. ``is_ours`` tells a batch of this
        queue by its name.
        """
        kept = {number for numbers in self._all.values() for number in numbers}
        names = self.names() - {self._run.engine_options.name, self._run.gone.name}
        manifests = {name for name in names if name.endswith(".json")}
        gone = True
        for name in sorted(names, key=lambda name: name not in manifests):
            batch, head, path = _BATCH.match(name), name.partition(".")[0], self._run.handover / name
            if name not in manifests and not gone:
                return  # manifests first: without one no leader begins, whatever else is gone
            if batch is not None and name in manifests and not is_ours(batch[0]):
                gone &= _unlink(path)
            elif (batch is None or batch[0] not in self._all) and not (_is_number(head) and int(head) in kept):
                gone &= _remove_old(path, now - _QUIET_S)

    def _remove(self, batch: str, attempts: Collection[int]) -> None:
        if not _unlink(self._run.manifest(batch)):
            return  # a leader could begin again what nobody has claimed any more
        for place, number in enumerate(attempts):
            _unlink(self._run.attempt_claim(number))
            _unlink(self._run.attempt_ended(number))
            _unlink(self._run.attempt_recalled(number))
            output = self._run.engine_output(batch, place)
            with suppress(OSError):
                if output.stat().st_size == 0:
                    output.unlink()


def _read_gone(path: Path) -> dict[int, Gone]:
    """What ``keep_gone`` has written, in the machine's own time; nothing where that can't be read. The wall clock,
    which anybody may set, counts only after a boot or on another machine; one set back makes the wait begin anew."""
    now, wall = clock.mono(), clock.wall()
    found = {}
    try:
        told = json.loads(path.read_bytes())
        same_boot = told["boot"] == boot_id()
        for number, (mono, at, looks) in told["attempts"].items():
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
    """The attempts that told something, in order."""
    heads = (name.partition(".")[0] for name in names if name.endswith((".claim", ".ended")))
    return sorted({int(head) for head in heads if _is_number(head)})


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit()


def _remove_old(path: Path, before: float) -> bool:
    """Removes a file that is as old as that; False where it should go and can't."""
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
