"""Tracks the attempts in an engine: queries it, reads the nodes' files, records begins, and completes attempts at their
end.

``outcome.outcome`` decides what is known of an attempt, and is pure; ``Tracker`` carries out: it claims attempts that
must not begin, and calls off those that must end.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from gpuherd.engines.base import End, Engine, EngineAway, Placement, Sighting, Ticket
from gpuherd.errors import clean
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.complete import Completion
from gpuherd.jobs.attempts.failures import back_off_s, size, tail
from gpuherd.jobs.attempts.supervise import Supervisor
from gpuherd.jobs.completion import Known, NoFault
from gpuherd.jobs.queue.schema import may_pass
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptRecord, Begun, EventKind
from gpuherd.jobs.remote import AT_A_TIME_S, QUERY_LONGEST_S, QUERY_SOON_S, SWEEP_S
from gpuherd.jobs.remote.outcome import NextStep, RemoteAttempt, outcome
from gpuherd.jobs.remote.protocol import Claim, take
from gpuherd.jobs.remote.spool import Spool
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.run_dir import RunDirectory

logger = logging.getLogger(__name__)

# Queries and cancellations: from time to time, one for all attempts, and again when the engine was away.
#
# The state of all attempts is queried in the background: while a controller takes long to answer, the loop goes on
# serving requests and reading reports of nodes. Other queries run in the loop itself, since the next step depends on
# the answer.

_Answer = TypeVar("_Answer")


def in_background(ask: Callable[[], _Answer], then: Callable[[], object]) -> futures.Future[_Answer]:
    """Runs a query in a thread of its own, and calls ``then`` when the answer has come."""
    future = futures.Future[_Answer]()

    def run() -> None:
        try:
            future.set_result(ask())
        except BaseException as problem:  # raised again by ``Future.result``
            future.set_exception(problem)
        then()

    # A daemon: it ends with the process, whatever it waits for. (An executor's threads would be waited for.)
    threading.Thread(target=run, name="gpuherd-query", daemon=True).start()
    return future


class EngineQueries:
    """Sends queries to one engine.

    Args:
        title: what people call it.
        woken: called, in another thread, when ``answer`` has a result.

    Attributes:
        asked_at: when the state of all attempts was queried last; ``due_at`` when it is to be next (by ``clock.mono``).
        away: a sentence while the engine does not answer, else None.
        never: placements that it can never provide, with the reason, among those checked so far.
    """

    def __init__(self, engine: Engine, reporter: Reporter, title: str, woken: Callable[[], object] = lambda: None):
        self.engine = engine
        self.title = title
        self.asked_at = 0.0
        self.due_at = 0.0
        self.away: str | None = None
        self.never: dict[Placement, str] = {}
        self._reporter = reporter
        self._woken = woken
        self._failures = 0
        self._checked: set[Placement] = set()
        self._unwanted: set[str] = set()
        self._asked: frozenset[int] = frozenset()
        self._future: futures.Future[Mapping[int, Sighting]] | None = None

    @property
    def busy(self) -> bool:
        """Whether a query of all attempts' state is running, or its answer not fetched yet."""
        return self._future is not None

    @property
    def has_answer(self) -> bool:
        """Whether ``answer`` has a result."""
        return self._future is not None and self._future.done()

    def soon(self, now: float) -> None:
        """The engine is to be queried soon: only it knows what happened."""
        if self.away is None:
            self.due_at = min(self.due_at, max(now, self.asked_at + min(QUERY_SOON_S, self.engine.look_s)))

    def ask(self, tickets: Collection[Ticket], now: float) -> None:
        """Starts to query their state; ``answer`` returns the result later. One query at a time."""
        if self._future is not None:
            raise ValueError("one query at a time")
        self.asked_at = now
        self.due_at = now + self.engine.look_s
        self._asked = frozenset(ticket.attempt for ticket in tickets)
        self._future = in_background(lambda: self.engine.look(tickets), self._woken)

    def answer(self) -> Mapping[int, Sighting | None] | None:
        """The answer to the last query, once: by attempt what the engine knows of it; empty where it did not answer.
        None while no answer has come."""
        future = self._future
        if future is None or not future.done():
            return None
        self._future, now = None, clock.mono()
        found = self._try(future.result, now)
        if found is None:
            return {}
        # An engine that takes long to answer is queried less often. (Not for hours, in case this machine was asleep.)
        self.due_at = max(self.due_at, now + min(now - self.asked_at, QUERY_LONGEST_S))
        return {number: found.get(number) for number in self._asked}

    def wait(self, until: float) -> None:
        """Returns when ``answer`` has a result that it did not have, or at this time (by ``clock.mono``)."""
        seconds = max(0.0, until - clock.mono())
        if self._future is not None:
            futures.wait([self._future], seconds)
        else:
            time.sleep(seconds)

    def check(self, wanted: Iterable[Placement], now: float) -> bool:
        """Has the engine check placements that it has not checked yet; False when it does not answer."""
        new = set(wanted) - self._checked
        if not new:
            return True
        found = self._try(lambda: self.engine.check(new), now)
        if found is None:
            return False
        self.note_check(new, found)
        return True

    def note_check(self, wanted: Collection[Placement], never: Mapping[Placement, str]) -> None:
        """Takes note of the engine's answer to a check."""
        self._checked.update(wanted)
        self.never.update(never)

    def cancel(self, handle: str) -> None:
        """Cancels it with the next ``keep_time``: all by one command, not by one each."""
        self._unwanted.add(handle)

    def keep_time(self, now: float) -> None:
        """Cancels what is still to be cancelled, unless the engine is away."""
        if not self._unwanted or self.silent(now):
            return
        try:
            self.engine.cancel(frozenset(self._unwanted))
        except EngineAway as problem:
            self.failed(problem, now)
        else:
            self.answered()
            self._unwanted.clear()

    def silent(self, now: float) -> bool:
        """Whether it has not answered and is not to be queried now."""
        return self.away is not None and (self.busy or now < self.due_at)

    def failed(self, problem: EngineAway, now: float) -> None:
        """It does not answer. That is reported once, and it is queried less and less often."""
        self._failures += 1
        wait_s = max(self.engine.look_s, back_off_s(self._failures, QUERY_SOON_S, QUERY_LONGEST_S))
        self.due_at = now + wait_s
        logger.info("%s does not answer, asking again in %.0f s: %s", self.title, wait_s, problem)
        if self.away is None:
            self.away = f"{self.title} does not answer: {clean(str(problem))}"
            self._reporter.notice(f"{self.away}; what it has goes on, and is asked for again and again")

    def answered(self) -> None:
        """It has answered."""
        self._failures = 0
        if self.away is not None:
            self.away = None
            self._reporter.notice(f"{self.title} answers again")

    def _try(self, ask: Callable[[], _Answer], now: float) -> _Answer | None:
        try:
            answer = ask()
        except EngineAway as problem:
            self.failed(problem, now)
            return None
        self.answered()
        return answer


