"""What goes to the engine when: brings together what a decision needs, and carries it out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gpuherd.engines.cluster import Placement, Refused
from gpuherd.errors import JobCannotFit
from gpuherd.jobs import clock
from gpuherd.jobs.decision import Wait
from gpuherd.jobs.diskguard import DiskGuard
from gpuherd.jobs.ending import Endings
from gpuherd.jobs.failures import FailureClass, back_off_s, clean
from gpuherd.jobs.givingup import give_up
from gpuherd.jobs.handover.asking import Asking
from gpuherd.jobs.handover.decision import LARGEST_BATCH, Candidate, Group, Limits, decide, placement_of
from gpuherd.jobs.handover.following import AT_A_TIME_S, Following
from gpuherd.jobs.handover.handing import Handing, Outgoing
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue import Queue
from gpuherd.jobs.records import Predecessor, QueuedJob
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.timelimits import Limits as TimeLimits

# After something could not be written, or a batch was refused of which a part may be taken.
AGAIN_S = 1.0
# A refusal that may pass is told no more often.
_TELL_EVERY_S = 600.0
# Jobs that are looked at beyond those that can go, to say what waits.
_BEYOND = 8
# Each hand-over is a question to the engine: what comes so soon after the last waits for more, and longer where there
# are fewer places than this part of all.
_SHORTLY_S = 1.0
_FEW = 10


class Sending:
    """Decides for one loop.

    Attributes:
        options: as they are now.
        due_at: when a decision may come out otherwise (by ``clock.mono``), None for not before something happens.
        waits: every job that the last decision let wait.
        waiting_for: a sentence on which job is next and why it waits, None when none does.
    """

    def __init__(
        self,
        queue: Queue,
        tell: Reporter,
        options: DispatchOptions,
        asking: Asking,
        endings: Endings,
        disk: DiskGuard,
        grace_s: float,
    ):
        self._queue = queue
        self._tell = tell
        self.options = options
        self._asking = asking
        self._endings = endings
        self._disk = disk
        self._grace_s = grace_s
        self._largest = LARGEST_BATCH
        self._again_at = 0.0
        self._refill_at = 0.0
        self._refusals = 0
        self._refused = 0
        self._tell_again_at = 0.0
        self.due_at: float | None = 0.0
        self.waits: Sequence[Wait] = ()
        self.waiting_for: str | None = None

    def refuse_if_none_can_be_had(self, jobs: Sequence[Job]) -> None:
        """Raises JobCannotFit, with the first job's reason, when not one of the jobs could ever run there; and what
        ``Engine.check`` raises."""
        asked = {job.name: self._asks(job, job.gpus) for job in jobs}
        wanted = frozenset(asked.values())
        never = self._asking.engine.check(wanted)
        if jobs and wanted <= never.keys():
            raise JobCannotFit(f"job {clean(jobs[0].title or jobs[0].name)}: {never[asked[jobs[0].name]]}")
        self._asking.note_check(wanted, never)

    def soon(self, when: float) -> None:
        """A decision may come out otherwise at this time (by ``clock.mono``)."""
        self.due_at = when if self.due_at is None else min(when, self.due_at)

    def closed(self, now: float) -> str | None:
        """A sentence while nothing is handed over."""
        if self._endings.again_at is not None:
            return self._endings.trouble
        if self._asking.silent(now):
            return self._asking.away
        return self._disk.low

    def send_what_can(self, handing: Handing, following: Following) -> None:
        """Hands over all that can go now."""
        now = clock.mono()
        if self.due_at is None or now < self.due_at:
            return
        if now < self._again_at:
            self.due_at = self._again_at
            return
        self.due_at = None
        self._disk.look(now)
        while self._decide(handing, following, now):
            self._again_at = now + min(_SHORTLY_S, self._asking.engine.look_s)
            self._refill_at = now + self._asking.engine.look_s
        if self._asking.away is not None and not self._asking.busy:
            self.soon(self._asking.due_at)  # else when it has answered
        later = self._queue.next_not_before(clock.wall())
        if later is not None:
            self.waiting_for = self.waiting_for or "a job that has ended waits a moment for its next try"
            self.soon(clock.mono() + max(0.0, later - clock.wall()))

    def _asks(self, job: Job, gpus: int) -> Placement:
        return placement_of(job, gpus, self.options, TimeLimits.of(job, self.options), self._grace_s)

    def _asks_now(self, queued: QueuedJob) -> Placement:
        return self._asks(queued.job, queued.gpus)

    def _decide(self, handing: Handing, following: Following, now: float) -> bool:
        """One decision and what follows; whether to decide again: more may go, or go after what has gone."""
        at_most, option = self.options.at_most, "--at-most"
        if self.options.max_concurrent is not None and self.options.max_concurrent < at_most:
            at_most, option = self.options.max_concurrent, "--max-concurrent"
        candidates = self._candidates(max(0, at_most - len(following.open)), following)
        jobs = {each.queued.id: each.queued for each in candidates}
        limits = Limits(
            at_most=at_most,
            open=len(following.open),
            option=option,
            longest_first=self.options.order == "longest",
            largest=self._largest,
            closed=self._closed_now(at_most, len(following.open), jobs.values(), now),
        )
        decision = decide(candidates, self._asks_now, self._asking.never, limits)
        for reason in dict.fromkeys(wait.reason for wait in decision.refused):
            self._give_up([jobs[wait.job] for wait in decision.refused if wait.reason == reason], reason)
        until, behind = clock.mono() + AT_A_TIME_S, False
        for group in decision.groups:
            outgoing = handing.hand_over(group)
            following.add(outgoing.followed)
            put_off = self._is_put_off(group, outgoing)
            # The rest, where it takes long, when it has been heard what is asked and what has ended meanwhile.
            behind = put_off or self._asking.away is not None or clock.mono() > until
            if behind:
                self.soon(max(now, self._again_at))
                break
        self._note_waits(decision.waits, jobs)
        return bool(decision.groups or decision.refused) and not behind

    def _candidates(self, places: int, following: Following) -> list[Candidate]:
        wall, engine = clock.wall(), self._asking.engine
        found = [Candidate(queued) for queued in self._queue.head(places + _BEYOND, wall, self.options.order)]
        if engine.chains and places:
            # What the engine may have forgotten by now would keep nobody waiting there.
            pairs, leading = self._queue.following(engine.name, places, wall), following.can_be_followed(clock.mono())
            found += [Candidate(queued, after) for queued, after in pairs if leading.issuperset(_numbers(after))]
        return found

    def _closed_now(self, at_most: int, out: int, jobs: Collection[QueuedJob], now: float) -> str | None:
        closed = self.closed(now)
        if closed is None and not self._asking.check({self._asks_now(queued) for queued in jobs}, now):
            closed = self._asking.away
        if closed is None and 0 < at_most - out < at_most / _FEW and now < self._refill_at:
            self.soon(self._refill_at)
            closed = "it goes to the cluster in a moment"
        return closed

    def _is_put_off(self, group: Group, outgoing: Outgoing) -> bool:
        """Whether no more can go for a while, after what has become of a group."""
        count = len(group.jobs)
        if outgoing.unwritten is not None:
            self._again_at = clock.mono() + AGAIN_S
            self._tell.notice(f"can't hand jobs over now, trying again in {AGAIN_S:g} s: {outgoing.unwritten}")
            return True
        if outgoing.refused is None:
            if outgoing.followed and self._asking.away is None:
                self._refusals = 0
            if len(outgoing.followed) == self._largest:
                self._largest = min(LARGEST_BATCH, 2 * self._largest)
            return False
        if outgoing.refused.may_pass:
            self._put_off(outgoing.refused, count)
        else:
            self._give_up(group.jobs, f"{self._asking.title} refuses it: {outgoing.refused}")
        return outgoing.refused.may_pass

    def _put_off(self, problem: Refused, jobs: int) -> None:
        """It takes none of so many jobs now, perhaps some of them, or never so many at once. Fewer are tried soon, a
        single one less and less often."""
        self._largest = max(1, jobs // 2)
        self._refusals += jobs == 1
        now, wait_s = clock.mono(), back_off_s(self._refusals) if jobs == 1 else AGAIN_S
        self._again_at = now + wait_s
        self._refused += 1
        if self._refused == 1:
            self._tell.notice(f"{self._asking.title} takes no more jobs now, and is asked again and again: {problem}")
        elif now >= self._tell_again_at:
            times = f"{self._refused} times so far"
            self._tell.notice(f"{self._asking.title} takes no more jobs now ({times}): {problem}")
        else:
            return
        self._tell_again_at = now + _TELL_EVERY_S

    def _give_up(self, jobs: Sequence[QueuedJob], reason: str) -> None:
        problem = give_up(self._queue, self._tell, jobs, FailureClass.BAD_INPUT, reason)
        if problem is not None:
            raise problem

    def _note_waits(self, waits: Sequence[Wait], jobs: Mapping[int, QueuedJob]) -> None:
        self.waits = waits
        self.waiting_for = None
        if waits:
            job = jobs[waits[0].job].job
            self.waiting_for = clean(f"{job.title or job.name} waits: {waits[0].reason}")
        elif self._queue.held():
            self.waiting_for = "what still waits is paused"


def _numbers(after: Sequence[Predecessor]) -> frozenset[int]:
    return frozenset(each.attempt for each in after)
