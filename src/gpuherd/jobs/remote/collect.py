"""Ends of attempts that an engine has, and the queries to the engine."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar

from gpuherd.engines.base import End, Engine, EngineAway, Placement, Sighting, Ticket
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.complete import Ended
from gpuherd.jobs.attempts.failures import back_off_s, clean
from gpuherd.jobs.attempts.log_file import size, tail
from gpuherd.jobs.attempts.retry import Blameless, Seen
from gpuherd.jobs.records import Begun
from gpuherd.jobs.remote.attempt import Followed, Over, Step, meaning
from gpuherd.jobs.remote.protocol import Claim, take
from gpuherd.jobs.remote.spool import Folder
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.run_dir import RunDirectory

# One question at a time, asked by a thread of its own: an answer that takes long keeps nobody waiting.

_Answer = TypeVar("_Answer")


class Aside(Generic[_Answer]):
    """Asks. ``fileno`` is readable when an answer has come, so that an event loop wakes."""

    def __init__(self) -> None:
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = threading.Lock()
        self._closed = False
        self._future: Future[_Answer] | None = None

    @property
    def busy(self) -> bool:
        """Whether a question is under way, or its answer not fetched yet."""
        return self._future is not None

    @property
    def has_answer(self) -> bool:
        """Whether its answer is there to be fetched."""
        return self._future is not None and self._future.done()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._bell

    def drain(self) -> None:
        """Empties the descriptor."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def begin(self, ask: Callable[[], _Answer]) -> None:
        """Asks this. Raises ValueError while another question is under way."""
        if self._future is not None:
            raise ValueError("one question at a time")
        self._future = future = Future[_Answer]()
        # It ends with the process, whatever it waits for.
        threading.Thread(target=self._ask, args=(ask, future), name="gpuherd-aside", daemon=True).start()

    def fetch(self) -> Future[_Answer] | None:
        """The answer, or what was raised in its place; None while none has come. Each is fetched once."""
        future = self._future
        if future is None or not future.done():
            return None
        self._future = None
        return future

    def close(self) -> None:
        """Hears of nothing any more. What was asked is not waited for."""
        with self._open:
            self._closed = True
            os.close(self._bell)

    def _ask(self, ask: Callable[[], _Answer], future: Future[_Answer]) -> None:
        try:
            future.set_result(ask())
        except BaseException as problem:  # raised again where it is fetched
            future.set_exception(problem)
        with self._open:
            if not self._closed:
                os.eventfd_write(self._bell, 1)


# Questions to the engine, and what is to be ended there: now and then, one for all, and again when it was away.
#
# How all stand is asked aside: where a controller takes long to answer, the loop goes on hearing what people ask and
# what nodes tell. All else is asked in the loop's own time, since what comes next follows from the answer.

logger = logging.getLogger(__name__)

_LONGEST_S = 60.0
_SOON_S = 1.0


@dataclass(frozen=True, slots=True)
class Told:
    """An answer on how all stand: of these attempts, ``found`` None when it did not answer; asked for at ``asked_at``
    (by ``clock.mono``)."""

    asked: frozenset[int]
    asked_at: float
    found: Mapping[int, Sighting] | None


