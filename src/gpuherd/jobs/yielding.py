"""What becomes of our jobs when somebody else begins to use their GPUs: a pure function.

A stranger counts once they have been seen for ``PRESENCE_S``: who only asks the driver something is gone by then. Then
the job is told of (``ignore``), paused (``pause``: it keeps its memory, and gives the GPU's time), or put back into the
queue (``requeue``). A paused job goes on when no stranger has been on any of its GPUs for the quiet time, by which a
free GPU is taken too: someone between two phases of work does not make it stop and go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum

from gpuherd.jobs.options import YieldTo

PRESENCE_S = 2.0
# A stranger who comes back within this time is not told of again.
REMEMBERED_S = 60.0


class ActionKind(Enum):
    """What to do with an attempt; each comes with a sentence for people."""

    REPORT = "report"
    PAUSE = "pause"
    RESUME = "resume"
    REQUEUE = "requeue"


@dataclass(frozen=True, slots=True)
class Stranger:
    """Somebody who uses a GPU of ours. ``who`` tells two apart; ``sentence`` is for people.

    ``pid`` and ``memory_mb`` are None where the driver does not tell.
    """

    gpu: str
    label: str
    who: str
    sentence: str
    pid: int | None = None
    memory_mb: int | None = None


@dataclass(frozen=True, slots=True)
class OurAttempt:
    """A running attempt of ours: its id, what people call the job, and its GPUs by UUID."""

    id: int
    job: str
    gpus: frozenset[str]


@dataclass(frozen=True, slots=True)
class Action:
    """Do this with this attempt, and say so."""

    kind: ActionKind
    attempt: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Sightings:
    """What has to be remembered of strangers, by GPU and ``who``: since when each is there without a break, when each
    was last seen, and of whom people have been told already."""

    since: Mapping[tuple[str, str], float] = field(default_factory=dict)
    last: Mapping[tuple[str, str], float] = field(default_factory=dict)
    told: AbstractSet[tuple[str, str]] = frozenset()


def give_way(
    mode: YieldTo,
    seen: Sightings,
    strangers: Sequence[Stranger],
    running: Sequence[OurAttempt],
    paused: AbstractSet[int],
    *,
    now: float,
    quiet_s: float,
    presence_s: float = PRESENCE_S,
) -> tuple[tuple[Action, ...], Sightings]:
    """What to do after a look, and what to remember for the next one.

    Args:
        strangers: who was on our GPUs at this look.
        running: our attempts, the paused ones too; those that are being stopped should be left out.
        paused: ids of the attempts that were paused for a stranger (not those that a person has paused).
        now: the look's time in seconds, of a clock that nobody sets back.
        quiet_s: seconds without a stranger after which a paused job goes on.
    """
    present = {(stranger.gpu, stranger.who): stranger for stranger in strangers}
    since = {key: seen.since.get(key, now) for key in present}
    ours = {gpu for attempt in running for gpu in attempt.gpus}
    kept_s = max(quiet_s, REMEMBERED_S)
    last = {key: time for key, time in seen.last.items() if key[0] in ours and now - time < kept_s}
    last |= dict.fromkeys(present, now)
    settled = {key: stranger for key, stranger in present.items() if now - since[key] >= presence_s}
    actions: list[Action] = []
    told = seen.told & last.keys()
    for attempt in running:
        here = [stranger for key, stranger in settled.items() if stranger.gpu in attempt.gpus]
        if attempt.id in paused and mode == "ignore":
            actions.append(
                Action(ActionKind.RESUME, attempt.id, f"{attempt.job} goes on: it need not give way any more")
            )
        elif here:
            actions += _on_strangers(mode, attempt, here, told, paused)
        elif attempt.id in paused and _quiet(attempt, last, now, quiet_s):
            actions.append(Action(ActionKind.RESUME, attempt.id, f"{attempt.job} goes on: nobody else uses its GPUs"))
    return tuple(actions), Sightings(since, last, told | settled.keys())


def _on_strangers(
    mode: YieldTo,
    attempt: OurAttempt,
    here: Sequence[Stranger],
    told: AbstractSet[tuple[str, str]],
    paused: AbstractSet[int],
) -> list[Action]:
    """What to do with an attempt on whose GPUs there are strangers."""
    if mode == "requeue":
        return [Action(ActionKind.REQUEUE, attempt.id, f"{attempt.job} goes back into the queue: {_who(here)}")]
    if mode == "pause":
        sentence = f"{attempt.job} is paused: {_who(here)}"
        return [] if attempt.id in paused else [Action(ActionKind.PAUSE, attempt.id, sentence)]
    fresh = [stranger for stranger in here if (stranger.gpu, stranger.who) not in told]
    return [Action(ActionKind.REPORT, attempt.id, f"{_who(fresh)}, where {attempt.job} runs")] if fresh else []


def _quiet(attempt: OurAttempt, last: Mapping[tuple[str, str], float], now: float, quiet_s: float) -> bool:
    return all(now - time >= quiet_s for (gpu, _), time in last.items() if gpu in attempt.gpus)


def _who(strangers: Sequence[Stranger]) -> str:
    return "; ".join(f"{stranger.sentence} on GPU {stranger.label}" for stranger in strangers)
