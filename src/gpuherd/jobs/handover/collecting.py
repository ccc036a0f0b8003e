"""Ends attempts that an engine has: claims those that must not begin, calls off those that must end, and puts what was
told into the words of an end. What an end means for the job is decided where that of a local attempt is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from gpuherd.engines.cluster import End
from gpuherd.jobs import clock
from gpuherd.jobs.ending import Ended
from gpuherd.jobs.failures import back_off_s
from gpuherd.jobs.handover.asking import Asking
from gpuherd.jobs.handover.folder import Folder
from gpuherd.jobs.handover.followed import Followed
from gpuherd.jobs.handover.meaning import Over, Step, meaning
from gpuherd.jobs.handover.reports import Claim, take
from gpuherd.jobs.logtail import size, tail
from gpuherd.jobs.records import Begun
from gpuherd.jobs.retry import Seen
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.settle import Blameless

logger = logging.getLogger(__name__)


class Collecting:
    """Does so for one follower. ``patience_s``: how long a report may be on its way when the engine calls it ended."""

    def __init__(self, run: RunDirectory, asking: Asking, folder: Folder, patience_s: float):
        self._run = run
        self._asking = asking
        self._folder = folder
        self._patience_s = patience_s

    def judge(self, followed: Followed) -> Ended | None:
        """The attempt's end, None while it goes on. Does what is to be done meanwhile."""
        now = clock.mono()
        while True:
            found = meaning(followed.known(self._asking.title, now, self._patience_s))
            if isinstance(found, Over):
                return self._ended(followed, found)
            if found is Step.VOID and self._void(followed):
                continue
            if found is Step.ASK:
                followed.wait_for_word(now)
                self._asking.soon(now)
            return None

    def call_off(self, followed: Followed) -> None:
        """Tells the engine to end one that has begun, and that is to end; once."""
        wanted = followed.cancelled_by is not None or followed.recalled is not None
        handle = followed.handed.handle
        if not wanted or followed.called_off or handle is None:
            return
        if followed.recalled is not None:
            # So that nobody takes it for an administrator's doing, should we die before it has ended.
            try:
                self._run.attempt_recalled(followed.record.id).touch()
            except OSError as problem:
                logger.warning("can't mark attempt %d as called back: %s", followed.record.id, problem)
        followed.called_off = True
        self._asking.cancel([handle])

    def adopt(self, found: Iterable[Followed]) -> None:
        """Takes over what an earlier follower had begun to do with them."""
        names = self._folder.names()
        for followed in found:
            followed.cancelled_by = followed.record.queued.cancelled_by
            if self._run.attempt_recalled(followed.record.id).name in names:
                followed.recalled = Blameless.STOPPED
            self._folder.read(followed, names)

    def _void(self, followed: Followed) -> bool:
        """Claims an attempt, so that it never begins; False where that can't be tried now."""
        why = "" if followed.recalled is None else followed.recalled.name
        claim = Claim(at=clock.wall(), void=True, why=why)
        try:
            won = take(self._run.attempt_claim(followed.record.id), claim)
        except OSError as problem:
            logger.warning("can't claim attempt %d, trying again: %s", followed.record.id, problem)
            return False
        self._folder.voided(followed.handed.batch)
        if not won:
            followed.taken = True
            self._folder.read(followed)
            return True
        followed.claim = claim
        sighting = followed.sighting
        still_there = sighting is None or sighting.end in (None, End.NEVER)
        if followed.handed.handle is not None and still_there and not followed.unknown:
            self._asking.cancel([followed.handed.handle])
        return True

    def _ended(self, followed: Followed, over: Over) -> Ended:
        record, told, report = followed.record, over.told, followed.ended
        at = clock.wall()
        if report is not None:
            # By the node's own clock, whenever we have heard of it.
            ran_s = max(0.0, report.ran_s)
        elif followed.has_begun or followed.taken:
            ran_s = max(0.0, at - record.started_at)
        else:
            ran_s = 0.0
        if report is not None and followed.has_begun:
            at = max(record.started_at, min(at, record.started_at + ran_s))
        if over.exit.code != 0 and size(Path(record.log)) == 0:
            printed = tail(self._run.engine_output(followed.handed.batch, followed.handed.index))
            told = "\n".join(part for part in (printed, told) if part)
        return Ended(
            record=record,
            exit=over.exit,
            at=at,
            mono=record.started_mono + ran_s,
            blameless=over.blameless,
            passed=over.passed,
            cancelled_by=over.cancelled_by,
            seen=Seen(gpus=record.gpus, peak_mb=None if report is None else report.peak_mb),
            has_result=None if report is None else report.has_result,
            told=told,
            # Up to a whole second: those that were lost together go again together.
            rest_s=math.ceil(at + back_off_s(record.number)) - at if over.rests else 0.0,
        )


def begun(followed: Followed, at: float, mono: float) -> Begun | None:
    """The beginning of an attempt that its node has claimed, for the queue; None while it has not begun, and where the
    queue has all that is known of it.

    ``at`` and ``mono`` are now. The node's clock is believed as far as it can be right.
    """
    claim, record = followed.claim, followed.record
    if claim is None or claim.void:
        return None
    labels = gpu_labels(claim, record.queued.gpus, record.queued.job.nodes, followed.further)
    if followed.handed.node is None:
        since = max(record.started_at, min(claim.at, at))
        mono -= at - since
    elif labels == record.labels or not followed.further:
        return None
    else:
        since, mono = record.started_at, record.started_mono
    return Begun(attempt=record.id, node=claim.node or "?", gpus=labels, labels=labels, at=since, mono=mono)


def with_begun(followed: Followed, found: Begun) -> None:
    """The follower's own picture of it, as it is in the queue by now."""
    followed.handed = replace(followed.handed, node=found.node)
    followed.record = replace(
        followed.record,
        gpus=found.gpus,
        labels=found.labels,
        started_at=found.at,
        started_mono=found.mono,
        handed=followed.handed,
    )


def gpu_labels(
    claim: Claim, gpus: int, nodes: int, further: Mapping[int, Claim] = MappingProxyType({})
) -> tuple[str, ...]:
    """What people call the GPUs of an attempt: ``n1:0``. Of another node that is not known by name ``n1+1:0``, and of
    one that has not told which it has ``n2:?1``, ``n2:?2``.

    ``further``: what the other nodes have told, by rank.

    >>> first = Claim(at=0.0, node="n1", gpus=("4", "5"), others=("n2",))
    >>> gpu_labels(first, 2, 2, {1: Claim(at=0.0, node="n2", gpus=("0", "3"))})
    ('n1:4', 'n1:5', 'n2:0', 'n2:3')
    >>> gpu_labels(first, 2, 3)
    ('n1:4', 'n1:5', 'n2:?1', 'n2:?2', 'n1+2:?1', 'n1+2:?2')
    """
    if gpus == 0:
        return ()
    node = claim.node or "?"
    found = [(node, claim.gpus or tuple(str(number) for number in range(gpus)))]
    for rank in range(1, nodes):
        told = further.get(rank)
        name = claim.others[rank - 1] if rank <= len(claim.others) else told.node if told is not None else ""
        unknown = tuple(f"?{number}" for number in range(1, gpus + 1))
        # Several nodes of Ray may share a host.
        known = name and name not in (each for each, _ in found)
        found.append((name if known else f"{node}+{rank}", unknown if told is None else told.gpus or unknown))
    return tuple(f"{name}:{number}" for name, numbers in found for number in numbers)