# --- the attempts -------------------------------------------------------------------------------------------------


class Tracker:
    """Tracks the attempts of one queue in an engine.

    Args:
        patience_s: how long a report may be on its way when the engine calls its attempt ended.
        changed: called when the decision on what to submit can change.
        only_called_back: attempts that are not to end are left alone, also where they have ended.

    Attributes:
        open: attempts that are not over, by number.
        spool: the nodes' files.
    """

    def __init__(
        self,
        queue: Queue,
        run: RunDirectory,
        reporter: Reporter,
        queries: EngineQueries,
        completion: Completion,
        patience_s: float,
        *,
        changed: Callable[[], None] = lambda: None,
        only_called_back: bool = False,
    ):
        self._queue = queue
        self._run = run
        self._reporter = reporter
        self._queries = queries
        self._completion = completion
        self._patience_s = patience_s
        self._changed = changed
        self._only_called_back = only_called_back
        self._touched: set[int] = set()  # attempts of which something is new, to be judged
        self._unwritten: dict[int, str] = {}
        self._hopeless = True
        self._sweep_at = 0.0
        self.spool = Spool(run)
        self.open: dict[int, RemoteAttempt] = {}

    @property
    def running(self) -> list[RemoteAttempt]:
        """Attempts that have begun."""
        return [each for each in self.open.values() if each.has_begun]

    @property
    def calls_back(self) -> bool:
        """Whether an attempt is still to end, by a person's wish or by ours."""
        return any(each.is_called_back for each in self.open.values())

    def can_be_followed(self, now: float) -> frozenset[int]:
        """Attempts that others can be submitted behind now."""
        remembers_s = self._queries.engine.remembers_s
        return frozenset(number for number, each in self.open.items() if each.can_be_followed(now, remembers_s))

    @property
    def due_at(self) -> float | None:
        """When ``keep_time`` has something to do (by ``clock.mono``), None for never."""
        if self._touched or self._queries.has_answer:
            return 0.0
        if not self.open:
            return None
        return self.spool.due_at if self._queries.busy else min(self.spool.due_at, self._queries.due_at)

    def keep_time(self, now: float) -> None:
        """Reads reports and queries the engine when it is time, and acts on the result."""
        if self.open and now >= self.spool.due_at:
            self._touched.update(each.record.id for each in self.spool.look(self.open, now))
        self._hear_engine()
        if self.open and now >= self._queries.due_at and not self._queries.busy:
            self._queries.ask([each.ticket for each in self.open.values()], now)
        self._write_handles()
        self._collect()
        self._queries.keep_time(clock.mono())
        if self.open and now >= self._sweep_at:
            self._sweep(now)

    # --- which are tracked --------------------------------------------------------------------------------------

    def add(self, batch: str, submitted: Mapping[int, RemoteAttempt], after: Iterable[int]) -> None:
        """The attempts of this batch were submitted, behind these others."""
        self.open |= submitted
        self.spool.opened(batch, submitted, after)
        for number, each in submitted.items():
            if each.handed.handle is not None:
                self._unwritten[number] = each.handed.handle
        self._write_handles()

    def take_over(self, records: Iterable[AttemptRecord]) -> None:
        """Tracks the attempts that an earlier dispatcher submitted, with what it had begun to do with them."""
        self.open = RemoteAttempt.among(records)
        self.spool.recall_gone(self.open)
        names = self.spool.names()
        for number, each in self.open.items():
            each.cancelled_by = each.record.queued.cancelled_by
            if self._run.attempt_recalled(number).name in names:
                each.recalled = NoFault.STOPPED
            self.spool.read(each, names)
        followed = self._queue.followed()
        for batch, attempts in self._queue.open_batches().items():
            self.spool.opened(batch, attempts, followed.get(batch, ()))
        self._touched.update(self.open)

    def adopt(self, supervisor: Supervisor) -> None:
        """Takes over the attempts that an earlier dispatcher submitted, and completes those that one left on this
        machine, which have ended since."""
        records = self._queue.running()
        ours = [record for record in records if record.handed is not None and self._queue.owns(record)]
        self.take_over(ours)
        self._sweep(clock.mono())
        if ours:
            begun_before = sum(record.handed is not None and record.handed.node is not None for record in ours)
            out = "1 job is" if len(ours) == 1 else f"{len(ours)} jobs are"
            self._reporter.notice(
                f"{out} in the hands of {self._queries.title} from before ({begun_before} had begun), and followed"
                " again"
            )
        now, at = clock.mono(), clock.wall()
        ends = []
        for record in records:
            if record.id in self.open:
                continue
            copied = record.handed is not None or not self._queue.owns(record)
            found = supervisor.take_over(record, now, at, copied=copied)
            if not isinstance(found, Known):
                raise ValueError(f"attempt {record.id} runs on this machine")
            ends.append(found)
        self._complete(ends)
        self._run.remove_stray_attempt_files(self.open.keys() | self._completion.unrecorded)

    def take_back_all(self) -> None:
        """All attempts are to be cancelled there; their jobs wait again."""
        for each in self.open.values():
            each.recalled = each.recalled or NoFault.STOPPED
        self._touched.update(self.open)

    def enforce_marks(self) -> None:
        """Cancels the attempts that are marked in the queue by now."""
        for record in self._queue.running():
            each = self.open.get(record.id)
            if each is not None and record.queued.cancelled_by is not None:
                each.cancelled_by = each.cancelled_by or record.queued.cancelled_by
                self._touched.add(record.id)

    # --- what is known of them ----------------------------------------------------------------------------------

    def _sweep(self, now: float) -> None:
        self._sweep_at = now + SWEEP_S
        self._queue.be_sure()
        self.spool.sweep(clock.wall(), self._queue.has_batch)

    def _hear_engine(self) -> None:
        """Takes note of the engine's answer to the last query of all attempts' state."""
        answer = self._queries.answer()
        if answer is None:
            return
        self._touched.update(self.open)
        self._changed()
        now = clock.mono()
        for number in answer.keys() & self.open.keys():  # others were submitted since
            each, sighting = self.open[number], answer[number]
            each.seen(sighting, now, self._queries.asked_at)
            self._hear(each, None if sighting is None else sighting.handle)

    def _hear(self, each: RemoteAttempt, handle: str | None) -> None:
        if handle is not None and each.heard(handle):
            self._unwritten[each.record.id] = handle

    def _write_handles(self) -> None:
        """Records the engine's ids; later, if the queue can't be written now."""
        self._unwritten = {number: handle for number, handle in self._unwritten.items() if number in self.open}
        if not self._unwritten:
            return
        try:
            self._queue.record_handles(self._unwritten)
        except sqlite3.OperationalError as problem:
            if not may_pass(problem):
                raise
            return
        self._unwritten = {}
        # Jobs behind these can be submitted now.
        self._changed()

    def _collect(self) -> None:
        """Records attempts that have begun, completes those that are over, and calls off those that are to end."""
        known = (self.open[number] for number in sorted(self._touched & self.open.keys()))
        touched = [each for each in known if each.is_called_back or not self._only_called_back]
        self._touched = {each.record.id for each in touched}
        begins = self._record_begins(touched)
        ends = []
        until = clock.mono() + AT_A_TIME_S
        for each in touched:
            self._touched.discard(each.record.id)
            end = self._end_of(each)
            if end is None:
                self._call_off(each)
            else:
                ends.append(end)
            if clock.mono() > until:
                break  # the rest after requests that came meanwhile
        if ends:
            self._complete(ends)
        elif begins:
            self._changed()
        self.spool.keep_gone(self.open.values())

    def _record_begins(self, touched: Iterable[RemoteAttempt]) -> bool:
        """Records the attempts that have begun, and reports them; whether there were any."""
        at, mono = clock.wall(), clock.mono()
        found = []
        for each in touched:
            if each.claim is not None:
                self._hear(each, each.claim.handle)
            start = begun(each, at, mono)
            if start is not None:
                found.append((each, start))
        if found:
            self._queue.record_begun([start for _, start in found])
        for each, start in found:
            known_before = each.handed.node is not None
            with_begun(each, start)
            if known_before:
                continue  # its other nodes have reported their GPUs
            # Only the name of another node that has not reported its GPUs yet.
            gpus = dict.fromkeys(label.partition(":?")[0] for label in start.labels)
            place = f"GPU {', '.join(gpus)}" if gpus else f"the CPU of {clean(start.node)}"
            self._reporter.about(EventKind.STARTED, each.record, f"started on {place}")
        return bool(found)

    # --- their ends ---------------------------------------------------------------------------------------------

    def _end_of(self, attempt: RemoteAttempt) -> Known | None:
        """The attempt's end, None while it goes on. Does what is to be done meanwhile."""
        now = clock.mono()
        while True:
            found = outcome(attempt, clock.wall(), late=attempt.is_late(now, self._patience_s))
            if isinstance(found, Known):
                return self._with_output(attempt, found)
            if found is NextStep.VOID and self._void(attempt):
                continue
            if found is NextStep.ASK:
                attempt.wait_for_word(now)
                self._queries.soon(now)
            return None

    def _call_off(self, attempt: RemoteAttempt) -> None:
        """Tells the engine to end an attempt that has begun, and that is to end; once."""
        handle = attempt.handed.handle
        if not attempt.is_called_back or attempt.called_off or handle is None:
            return
        if attempt.recalled is not None:
            # So that it is not taken for an administrator's doing, should we die before it has ended.
            try:
                self._run.attempt_recalled(attempt.record.id).touch()
            except OSError as problem:
                logger.warning("can't mark attempt %d as called back: %s", attempt.record.id, problem)
        attempt.called_off = True
        self._queries.cancel(handle)

    def _void(self, attempt: RemoteAttempt) -> bool:
        """Claims an attempt, so that it never begins; False where that can't be tried now."""
        why = "" if attempt.recalled is None else attempt.recalled.name
        claim = Claim(at=clock.wall(), void=True, why=why)
        try:
            won = take(self._run.attempt_claim(attempt.record.id), claim)
        except OSError as problem:
            logger.warning("can't claim attempt %d, trying again: %s", attempt.record.id, problem)
            return False
        self.spool.voided(attempt.handed.batch)
        if not won:
            attempt.taken = True
            self.spool.read(attempt)
            return True
        attempt.claim = claim
        still_there = attempt.sighting is None or attempt.sighting.end in (None, End.NEVER)
        if attempt.handed.handle is not None and still_there and not attempt.unknown:
            self._queries.cancel(attempt.handed.handle)
        return True

    def _with_output(self, attempt: RemoteAttempt, known: Known) -> Known:
        """The same with what the engine itself has printed, where the job has written no log."""
        if known.exit.code == 0 or size(Path(known.record.log)):
            return known
        printed = tail(self._run.engine_output(attempt.handed.batch, attempt.handed.index))
        return replace(known, note="\n".join(part for part in (printed, known.note) if part))

    def _complete(self, ends: Sequence[Known]) -> None:
        """Completes attempts that are over."""
        for end in ends:
            self.open.pop(end.record.id, None)
            # The jobs that it was submitted behind may have failed for good meanwhile.
            self._hopeless |= end.no_fault is not None
        self._completion.complete(ends, clock.mono())
        self.ends_recorded()

    def ends_recorded(self) -> None:
        """Ends are in the queue: other jobs can be submitted now, files are not needed any more, and attempts behind
        them may never be able to begin."""
        unrecorded = self._completion.unrecorded
        self.spool.tidy(self.open.keys() | unrecorded)
        if not unrecorded:
            self._take_back_orphaned()
        self._changed()

    def _take_back_orphaned(self) -> None:
        for number in self._queue.orphaned() & self.open.keys():
            each = self.open[number]
            if not each.has_begun and each.recalled is None:
                each.recalled = NoFault.DEPENDENCY_FAILED
                self._touched.add(number)
        if self._hopeless:
            for needed, fate, names in self._queue.cascade_failures():
                self._reporter.cancelled(names, needed, fate)
            self._hopeless = False


def begun(followed: RemoteAttempt, at: float, mono: float) -> Begun | None:
    """The begin of an attempt that its node has claimed, for the queue; None while it has not begun, and where the
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


def with_begun(followed: RemoteAttempt, found: Begun) -> None:
    """Updates the attempt to what the queue has by now."""
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
    """Labels of the GPUs of an attempt: ``n1:0``. Of another node whose name is unknown ``n1+1:0``, and of one that has
    not reported its GPUs ``n2:?1``, ``n2:?2``.

    ``further``: the claims of the other nodes, by rank.

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
        other = further.get(rank)
        name = claim.others[rank - 1] if rank <= len(claim.others) else other.node if other is not None else ""
        unknown = tuple(f"?{number}" for number in range(1, gpus + 1))
        # Several nodes of Ray may share a host.
        known = name and name not in (each for each, _ in found)
        found.append((name if known else f"{node}+{rank}", unknown if other is None else other.gpus or unknown))
    return tuple(f"{name}:{number}" for name, numbers in found for number in numbers)
