"""Attempts in an engine's hands: what is known of an open one, and what that means: it goes on, or it is over, and how.

The node's own report says what the job did; the engine says what it did to the job. Where they meet:

* A report of success is a success, whatever the engine says. A report of a failure is one, unless the engine had asked
  the job to make room, or it was killed from outside: then the engine's answer is waited for, since it knows why.
* Without a report an attempt goes on for as long as the engine says so. Once the engine calls it ended, or does not
  know it, the report may still be on its way over the network. After a few looks the follower claims the attempt
  itself: then it has never begun, and never will; or a node had it, and it is lost.
* What somebody else than we has cancelled is cancelled for good. What the engine did for reasons of its own is no fault
  of the job.

``outcome`` is pure; ``tracker`` carries out. What an end means for the job is decided where that of a local attempt is
(``attempts.complete.settle``).
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from gpuherd.engines.base import End, Phase, Sighting, Ticket
from gpuherd.engines.local.process import Exit
from gpuherd.jobs.attempts.failures import back_off_s
from gpuherd.jobs.attempts.time_limits import LimitKind, Passed
from gpuherd.jobs.completion import Known, NoFault, Observed
from gpuherd.jobs.dispatcher_state import engine_name
from gpuherd.jobs.records import AttemptRecord, Handed
from gpuherd.jobs.remote import LONGEST_WAIT_S
from gpuherd.jobs.remote.protocol import Claim, EndReport

# So many queries in a row must find it gone before that is believed, over some time (``patience_s``).
LOOKS = 3


@dataclass(frozen=True, slots=True)
class Gone:
    """Since when (by ``clock.mono``) the engine calls an attempt ended or does not know it, or its report waits for the
    engine's answer; and how many queries have confirmed that since, counted up to LOOKS.
    """

    since: float
    looks: int = 0


@dataclass(eq=False)
class RemoteAttempt:
    """An open attempt in an engine's hands, and all that its follower knows of it.

    Attributes:
        record: as it stands in the queue.
        handed: how it is found in the engine, with the handle as soon as that is known.
        claim, report: files of its node. ``further``: claims of its other nodes, by their rank.
        sighting: the engine's last answer about it, None if there was none.
        unknown: at the last query the engine did not know it.
        known_at: the latest moment (by ``clock.mono``) at which the engine surely had it and it had not ended there: it
            has taken it from us since, or shown it; None where this process has seen neither.
        gone: since when it is gone; None while it is not. ``gone_before``: the same as an earlier dispatcher has
            recorded it. It counts from the next query on, if that does not find the attempt either.
        taken: our own claim came too late.
        cancelled_by: who has cancelled the job; ``recalled``: why we took the attempt back. ``called_off``: the engine
            was asked to cancel it.
    """

    record: AttemptRecord
    handed: Handed
    claim: Claim | None = None
    further: Mapping[int, Claim] = field(default_factory=dict)
    report: EndReport | None = None
    sighting: Sighting | None = None
    unknown: bool = False
    known_at: float | None = None
    gone: Gone | None = None
    gone_before: Gone | None = None
    taken: bool = False
    cancelled_by: str | None = None
    recalled: NoFault | None = None
    called_off: bool = False

    @staticmethod
    def among(records: Iterable[AttemptRecord]) -> dict[int, RemoteAttempt]:
        """The attempts among these that an engine has, by number; nothing was read of them yet."""
        return {record.id: RemoteAttempt(record, record.handed) for record in records if record.handed is not None}

    @property
    def ticket(self) -> Ticket:
        """The ticket by which the engine finds it."""
        return Ticket(self.record.id, self.handed.batch, self.handed.index, self.handed.handle)

    @property
    def has_begun(self) -> bool:
        """Whether its node has claimed it."""
        return self.claim is not None and not self.claim.void

    @property
    def in_line(self) -> str | None:
        """Why it waits in the engine, in the engine's words; None where the engine gives no reason, or it does not
        wait."""
        if self.has_begun or self.sighting is None or self.sighting.phase is not Phase.WAITING:
            return None
        return self.sighting.reason

    def seen(self, sighting: Sighting | None, now: float, asked_at: float) -> None:
        """The engine's answer to a query sent at ``asked_at``; None: it does not know the attempt."""
        self.unknown = sighting is None
        if sighting is not None:
            self.sighting = sighting
        if self.report is None and sighting is not None and sighting.phase is not Phase.ENDED:
            self.gone = self.gone_before = None
            self.known_at = asked_at
            return
        self.known_at = None
        gone = self.gone or Gone(now)
        before = self.gone_before or Gone(now)
        looks = min(LOOKS, gone.looks + before.looks + 1)
        self.gone, self.gone_before = Gone(min(gone.since, before.since), looks), None

    def can_be_followed(self, now: float, remembers_s: float) -> bool:
        """Whether the engine surely still knows it, and so holds back others that depend on it. What the queue or its
        node reports is not enough: since then it may have ended there and be forgotten."""
        return self.report is None and self.known_at is not None and now < self.known_at + remembers_s

    def heard(self, handle: str) -> bool:
        """The engine's id for it has come; whether that is new."""
        if self.handed.handle is not None:
            return False
        self.handed = replace(self.handed, handle=handle)
        return True

    def wait_for_word(self, now: float) -> None:
        """The wait for files that are still on their way begins."""
        if self.gone is None:
            self.gone = Gone(now)

    @property
    def end(self) -> End | None:
        """How it ended, as the engine sees it; None while that is not known."""
        sighting = self.sighting
        return None if sighting is None or sighting.phase is not Phase.ENDED else sighting.end

    @property
    def may_begin(self) -> bool:
        """Whether no node has claimed it, as far as we know."""
        return self.claim is None and not self.taken

    @property
    def is_called_back(self) -> bool:
        """Whether it is to end, by a person's wish or by ours."""
        return self.cancelled_by is not None or self.recalled is not None

    def is_late(self, now: float, patience_s: float) -> bool:
        """Whether nothing is on its way any more: so much time has passed since the engine calls it ended or does not
        know it, or since the report. ``patience_s``: how long a file may be on its way."""
        if self.gone is None:
            return False
        if self.gone.looks >= LOOKS and now >= self.gone.since + patience_s:
            return True
        only_time = not self.unknown or self.report is not None
        return only_time and now >= self.gone.since + max(LONGEST_WAIT_S, patience_s)

    def ended(
        self,
        found: Exit,
        at: float,
        *,
        no_fault: NoFault | None = None,
        cancelled_by: str | None = None,
        passed: Passed | None = None,
        note: str = "",
        rests: bool = False,
    ) -> Known:
        """What is known of its end. ``at``: the wall clock now; ``rests``: the job waits a moment before it goes again,
        since what ended it may not be over."""
        record, report = self.record, self.report
        if report is not None:
            # By the node's own clock, however late we have heard of it.
            ran_s = max(0.0, report.ran_s)
        elif self.has_begun or self.taken:
            ran_s = max(0.0, at - record.started_at)
        else:
            ran_s = 0.0
        if report is not None and self.has_begun:
            at = max(record.started_at, min(at, record.started_at + ran_s))
        return Known(
            record=record,
            exit=found,
            at=at,
            mono=record.started_mono + ran_s,
            no_fault=no_fault,
            cancelled_by=cancelled_by,
            passed=passed,
            # Up to a whole second: those that were lost together go again together.
            rest_s=math.ceil(at + back_off_s(record.number)) - at if rests else 0.0,
            observed=Observed(gpus=record.gpus, peak_mb=None if report is None else report.peak_mb),
            has_result=None if report is None else report.has_result,
            note=note,
        )


