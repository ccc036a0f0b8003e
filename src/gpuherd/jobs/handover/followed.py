"""An open attempt in an engine's hands, and all that its follower knows of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpuherd.engines.cluster import Phase, Sighting, Ticket
from gpuherd.engines.progress import Progress
from gpuherd.engines.progress import read as read_progress
from gpuherd.jobs.handover.meaning import Known
from gpuherd.jobs.handover.reports import Claim, Ended
from gpuherd.jobs.records import AttemptRecord, Handed, PauseReason
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.settle import Blameless

# So many looks of the engine in a row must find it gone before that is believed, over so many seconds.
LOOKS = 3
# An end that is known needs no further look, only time: the engine may be away.
_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Gone:
    """Since when (by ``clock.mono``) the engine calls an attempt ended or does not know it, or its report waits for the
    engine's word; and how many looks of the engine have confirmed that since, counted up to LOOKS.
    """

    since: float
    looks: int = 0


@dataclass(eq=False)
class Followed:
    """One of them.

    Attributes:
        record: as it stands in the queue.
        handed: how it is found in the engine, with the handle as soon as that is known.
        claim, ended, sighting: what was told of it. ``further``: claims of its other nodes, by their rank.
        unknown: at the last look the engine did not know it.
        known_at: the latest moment (by ``clock.mono``) at which the engine surely had it and it had not ended there: it
            has taken it from us since, or shown it; None where this process has seen neither.
        gone: since when it is gone; None while it is not. ``gone_before``: what an earlier follower has written down of
            that. It counts from the next look on, if that does not find the attempt either.
        taken: our own claim came too late.
        cancelled_by, recalled: as in ``meaning.Known``. ``called_off``: the engine has been told to end it.
    """

    record: AttemptRecord
    handed: Handed
    progress_file: Path
    claim: Claim | None = None
    further: Mapping[int, Claim] = field(default_factory=dict)
    ended: Ended | None = None
    sighting: Sighting | None = None
    unknown: bool = False
    known_at: float | None = None
    gone: Gone | None = None
    gone_before: Gone | None = None
    taken: bool = False
    cancelled_by: str | None = None
    recalled: Blameless | None = None
    called_off: bool = False
    paused: frozenset[PauseReason] = frozenset()

    @staticmethod
    def among(records: Iterable[AttemptRecord], run: RunDirectory) -> dict[int, Followed]:
        """Those of these attempts that an engine has, by number; nothing has been told of them yet."""
        return {
            record.id: Followed(record, record.handed, run.attempt_progress(record.id))
            for record in records
            if record.handed is not None
        }

    @property
    def ticket(self) -> Ticket:
        """By which the engine finds it."""
        return Ticket(self.record.id, self.handed.batch, self.handed.index, self.handed.handle)

    @property
    def has_begun(self) -> bool:
        """Whether its node has taken it."""
        return self.claim is not None and not self.claim.void

    @property
    def in_line(self) -> str | None:
        """Why it waits in the engine, in the engine's words; None where that says nothing, or it does not wait."""
        if self.has_begun or self.sighting is None or self.sighting.phase is not Phase.WAITING:
            return None
        return self.sighting.reason

    def paused_s(self, _now: float, /) -> float:
        """How long it was stopped by us until now."""
        return self.record.paused_s

    def progress(self) -> Progress | None:
        """What the job last told of itself."""
        return read_progress(self.progress_file) if self.has_begun else None

    def seen(self, sighting: Sighting | None, now: float, asked_at: float) -> None:
        """What a look of the engine has shown that was asked for then; None: it does not know it."""
        self.unknown = sighting is None
        if sighting is not None:
            self.sighting = sighting
        if self.ended is None and sighting is not None and sighting.phase is not Phase.ENDED:
            self.gone = self.gone_before = None
            self.known_at = asked_at
            return
        self.known_at = None
        gone = self.gone or Gone(now)
        before = self.gone_before or Gone(now)
        looks = min(LOOKS, gone.looks + before.looks + 1)
        self.gone, self.gone_before = Gone(min(gone.since, before.since), looks), None

    def can_be_followed(self, now: float, remembers_s: float) -> bool:
        """Whether the engine surely still knows it, and so keeps others waiting that are to follow it. What the queue
        or its node tells of it is not enough: since then it may have ended there and be forgotten."""
        return self.ended is None and self.known_at is not None and now < self.known_at + remembers_s

    def heard(self, handle: str) -> bool:
        """The engine's own word for it has come; whether that is new."""
        if self.handed.handle is not None:
            return False
        self.handed = replace(self.handed, handle=handle)
        return True

    def wait_for_word(self, now: float) -> None:
        """From now on it is waited for what is still on its way."""
        if self.gone is None:
            self.gone = Gone(now)

    def known(self, engine: str, now: float, patience_s: float) -> Known:
        """All this, to be judged. ``patience_s``: how long a file may be on its way."""
        return Known(
            engine=engine,
            claim=self.claim,
            ended=self.ended,
            sighting=self.sighting,
            unknown=self.unknown,
            late=self._is_late(now, patience_s),
            taken=self.taken,
            cancelled_by=self.cancelled_by,
            recalled=self.recalled,
        )

    def _is_late(self, now: float, patience_s: float) -> bool:
        if self.gone is None:
            return False
        if self.gone.looks >= LOOKS and now >= self.gone.since + patience_s:
            return True
        only_time = not self.unknown or self.ended is not None
        return only_time and now >= self.gone.since + max(_LONGEST_WAIT_S, patience_s)
