"""Which GPUs a queue leaves out for a while because jobs failed on them, for those who only look at it.

Reads the book that the dispatcher keeps (``health``); what is in it is decided by ``quarantine``.
"""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass

from gpuherd.jobs import quarantine
from gpuherd.jobs.reader import QueueReader, is_there
from gpuherd.jobs.rundir import RunDirectory


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A GPU that the queue in this folder leaves out until ``until`` (seconds since 1970). ``sentence`` says for how
    long and why, ``reason`` only why.
    """

    queue: str
    until: float
    reason: str
    sentence: str


def left_out(run: RunDirectory, now: float) -> dict[str, LeftOut]:
    """The GPUs that this queue leaves out now, by UUID; none when there is no queue.

    Raises QueueUnreadable when there is one that can't be read.
    """
    if not is_there(run.queue):
        return {}
    with closing(QueueReader(run.queue)) as reader:
        return read_left_out(run, reader, now)


def read_left_out(run: RunDirectory, reader: QueueReader, now: float) -> dict[str, LeftOut]:
    """The same from a queue that is open already."""
    # A queue of an older gpuherd has no such table.
    if reader.one("SELECT 1 FROM sqlite_master WHERE name = 'gpu_health'") is None:
        return {}
    known = {}
    for row in reader.rows("SELECT uuid, state FROM gpu_health"):
        with suppress(ValueError):
            known[row["uuid"]] = quarantine.from_json(row["state"])
    return {
        uuid: LeftOut(str(run.root), known[uuid].until or now, known[uuid].reason or "", sentence)
        for uuid, sentence in quarantine.excluded(known, now).items()
    }