class Asking:
    """Asks one engine.

    Args:
        title: what people call it.

    Attributes:
        due_at: when to ask how all stand (by ``clock.mono``).
        away: a sentence while it does not answer, else None.
        never: what it can't ever give, and why, of what it has been asked so far.
    """

    def __init__(self, engine: Engine, tell: Reporter, title: str):
        self.engine = engine
        self.title = title
        self._tell = tell
        self._failures = 0
        self._checked: set[Placement] = set()
        self._unwanted: set[str] = set()
        self._asked_at = 0.0
        self._asked: frozenset[int] = frozenset()
        self._aside: Aside[Mapping[int, Sighting]] | None = None
        self.due_at = 0.0
        self.away: str | None = None
        self.never: dict[Placement, str] = {}

    def soon(self, now: float) -> None:
        """Something is known only to the engine."""
        if self.away is None:
            self.due_at = min(self.due_at, max(now, self._asked_at + min(_SOON_S, self.engine.look_s)))

    def listen(self) -> Aside[Mapping[int, Sighting]]:
        """From now on ``ask`` may be used, until ``close``; what is readable when ``told`` has something."""
        self._aside = Aside()
        return self._aside

    def wake(self) -> None:
        """What ``listen`` gave has become readable."""
        if self._aside is not None:
            self._aside.drain()

    def close(self) -> None:
        """Hears no more answers."""
        if self._aside is not None:
            self._aside.close()
            self._aside = None

    @property
    def busy(self) -> bool:
        """Whether the answer to the last ``ask`` has not been heard yet."""
        return self._aside is not None and self._aside.busy

    @property
    def has_answer(self) -> bool:
        """Whether it has come meanwhile."""
        return self._aside is not None and self._aside.has_answer

    def ask(self, tickets: Collection[Ticket], now: float) -> None:
        """Asks how they stand; ``told`` has the answer later. One question at a time, after ``listen``."""
        if self._aside is None:
            raise ValueError("nobody listens")
        self._asked_at = now
        self.due_at = now + self.engine.look_s
        self._asked = frozenset(ticket.attempt for ticket in tickets)
        self._aside.begin(lambda: self.engine.look(tickets))

    def told(self) -> Told | None:
        """The answer to the last question, once; None while there is none."""
        answer = None if self._aside is None else self._aside.fetch()
        if answer is None:
            return None
        now = clock.mono()
        found = self._try(answer.result, now)
        if found is not None:
            # Who takes long to answer is left alone for as long. (Not for hours, where it was this machine that slept.)
            self.due_at = max(self.due_at, now + min(now - self._asked_at, _LONGEST_S))
        return Told(self._asked, self._asked_at, found)

    def look(self, tickets: Collection[Ticket], now: float) -> Mapping[int, Sighting] | None:
        """How they stand, at once; None when it does not answer."""
        self._asked_at = now
        self.due_at = now + self.engine.look_s
        return self._try(lambda: self.engine.look(tickets), now)

    def check(self, wanted: Iterable[Placement], now: float) -> bool:
        """Asks for those that it was not asked for yet; False when it does not answer."""
        new = set(wanted) - self._checked
        if not new:
            return True
        found = self._try(lambda: self.engine.check(new), now)
        if found is None:
            return False
        self.note_check(new, found)
        return True

    def note_check(self, wanted: Collection[Placement], never: Mapping[Placement, str]) -> None:
        """The answer is known."""
        self._checked.update(wanted)
        self.never.update(never)

    def cancel(self, handles: Iterable[str]) -> None:
        """Ends them there with the next ``keep_time``: all of a moment by one question, not by one for each."""
        self._unwanted.update(handles)

    def keep_time(self, now: float) -> None:
        """Ends what is still to be ended, unless the engine is away."""
        if not self._unwanted or self.silent(now):
            return
        handles = frozenset(self._unwanted)
        if self._try(lambda: self._end(handles), now):
            self._unwanted -= handles

    def silent(self, now: float) -> bool:
        """Whether it has not answered, and is to be asked nothing now."""
        return self.away is not None and (self.busy or now < self.due_at)

    def failed(self, problem: EngineAway, now: float) -> None:
        """It does not answer. That is told once, and it is asked less and less often."""
        self._failures += 1
        wait_s = max(self.engine.look_s, back_off_s(self._failures, _SOON_S, _LONGEST_S))
        self.due_at = now + wait_s
        logger.info("%s does not answer, asking again in %.0f s: %s", self.title, wait_s, problem)
        if self.away is None:
            self.away = f"{self.title} does not answer: {clean(str(problem))}"
            self._tell.notice(f"{self.away}; what it has goes on, and is asked for again and again")

    def answered(self) -> None:
        """It answers."""
        self._failures = 0
        if self.away is not None:
            self.away = None
            self._tell.notice(f"{self.title} answers again")

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


# Ends attempts that an engine has: claims those that must not begin, calls off those that must end, and puts what was
# told into the words of an end. What an end means for the job is decided where that of a local attempt is.


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
