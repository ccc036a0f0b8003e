"""Queries to the engine: how attempts stand (in a thread of its own), what it can never give, and what it is to end."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Generic, TypeVar

from gpuherd.engines.base import Engine, EngineAway, Placement, Sighting, Ticket
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.complete import Completion
from gpuherd.jobs.attempts.failures import back_off_s, clean
from gpuherd.jobs.attempts.supervise import Supervisor
from gpuherd.jobs.completion import Known, NoFault
from gpuherd.jobs.queue.schema import may_pass
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptRecord, Begun, EventKind
from gpuherd.jobs.remote import AT_A_TIME_S, QUERY_LONGEST_S, QUERY_SOON_S, SWEEP_S
from gpuherd.jobs.remote.outcome import Outcomes, RemoteAttempt
from gpuherd.jobs.remote.protocol import Claim
from gpuherd.jobs.remote.spool import Spool
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.run_dir import RunDirectory

# One query at a time, in a thread of its own, so that a slow answer does not block the event loop.

_Answer = TypeVar("_Answer")


class BackgroundQuery(Generic[_Answer]):
    """Runs one query at a time. ``fileno`` is readable when the answer has come, so that an event loop wakes."""

    def __init__(self) -> None:
        self._bell: int | None = None
        self._open = threading.Lock()
        self._closed = False
        self._future: Future[_Answer] | None = None

    @property
    def busy(self) -> bool:
        """Whether a query is running, or its answer not fetched yet."""
        return self._future is not None

    @property
    def has_answer(self) -> bool:
        """Whether the answer can be fetched."""
        return self._future is not None and self._future.done()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        if self._bell is None:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._bell

    def drain(self) -> None:
        """Empties the descriptor."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fileno())

    def begin(self, ask: Callable[[], _Answer]) -> None:
        """Starts a query. Raises ValueError while another one is running."""
        if self._future is not None:
            raise ValueError("one question at a time")
        self.fileno()  # created here: the thread only writes to it
        self._future = future = Future[_Answer]()
        # A daemon: it ends with the process, whatever it waits for.
        threading.Thread(target=self._ask, args=(ask, future), name="gpuherd-aside", daemon=True).start()

    def fetch(self) -> Future[_Answer] | None:
        """The answer, or what was raised in its place; None while none has come. Each is fetched once."""
        future = self._future
        if future is None or not future.done():
            return None
        self._future = None
        return future

    def close(self) -> None:
        """Closes the descriptor. A running query is not waited for."""
        with self._open:
            self._closed = True
            bell, self._bell = self._bell, None
        if bell is not None:
            os.close(bell)

    def _ask(self, ask: Callable[[], _Answer], future: Future[_Answer]) -> None:
        try:
            future.set_result(ask())
        except BaseException as problem:  # raised again by ``fetch().result()``
            future.set_exception(problem)
        with self._open:
            if not self._closed:
                os.eventfd_write(self.fileno(), 1)


