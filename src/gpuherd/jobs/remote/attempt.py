"""What is known of an attempt on an engine, and what that means: it goes on, or it is over, and how. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from gpuherd.engines.base import End, Phase, Sighting, Ticket
from gpuherd.engines.local.process import Exit
from gpuherd.engines.progress import Progress
from gpuherd.engines.progress import read as read_progress
from gpuherd.jobs.attempts.retry import Blameless
from gpuherd.jobs.attempts.time_limits import LimitKind, Passed
from gpuherd.jobs.records import AttemptRecord, Handed, PauseReason
from gpuherd.jobs.remote.protocol import Claim, EndReport
from gpuherd.jobs.run_dir import RunDirectory

# What is known of an attempt in an engine's hands, and what that means: it goes on, or it is over, and how. Pure.
#
# The node's own report says what the job did; the engine says what it did to the job. Where they meet:
#
# * A report of success is a success, whatever the engine says. A report of a failure is one, unless the engine had
#   told
#   the job to make room, or it was killed from outside: then the engine's word is waited for a moment, for it knows
#   why.
# * Without a report an attempt goes on for as long as the engine says so. Once that calls it ended, or does not know
#   it,
#   the report may still be on its way over the network. After a few looks the follower claims the attempt itself:
#   then it
#   has never begun, and never will; or somebody had it, and it is lost.
# * What somebody else than we has cancelled is cancelled for good. What the engine did for reasons of its own is none
#   of
#   the job's fault.

# Ends that are the engine's doing, and say nothing about the job.
_BLAMELESS = {
    End.PREEMPTED: Blameless.PREEMPTED,
    End.TIME_UP: Blameless.TIME_UP,
    End.NODE_LOST: Blameless.NODE_LOST,
}


class Step(Enum):
    """What is to be done with an attempt that is not over."""

    GO_ON = "nothing"
    ASK = "ask the engine again soon"
    VOID = "claim it, so that it never begins"


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """All that is known of an open attempt.

    Attributes:
        engine: what people call the engine.
        claim, ended: what its node has told.
        sighting: what the engine told last, None if it never did; ``unknown``: at the last look it did not know it.
        late: since the engine calls it ended or does not know it, or since the report, so much time has passed that
            nothing is on its way any more.
        taken: our own claim came too late: somebody has it, whether we can see that or not.
        cancelled_by: who wants the job to end for good; ``recalled``: why we took it back.
    """

    engine: str
    claim: Claim | None = None
    ended: EndReport | None = None
    sighting: Sighting | None = None
    unknown: bool = False
    late: bool = False
    taken: bool = False
    cancelled_by: str | None = None
    recalled: Blameless | None = None

    @property
    def end(self) -> End | None:
        """How it ended, as the engine sees it; None while that is not known."""
        sighting = self.sighting
        return None if sighting is None or sighting.phase is not Phase.ENDED else sighting.end

    @property
    def may_begin(self) -> bool:
        """Whether nobody has claimed it, as far as we know."""
        return self.claim is None and not self.taken


@dataclass(frozen=True, kw_only=True, slots=True)
class Over:
    """An end, in the words of ``settle.Facts``. ``told`` is what the engine or the node says of it, for the reason of a
    failure; ``rests``: the job waits a moment before it goes again, for what ended it may not be over.
    """

    exit: Exit
    blameless: Blameless | None = None
    cancelled_by: str | None = None
    passed: Passed | None = None
    told: str = ""
    rests: bool = False


def meaning(known: Known) -> Over | Step:
    """What it means."""
    if known.ended is not None:
        return _reported(known, known.ended)
    if known.claim is not None and known.claim.void:
        return _never_began(known)
    if (known.cancelled_by or known.recalled) and known.may_begin:
        return Step.VOID
    if known.end is None and not known.unknown:
        return Step.GO_ON
    # What is cancelled begins no more; if it had begun, our claim comes too late, and its report is waited for.
    surely = known.may_begin and known.end in (End.NEVER, End.CANCELLED)
    if not known.late and not surely:
        return Step.ASK
    return Step.VOID if known.may_begin else _unreported(known)


def _reported(known: Known, ended: EndReport) -> Over | Step:
    found = Exit(ended.started, ended.code, ended.signal, ended.ran_s)
    if ended.well:
        return Over(exit=found)
    told = ended.problem or ""
    if known.cancelled_by or known.recalled:
        return _ours(known, found)
    passed = _passed(ended)
    if passed is not None:
        return Over(exit=found, passed=passed, told=told)
    # Its leader and its shell were killed together: a guardian tells, who knows no more than that.
    unseen = ended.started and ended.code is None and ended.signal is None
    if not (ended.interrupted or unseen or _is_of_others(ended)):
        return Over(exit=found, told=told)
    if known.end is None and not known.late:
        return Step.ASK
    by_engine = _by_engine(known, found)
    if by_engine is not None:
        return by_engine
    if ended.interrupted:
        # Nobody says why: what has ended it may end it again at once, and that must not go round and round.
        return Over(exit=found, blameless=Blameless.MADE_ROOM, told=told, rests=True)
    if known.end is None and (unseen or known.unknown):
        return Over(exit=found, blameless=Blameless.NODE_LOST, rests=True)
    return Over(exit=found, told=told)


def _never_began(known: Known) -> Over:
    """We have claimed it ourselves, now or in an earlier life; or its leader did, so that it does not begin."""
    found = Exit(started=False)
    if known.cancelled_by or known.recalled:
        return _ours(known, found)
    if known.claim is not None and known.claim.why in Blameless.__members__:
        why = Blameless[known.claim.why]
        return Over(exit=found, blameless=why, rests=why is Blameless.TOO_EARLY)
    match known.end:
        case None:
            return Over(exit=found, blameless=Blameless.NOT_TAKEN, rests=True)
        case End.NEVER:
            return Over(exit=found, blameless=Blameless.STRANDED, rests=True)
        case End.CANCELLED:
            return _by_somebody(known, found)
        case End.FAILED | End.OUT_OF_MEMORY | End.TIME_UP:
            # It was given its place, and even its leader could not begin there: that counts, or it would go on so.
            return Over(exit=found, told=_says(known, "it ended before the job began"))
        case _:
            return Over(exit=found, blameless=Blameless.NOT_BEGUN, rests=True)


def _unreported(known: Known) -> Over:
    """Somebody has it, the engine has it no more, and nothing was told."""
    found = Exit(started=True)
    if known.cancelled_by or known.recalled:
        return _ours(known, found)
    if known.end is End.OK:
        # The leader ends with 0 only for a job that has succeeded; it could not write, over a quota say.
        return Over(exit=Exit(started=True, code=0))
    if known.end is End.FAILED:
        return Over(exit=found, told=_says(known, "it failed, and its node has told nothing"))
    return _by_engine(known, found) or Over(exit=found, blameless=Blameless.NODE_LOST, rests=True)


def _ours(known: Known, found: Exit) -> Over:
    return Over(exit=found, cancelled_by=known.cancelled_by, blameless=known.recalled)


def _by_engine(known: Known, found: Exit) -> Over | None:
    """What the engine did to it, None where it did nothing."""
    end = known.end
    if end is End.CANCELLED:
        return _by_somebody(known, found)
    if end is End.OUT_OF_MEMORY:
        # In the words by which failures are told apart.
        text = f"{known.engine} ended it in an oom-kill event: it used more main memory than it was given"
        return Over(exit=found, told=text)
    if end is not None and end in _BLAMELESS:
        return Over(exit=found, blameless=_BLAMELESS[end], rests=end is End.NODE_LOST)
    return None


def _by_somebody(known: Known, found: Exit) -> Over:
    by = None if known.sighting is None else known.sighting.by
    return Over(exit=found, cancelled_by=f"{by or 'somebody'} in {known.engine}")


def _is_of_others(ended: EndReport) -> bool:
    """Whether the job may have been ended from outside before its leader was: an engine's SIGTERM goes to both."""
    number = ended.signal or (ended.code or 0) - 128  # a shell's word for the signal that ended its command
    return number in (signal.SIGTERM, signal.SIGKILL)


def _says(known: Known, plain: str) -> str:
    reason = None if known.sighting is None else known.sighting.reason
    return f"{known.engine}: {plain}" + (f" ({reason})" if reason else "")


def _passed(ended: EndReport) -> Passed | None:
    if ended.limit is None or ended.limit_s is None:
        return None
    try:
        return Passed(LimitKind(ended.limit), ended.limit_s, ended.stage)
    except ValueError:
        return None


# An open attempt in an engine's hands, and all that its follower knows of it.

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
    ended: EndReport | None = None
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
