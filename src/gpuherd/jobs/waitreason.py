"""Why a job waits, as one sentence for people: a pure function of what the queue and the dispatcher tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuherd.jobs.failures import clean
from gpuherd.jobs.standing import Standing
from gpuherd.jobs.wording import duration

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
