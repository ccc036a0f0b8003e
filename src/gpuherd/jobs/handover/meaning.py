"""What is known of an attempt in an engine's hands, and what that means: it goes on, or it is over, and how. Pure.

The node's own report says what the job did; the engine says what it did to the job. Where they meet:

* A report of success is a success, whatever the engine says. A report of a failure is one, unless the engine had told
  the job to make room, or it was killed from outside: then the engine's word is waited for a moment, for it knows why.
* Without a report an attempt goes on for as long as the engine says so. Once that calls it ended, or does not know it,
  the report may still be on its way over the network. After a few looks the follower claims the attempt itself: then it
  has never begun, and never will; or somebody had it, and it is lost.
* What somebody else than we has cancelled is cancelled for good. What the engine did for reasons of its own is none of
  the job's fault.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

from gpuherd.engines.cluster import End, Phase, Sighting
from gpuherd.engines.local import Exit
from gpuherd.jobs.handover.reports import Claim, Ended
from gpuherd.jobs.settle import Blameless
from gpuherd.jobs.timelimits import LimitKind, Passed

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
    ended: Ended | None = None
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


def _reported(known: Known, ended: Ended) -> Over | Step:
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


def _is_of_others(ended: Ended) -> bool:
    """Whether the job may have been ended from outside before its leader was: an engine's SIGTERM goes to both."""
    number = ended.signal or (ended.code or 0) - 128  # a shell's word for the signal that ended its command
    return number in (signal.SIGTERM, signal.SIGKILL)


def _says(known: Known, plain: str) -> str:
    reason = None if known.sighting is None else known.sighting.reason
    return f"{known.engine}: {plain}" + (f" ({reason})" if reason else "")


def _passed(ended: Ended) -> Passed | None:
    if ended.limit is None or ended.limit_s is None:
        return None
    try:
        return Passed(LimitKind(ended.limit), ended.limit_s, ended.stage)
    except ValueError:
        return None
