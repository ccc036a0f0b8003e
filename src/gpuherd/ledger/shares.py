"""``Shares``: how many GPU-seconds each user has used of late, the more recent counting more.

For gpuherds that decide whose turn it is, several times a minute: each call reads only what was appended since the last
one, and the open files. A use counts by the half-life at each moment of its time, not by its end.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from gpuherd.gpus.turns import HALF_LIFE_S
from gpuherd.ledger.files import LogReader, logs_in, open_files_in
from gpuherd.ledger.reader import Ledger, records_of
from gpuherd.ledger.records import Recorded, use_of

# What is older has decayed to a thousandth.
_HALF_LIVES = 10
# A record that is written again follows within so many records of its writer.
_MOST_IDS = 20_000
_LN2 = math.log(2)


class Shares:
    """The recent usage of all users by one ledger, as far as its records are believed: those of the users themselves,
    of root, and the reader's own.

    Args:
        ledger: None for the one that is in use here and now, also if it is made later.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger
        self._half_life_s = 0.0
        self._since = 0.0
        self._logs: dict[Path, tuple[int, LogReader]] = {}
        # By owner and id of uses that have ended: whose, and GPU-seconds as they counted at ``_since``.
        self._ended: dict[tuple[int, str], tuple[int, float, float]] = {}
        self._sums: dict[int, float] = {}

    def used_by_user(self, now: float, half_life_s: float = HALF_LIFE_S) -> Mapping[int, float]:
        """GPU-seconds held by each user (uid) until now, wall-clock seconds, decayed; users without any are missing."""
        self._ledger = self._ledger or Ledger.existing()
        if self._ledger is None:
            return {}
        # Also where the clock was set back or far ahead: weights are powers of two, and must stay finite.
        if half_life_s != self._half_life_s or not 0 <= now - self._since <= 100 * half_life_s:
            self._restart(now, half_life_s)
        self._read_new(self._ledger, now)
        sums = dict(self._sums)
        for record in self._open(self._ledger):
            key = (record.observer_uid, record.use.id)
            _, span_s, before = self._ended.get(key, (0, -1.0, 0.0))
            if record.use.span_s > span_s:
                sums[record.use.uid] = sums.get(record.use.uid, 0.0) + self._weighed(record, now) - before
        faded = 2.0 ** (-(now - self._since) / half_life_s)
        return {uid: value * faded for uid, value in sums.items() if value * faded > 1e-6}

    def _restart(self, now: float, half_life_s: float) -> None:
        self._half_life_s, self._since = half_life_s, now
        self._logs, self._ended, self._sums = {}, {}, {}

    def _read_new(self, ledger: Ledger, now: float) -> None:
        for log in logs_in(ledger.folder, now - _HALF_LIVES * self._half_life_s):
            try:
                state = os.lstat(log.path)
            except OSError:
                continue
            inode, reader = self._logs.get(log.path, (0, None))
            if reader is None or inode != state.st_ino:
                # Another file in its place: only its owner can do that, and only to their own records.
                reader = LogReader(log.path)
                self._logs[log.path] = (state.st_ino, reader)
            if state.st_size > reader.offset:
                for line in reader.lines():
                    use = use_of(line)
                    if use is not None:
                        self._add(Recorded(use, state.st_uid), ledger.reader_uid, now)

    def _add(self, record: Recorded, reader_uid: int, now: float) -> None:
        if not record.is_believed_by(reader_uid):
            return
        use, key = record.use, (record.observer_uid, record.use.id)
        _, span_s, before = self._ended.pop(key, (0, -1.0, 0.0))
        if use.span_s < span_s:
            self._ended[key] = (use.uid, span_s, before)
            return
        value = self._weighed(record, now)
        self._sums[use.uid] = max(0.0, self._sums.get(use.uid, 0.0) + value - before)
        self._ended[key] = (use.uid, use.span_s, value)
        if len(self._ended) > _MOST_IDS:
            del self._ended[next(iter(self._ended))]

    def _open(self, ledger: Ledger) -> list[Recorded]:
        longest: dict[tuple[int, str], Recorded] = {}
        for file in open_files_in(ledger.folder):
            for record in records_of(file):
                key = (record.observer_uid, record.use.id)
                if record.is_believed_by(ledger.reader_uid) and (key not in longest or record.outweighs(longest[key])):
                    longest[key] = record
        return list(longest.values())

    def _weighed(self, record: Recorded, now: float) -> float:
        """GPU-seconds of the use as they count at ``_since``, those after that more than once. What was written by a
        clock that was ahead counts as of now."""
        use = record.use
        since, until = min(use.since, now), min(use.until, now)
        return use.held_s * mean_weight(since - self._since, until - self._since, self._half_life_s)


def mean_weight(since: float, until: float, half_life_s: float) -> float:
    """The mean over a time of 2^(t / half-life), t in seconds from the moment that counts one.

    >>> round(mean_weight(-100.0, 0.0, 100.0), 3)
    0.721
    """
    first, last = (max(-2000.0, min(500.0, time * _LN2 / half_life_s)) for time in (since, until))
    if last - first < 1e-6:
        return math.exp(last)
    return (math.exp(last) - math.exp(first)) / (last - first)
