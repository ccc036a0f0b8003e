"""Words and figures for people: durations, places, bars, times left, and why a job waits. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuherd.engines.progress import Progress
from gpuherd.jobs.attempts.failures import clean
from gpuherd.jobs.dispatcher_state import Standing
from gpuherd.jobs.records import Counts

# The words and figures in which a run is told to people, on a line, in a table or on a full screen: pure functions.
#
# It knows no terminal and no styles. Whatever comes from a job passes through ``failures.clean`` here or before.

_BAR_WIDTH = 20


def duration(seconds: float) -> str:
    """A length of time for people.

    >>> duration(4.4), duration(75), duration(5400), duration(200_000)
    ('4 s', '1 min 15 s', '1 h 30 min', '2 d 7 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def counted(counts: Counts, *, paused: int = 0, in_line: int = 0, eta_s: float | None = None) -> str:
    """Counts in one line. ``paused`` of the running and waiting ones don't go on by themselves; ``in_line`` of the
    running ones have been handed to an engine that has not begun them.

    >>> counted(Counts(waiting=12, running=4, done=3, failed=1), eta_s=300)
    '3 of 20 done, 1 failed, 4 running, 12 waiting, about 5 min 0 s left'
    """
    parts = [f"{counts.done} of {counts.total} done"]
    for number, word in ((counts.failed, "failed"), (counts.cancelled, "cancelled")):
        if number:
            parts.append(f"{number} {word}")
    parts += [f"{counts.running - in_line} running", f"{counts.waiting} waiting"]
    if in_line:
        parts.insert(-1, f"{in_line} handed over")
    if paused:
        parts.append(f"{paused} paused")
    if eta_s is not None and counts.running + counts.waiting:
        parts.append(f"about {duration(eta_s)} left")
    return ", ".join(parts)


def place(labels: Sequence[str]) -> str:
    """Where a job runs: ``GPU 0,3:1`` or ``CPU``."""
    return f"GPU {','.join(labels)}" if labels else "CPU"


def bar(told: Progress | None, width: int = _BAR_WIDTH) -> str:
    """How far a job is: a bar and figures where it said of how many, else what it has done.

    >>> bar(Progress(3, 12), 8)
    '━━╌╌╌╌╌╌ 3/12'
    """
    if told is None:
        return ""
    if not told.total:
        return f"{told.done} done"
    filled = round(min(1.0, told.done / told.total) * width)
    return f"{'━' * filled}{'╌' * (width - filled)} {told.done}/{told.total}"


def stage_and_time(told: Progress | None, elapsed_s: float, eta_s: float | None) -> str:
    """What a running job is at, and how long yet, or else for how long already."""
    time = f"{duration(eta_s)} left" if eta_s is not None else f"for {duration(elapsed_s)}"
    return ("" if told is None or not told.stage else clean(told.stage) + ", ") + time


def job_time_left(told: Progress | None, elapsed_s: float) -> float | None:
    """Seconds until a job is done if it goes on as it went so far; None while nothing can be said."""
    if told is None or not told.total or not 0 < told.done <= told.total:
        return None
    return elapsed_s * (told.total - told.done) / told.done


# Why a job waits, as one sentence for people: a pure function of what the queue and the dispatcher tell.

_NAMED = 3


@dataclass(frozen=True, slots=True)
class WaitFacts:
    """What is the same for all waiting jobs of a queue.

    ``dispatcher``: one works on it. ``standing``: what it last told. ``lowest_round``: the lowest that is unfinished;
    ``round_opened_at``: since when it is so, 0.0 where nobody has written it down.
    """

    dispatcher: bool
    standing: Standing | None = None
    lowest_round: int | None = None
    round_opened_at: float = 0.0


def why_it_waits(
    facts: WaitFacts,
    *,
    job: int,
    paused: bool,
    unmet: Sequence[str],
    not_before: float,
    last_failure: str | None,
    round_: int,
    place: int | None,
    now: float,
) -> str:
    """The first thing that must change before the job can start.

    Args:
        facts: what is true of the whole queue.
        job: the job's number in the queue.
        paused: the user told it to wait.
        unmet: names of jobs that it needs and that have not succeeded, the first few.
        not_before: wall-clock second before which it is not tried again.
        last_failure: what the queue says of it: how its last attempt ended, or who paused it.
        round_: its round.
        place: how many waiting jobs go before it, None if nobody counted.
        now: wall-clock second.
    """
    if paused:
        return clean(last_failure) if last_failure else "paused"
    if unmet:
        named = ", ".join(clean(name) for name in unmet[:_NAMED])
        return f"needs {named}" + (" and others" if len(unmet) > _NAMED else "")
    if not facts.dispatcher:
        return "no gpuherd works on this queue"
    told = facts.standing
    if told is not None and told.mode != "working":
        return f"gpuherd is {told.mode}: nothing new is started"
    if not_before > now:
        after = f" after: {clean(last_failure)}" if last_failure else ""
        return f"next try in {duration(not_before - now)}{after}"
    if facts.lowest_round is not None and round_ > facts.lowest_round:
        return f"is of round {round_}; round {facts.lowest_round} is not finished"
    if told is not None and told.closed is not None:
        return clean(told.closed)
    if told is not None and job in told.waits:
        return clean(told.waits[job])
    if not place:
        return "others are before it" if place is None else "is next"
    return f"{place} waiting jobs are before it" if place > 1 else "1 waiting job is before it"


# When all will be done, by how long jobs took so far. Pure; seconds.
#
# A job whose cost is known is expected to take as long for a unit of it as those that are done did; another one as
# long as they took on average. What runs is expected to go on as it told, else for what its expected length leaves.


@dataclass(frozen=True, slots=True)
class Pace:
    """How long jobs took: ``done`` of them ``total_s`` in all, and those of known cost ``costed_s`` for ``cost``."""

    done: int = 0
    total_s: float = 0.0
    costed_s: float = 0.0
    cost: float = 0.0

    def after(self, run_s: float, cost: float | None) -> Pace:
        """When one more job is done."""
        if not cost:
            return Pace(self.done + 1, self.total_s + run_s, self.costed_s, self.cost)
        return Pace(self.done + 1, self.total_s + run_s, self.costed_s + run_s, self.cost + cost)

    def expected_s(self, cost: float | None, jobs: int = 1) -> float:
        """How long ``jobs`` jobs take, which cost so much together. 0 while none is done."""
        if cost is not None and self.cost > 0:
            return cost * self.costed_s / self.cost
        return jobs * self.total_s / self.done if self.done else 0.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many jobs wait, and how many of them are of known cost, which is ``cost`` in all."""

    jobs: int
    costed: int = 0
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Running:
    """A job that runs. ``left_s``: what follows from its own progress, None where it tells nothing."""

    elapsed_s: float
    cost: float | None = None
    left_s: float | None = None


def time_left(
    pace: Pace, waiting: Waiting, running: Iterable[Running], at_once: int, back_in_s: Iterable[float] = ()
) -> float | None:
    """Seconds until all is done with ``at_once`` jobs side by side; None while none is done.

    ``back_in_s``: after how many seconds each GPU that is left out for now comes back and takes one job more.

    >>> time_left(Pace().after(10.0, 5.0), Waiting(2, costed=1, cost=50.0), [Running(4.0, cost=3.0)], at_once=1)
    112.0
    >>> time_left(Pace(done=1, total_s=10.0), Waiting(10), (), at_once=1, back_in_s=[40.0])
    70.0
    """
    if not pace.done:
        return None
    there = tuple(running)
    ahead = pace.expected_s(None, waiting.jobs - waiting.costed)
    if waiting.costed:
        ahead += pace.expected_s(waiting.cost, waiting.costed)
    for job in there:
        left = max(0.0, pace.expected_s(job.cost) - job.elapsed_s)
        ahead += left if job.left_s is None else job.left_s
    later = sorted(back_in_s)
    places = min(max(at_once, 0 if later else 1), waiting.jobs + len(there))
    begins = [*[0.0] * places, *later]
    ends = ahead + begins[0] if begins else ahead
    for number, begin in enumerate(begins):
        # All places that are there by then end together.
        if number and begin >= ends:
            break
        ends = (ahead + sum(begins[: number + 1])) / (number + 1)
    return ends