# Queries to the engine and cancellations: from time to time, one for all attempts, and again when it was away.
#
# The state of all attempts is queried in the background: while a controller takes long to answer, the loop goes on
# serving requests and reading reports of nodes. Other queries run in the loop itself, since the next step depends on
# the answer.

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a query of these attempts' state, sent at ``asked_at`` (by ``clock.mono``); ``found`` is None when
    the engine did not answer."""

    asked: frozenset[int]
    asked_at: float
    found: Mapping[int, Sighting] | None


class EngineQueries:
    """Sends queries to one engine.

    Args:
        title: what people call it.

    Attributes:
        background: the query of all attempts' state; its descriptor is readable when ``answer`` has the result.
        due_at: when to query the state of all attempts (by ``clock.mono``).
        away: a sentence while the engine does not answer, else None.
        never: placements that it can never provide, with the reason, among those checked so far.
    """

    def __init__(self, engine: Engine, reporter: Reporter, title: str):
        self.engine = engine
        self.title = title
        self._reporter = reporter
        self._failures = 0
        self._checked: set[Placement] = set()
        self._unwanted: set[str] = set()
        self._asked_at = 0.0
        self._asked: frozenset[int] = frozenset()
        self.background = BackgroundQuery[Mapping[int, Sighting]]()
        self.due_at = 0.0
        self.away: str | None = None
        self.never: dict[Placement, str] = {}

    def soon(self, now: float) -> None:
        """The engine is to be queried soon: only it knows what happened."""
        if self.away is None:
            self.due_at = min(self.due_at, max(now, self._asked_at + min(QUERY_SOON_S, self.engine.look_s)))

    def ask(self, tickets: Collection[Ticket], now: float) -> None:
        """Starts to query their state; ``answer`` returns the result later. One query at a time."""
        self._asked_at = now
        self.due_at = now + self.engine.look_s
        self._asked = frozenset(ticket.attempt for ticket in tickets)
        self.background.begin(lambda: self.engine.look(tickets))

    def answer(self) -> Answer | None:
        """The answer to the last query, once; None while there is none."""
        answer = self.background.fetch()
        if answer is None:
            return None
        now = clock.mono()
        found = self._try(answer.result, now)
        if found is not None:
            # An engine that takes long to answer is queried less often. (Not for hours, in case this machine was
            # asleep.)
            self.due_at = max(self.due_at, now + min(now - self._asked_at, QUERY_LONGEST_S))
        return Answer(self._asked, self._asked_at, found)

    def look(self, tickets: Collection[Ticket], now: float) -> Mapping[int, Sighting] | None:
        """Queries their state and waits for the answer; None when the engine does not answer."""
        self._asked_at = now
        self.due_at = now + self.engine.look_s
        return self._try(lambda: self.engine.look(tickets), now)

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

    def cancel(self, handles: Iterable[str]) -> None:
        """Cancels them with the next ``keep_time``: all by one command, not by one each."""
        self._unwanted.update(handles)

    def keep_time(self, now: float) -> None:
        """Cancels what is still to be cancelled, unless the engine is away."""
        if not self._unwanted or self.silent(now):
            return
        handles = frozenset(self._unwanted)
        if self._try(lambda: self._end(handles), now):
            self._unwanted -= handles

    def silent(self, now: float) -> bool:
        """Whether it has not answered and is not to be queried now."""
        return self.away is not None and (self.background.busy or now < self.due_at)

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

    def _end(self, handles: Collection[str]) -> bool:
        self.engine.cancel(handles)
        return True

    def _try(self, ask: Callable[[], _Answer], now: float) -> _Answer | None:
        try:
            answer = ask()
        except EngineAway as problem:
            self.failed(problem, now)
            return None
        self.answered()
        return answer


# Tracks the attempts in the engine: takes them over, reads their reports, records their begin and completes them at
# their end.


class Tracker:
    """Tracks them for one dispatcher.

    Args:
        changed: called when the decision on what to submit can change.

    Attributes:
        open: attempts that are not over, by number.
        touched: attempts of which something is new, to be judged.
    """

    def __init__(
        self,
        queue: Queue,
        run: RunDirectory,
        reporter: Reporter,
        queries: EngineQueries,
        spool: Spool,
        outcomes: Outcomes,
        completion: Completion,
        changed: Callable[[], None],
    ):
        self._queue = queue
        self._run = run
        self._reporter = reporter
        self._queries = queries
        self._spool = spool
        self._outcomes = outcomes
        self._completion = completion
        self._changed = changed
        self._closing: dict[int, str] = {}
        self._unwritten: dict[int, str] = {}
        self._hopeless = True
        self._sweep_at = 0.0
        self.open: dict[int, RemoteAttempt] = {}
        self.touched: set[int] = set()

    @property
    def running(self) -> list[RemoteAttempt]:
        """Attempts that have begun."""
        return [each for each in self.open.values() if each.has_begun]

    def can_be_followed(self, now: float) -> frozenset[int]:
        """Attempts that others can be submitted behind now."""
        remembers_s = self._queries.engine.remembers_s
        return frozenset(number for number, each in self.open.items() if each.can_be_followed(now, remembers_s))

    @property
    def due_at(self) -> float | None:
        """When ``keep_time`` has something to do (by ``clock.mono``), None for never."""
        if self.touched or self._queries.background.has_answer:
            return 0.0
        if not self.open:
            return None
        return self._spool.due_at if self._queries.background.busy else min(self._spool.due_at, self._queries.due_at)

    def keep_time(self, now: float) -> None:
        """Reads reports and queries the engine when it is time, and acts on the result."""
        if self.open and now >= self._spool.due_at:
            self.touched.update(each.record.id for each in self._spool.look(self.open, now))
        self._hear_engine()
        if self.open and now >= self._queries.due_at and not self._queries.background.busy:
            self._queries.ask([each.ticket for each in self.open.values()], now)
        self._write_handles()
        self._collect()
        self._queries.keep_time(clock.mono())
        if self.open and now >= self._sweep_at:
            self._sweep(now)

    def add(self, handed: Iterable[RemoteAttempt]) -> None:
        """These attempts were submitted."""
        for each in handed:
            self.open[each.record.id] = each
            if each.handed.handle is not None:
                self._unwritten[each.record.id] = each.handed.handle
        self._write_handles()

    def take_back_all(self) -> None:
        """All attempts are to be cancelled there; their jobs wait again."""
        for each in self.open.values():
            each.recalled = each.recalled or NoFault.STOPPED
        self.touched.update(self.open)

    def enforce_marks(self) -> None:
        """Cancels the attempts that are marked in the queue by now."""
        for record in self._queue.running():
            each = self.open.get(record.id)
            if each is not None and record.queued.cancelled_by is not None:
                each.cancelled_by = each.cancelled_by or record.queued.cancelled_by
                self.touched.add(record.id)

    def adopt(self, supervisor: Supervisor) -> None:
        """Takes over the attempts that an earlier dispatcher submitted, and completes those that one left on this
        machine, which have ended since."""
        records = self._queue.running()
        ours = [record for record in records if record.handed is not None and self._queue.owns(record)]
        self._take_over(ours)
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
        self._completion.complete(ends, now)
        self.ends_recorded()
        self._run.remove_stray_attempt_files(self.open.keys() | self._completion.unrecorded)

    def settle(self, ends: Sequence[Known]) -> None:
        """Completes attempts that are over."""
        for end in ends:
            if end.record.handed is not None:
                self.open.pop(end.record.id, None)
                self._closing[end.record.id] = end.record.handed.batch
            # The jobs that it was submitted behind may have failed for good meanwhile.
            self._hopeless |= end.no_fault is not None
        self._completion.complete(ends, clock.mono())
        self.ends_recorded()

    # --- looking ----------------------------------------------------------------------------------------------

    def _take_over(self, records: Sequence[AttemptRecord]) -> None:
        self.open |= RemoteAttempt.among(records, self._run)
        self._spool.recall_gone(self.open)
        self._outcomes.adopt(self.open.values())
        followed = self._queue.followed()
        for batch, attempts in self._queue.open_batches().items():
            self._spool.opened(batch, attempts, self.open.keys() & set(attempts), followed.get(batch, ()))
        self._sweep(clock.mono())
        self.touched.update(self.open)
        if records:
            begun_before = sum(record.handed is not None and record.handed.node is not None for record in records)
            out = "1 job is" if len(records) == 1 else f"{len(records)} jobs are"
            self._reporter.notice(
                f"{out} in the hands of {self._queries.title} from before ({begun_before} had begun), and followed"
                " again"
            )

    def _sweep(self, now: float) -> None:
        self._sweep_at = now + SWEEP_S
        self._queue.be_sure()
        self._spool.sweep(clock.wall(), self._queue.has_batch)

    def _hear_engine(self) -> None:
        """Takes note of the engine's answer to the last query of all attempts' state."""
        answer = self._queries.answer()
        if answer is None:
            return
        self.touched.update(self.open)
        self._changed()
        if answer.found is None:
            return
        seen_at = clock.mono()
        for number, each in self.open.items():
            if number not in answer.asked:
                continue  # it was submitted since
            sighting = answer.found.get(number)
            each.seen(sighting, seen_at, answer.asked_at)
            if sighting is not None:
                self._hear(each, sighting.handle)

    def _hear(self, each: RemoteAttempt, handle: str | None) -> None:
        if handle is not None and each.heard(handle):
            self._unwritten[each.record.id] = handle

    def _write_handles(self) -> None:
        """Records the engine's ids; later, if the queue can't be written now."""
        wanted = {number: handle for number, handle in self._unwritten.items() if number in self.open}
        self._unwritten = wanted
        if not wanted:
            return
        try:
            self._queue.record_handles(wanted)
        except sqlite3.OperationalError as problem:
            if not may_pass(problem):
                raise
            return
        self._unwritten = {}
        # Jobs behind these can be submitted now.
        self._changed()

    def _collect(self) -> None:
        """Records attempts that have begun, completes those that are over, and calls off those that are to end."""
        self.touched.intersection_update(self.open)
        touched = [self.open[number] for number in sorted(self.touched)]
        if not touched:
            return
        for each in touched:
            if each.claim is not None:
                self._hear(each, each.claim.handle)
        at, mono = clock.wall(), clock.mono()
        found = [(each, start) for each in touched if (start := begun(each, at, mono)) is not None]
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
        ends = []
        until = clock.mono() + AT_A_TIME_S
        for each in touched:
            self.touched.discard(each.record.id)
            end = self._outcomes.judge(each)
            if end is None:
                self._outcomes.call_off(each)
            else:
                ends.append(end)
            if clock.mono() > until:
                break  # the rest after requests that came meanwhile
        if ends:
            self.settle(ends)
        elif found:
            self._changed()
        self._spool.keep_gone(self.open.values())

    # --- after ends -------------------------------------------------------------------------------------------

    def ends_recorded(self) -> None:
        """Ends are in the queue: other jobs can be submitted now, files are not needed any more, and attempts behind
        them may never be able to begin."""
        unrecorded = self._completion.unrecorded
        for number in [number for number in self._closing if number not in unrecorded]:
            self._spool.closed(self._closing.pop(number), number)
        if not unrecorded:
            self._take_back_orphaned()
        self._changed()

    def _take_back_orphaned(self) -> None:
        for number in self._queue.orphaned() & self.open.keys():
            each = self.open[number]
            if not each.has_begun and each.recalled is None:
                each.recalled = NoFault.DEPENDENCY_FAILED
                self.touched.add(number)
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