# --- what it means ------------------------------------------------------------------------------------------------

# Ends that are the engine's doing, and say nothing about the job.
_NO_FAULT = {
    End.PREEMPTED: NoFault.PREEMPTED,
    End.TIME_UP: NoFault.TIME_UP,
    End.NODE_LOST: NoFault.NODE_LOST,
}


class NextStep(Enum):
    """The next step for an attempt that is not over."""

    GO_ON = "nothing"
    ASK = "ask the engine again soon"
    VOID = "claim it, so that it never begins"


def outcome(attempt: RemoteAttempt, at: float, *, late: bool) -> Known | NextStep:
    """The attempt's end, or what is to be done with it while it is not over.

    Args:
        at: the wall clock now.
        late: as ``RemoteAttempt.is_late``.
    """
    if attempt.report is not None:
        return _reported(attempt, attempt.report, at, late=late)
    if attempt.claim is not None and attempt.claim.void:
        return _never_began(attempt, attempt.claim, at)
    if attempt.is_called_back and attempt.may_begin:
        return NextStep.VOID
    if attempt.end is None and not attempt.unknown:
        return NextStep.GO_ON
    # What is cancelled begins no more; if it had begun, our claim comes too late, and its report is waited for.
    surely = attempt.may_begin and attempt.end in (End.NEVER, End.CANCELLED)
    if not late and not surely:
        return NextStep.ASK
    return NextStep.VOID if attempt.may_begin else _unreported(attempt, at)


def _reported(attempt: RemoteAttempt, report: EndReport, at: float, *, late: bool) -> Known | NextStep:
    found, note = report.exit, report.problem or ""
    if report.well:
        return attempt.ended(found, at)
    if attempt.is_called_back:
        return _by_us(attempt, found, at)
    passed = _passed(report)
    if passed is not None:
        return attempt.ended(found, at, passed=passed, note=note)
    # Leader and shell were killed together: then the report is a guardian's, who knows no more than that.
    unseen = found.started and found.code is None and found.signal is None
    if not (report.interrupted or unseen or _is_of_others(found)):
        return attempt.ended(found, at, note=note)
    if attempt.end is None and not late:
        return NextStep.ASK
    by_engine = _by_engine(attempt, found, at)
    if by_engine is not None:
        return by_engine
    if report.interrupted:
        # The reason is unknown: what has ended it may end it again at once, and that must not go round and round.
        why = NoFault.NODE_LOST if report.lost else NoFault.MADE_ROOM
        return attempt.ended(found, at, no_fault=why, note=note, rests=True)
    if attempt.end is None and (unseen or attempt.unknown):
        return attempt.ended(found, at, no_fault=NoFault.NODE_LOST, rests=True)
    return attempt.ended(found, at, note=note)


def _never_began(attempt: RemoteAttempt, claim: Claim, at: float) -> Known:
    """We have claimed it ourselves, now or in an earlier process; or its leader did, so that it does not begin."""
    found = Exit(started=False)
    if attempt.is_called_back:
        return _by_us(attempt, found, at)
    if claim.why in NoFault.__members__:
        why = NoFault[claim.why]
        return attempt.ended(found, at, no_fault=why, rests=why is NoFault.TOO_EARLY)
    match attempt.end:
        case None:
            return attempt.ended(found, at, no_fault=NoFault.NOT_TAKEN, rests=True)
        case End.NEVER:
            return attempt.ended(found, at, no_fault=NoFault.DEPENDENCY_FAILED, rests=True)
        case End.CANCELLED:
            return _by_somebody(attempt, found, at)
        case End.FAILED | End.OUT_OF_MEMORY | End.TIME_UP:
            # It was given its place, and even its leader could not begin there: that counts, or it would go on so.
            return attempt.ended(found, at, note=_says(attempt, "it ended before the job began"))
        case _:
            return attempt.ended(found, at, no_fault=NoFault.NOT_BEGUN, rests=True)


def _unreported(attempt: RemoteAttempt, at: float) -> Known:
    """A node has it, the engine has it no more, and no report came."""
    found = Exit(started=True)
    if attempt.is_called_back:
        return _by_us(attempt, found, at)
    if attempt.end is End.OK:
        # The leader ends with 0 only for a job that has succeeded; it could not write its report, over a quota say.
        return attempt.ended(Exit(started=True, code=0), at)
    if attempt.end is End.FAILED:
        return attempt.ended(found, at, note=_says(attempt, "it failed, and its node has reported nothing"))
    by_engine = _by_engine(attempt, found, at)
    return by_engine or attempt.ended(found, at, no_fault=NoFault.NODE_LOST, rests=True)


def _by_us(attempt: RemoteAttempt, found: Exit, at: float) -> Known:
    return attempt.ended(found, at, cancelled_by=attempt.cancelled_by, no_fault=attempt.recalled)


def _by_engine(attempt: RemoteAttempt, found: Exit, at: float) -> Known | None:
    """The end that the engine made, None where it made none."""
    end = attempt.end
    if end is End.CANCELLED:
        return _by_somebody(attempt, found, at)
    if end is End.OUT_OF_MEMORY:
        # In the words by which ``failures`` knows it.
        how = "ended it in an oom-kill event: it used more main memory than it was given"
        return attempt.ended(found, at, note=f"{engine_name(attempt.handed.engine)} {how}")
    if end is not None and end in _NO_FAULT:
        return attempt.ended(found, at, no_fault=_NO_FAULT[end], rests=end is End.NODE_LOST)
    return None


def _by_somebody(attempt: RemoteAttempt, found: Exit, at: float) -> Known:
    by = None if attempt.sighting is None else attempt.sighting.by
    return attempt.ended(found, at, cancelled_by=f"{by or 'somebody'} in {engine_name(attempt.handed.engine)}")


def _is_of_others(found: Exit) -> bool:
    """Whether the job may have been ended from outside before its leader was: an engine's SIGTERM goes to both."""
    number = found.signal or (found.code or 0) - 128  # a shell's code for the signal that ended its command
    return number in (signal.SIGTERM, signal.SIGKILL)


def _says(attempt: RemoteAttempt, plain: str) -> str:
    reason = None if attempt.sighting is None else attempt.sighting.reason
    return f"{engine_name(attempt.handed.engine)}: {plain}" + (f" ({reason})" if reason else "")


def _passed(report: EndReport) -> Passed | None:
    if report.limit is None or report.limit_s is None:
        return None
    try:
        return Passed(LimitKind(report.limit), report.limit_s, report.stage)
    except ValueError:
        return None
