"""A scenario (machines, work, external users) and the variants to compare; the guides' scheduler in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from gpuherd.errors import UsageError
from gpuherd.simulate.cluster import MONDAY, ExternalUsers, Machine, Session
from gpuherd.simulate.engine import Simulation
from gpuherd.simulate.handover import Handover
from gpuherd.simulate.options import GUIDES_INTERVAL_S, GUIDES_READ_S, GUIDES_SLEEP_S, Variant
from gpuherd.simulate.results import Ending, Figures, FinishedAttempt, History, Visit, figures
from gpuherd.simulate.workload import Work

_GUIDES_CHECKS = 10
_PROGRESS_EVERY_JOBS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What is the same for all variants.

    Attributes:
        machines: the GPUs of each machine.
        works: the jobs.
        background: external users, None for none.
        seed: of the external users.
        starts_at: local time of second 0, for quiet hours.
    """

    machines: tuple[Machine, ...]
    works: tuple[Work, ...]
    background: ExternalUsers | None = None
    seed: int = 0
    starts_at: datetime = MONDAY


@dataclass(frozen=True, slots=True)
class Result:
    """A variant, what happened, and its figures."""

    variant: Variant
    history: History
    figures: Figures


Progress = Callable[[int, int, int], None]


def simulate(scenario: Scenario, variants: Sequence[Variant], progress: Progress | None = None) -> tuple[Result, ...]:
    """Runs every variant. ``progress`` is called with the variant's number and the numbers of ended and of all jobs.

    Raises UsageError for jobs and external users that a variant's policy does not support.
    """
    results = []
    for number, variant in enumerate(variants):
        history = _run(scenario, variant, None if progress is None else partial(progress, number))
        results.append(Result(variant, history, figures(history, scenario.works)))
    return tuple(results)


def _run(scenario: Scenario, variant: Variant, progress: Callable[[int, int], None] | None) -> History:
    machines, works, rules = scenario.machines, scenario.works, variant.rules
    if rules.policy == "guides":
        return run_guides(machines, works, scenario.background, scenario.seed, progress)
    if rules.policy == "handover":
        if scenario.background is not None:
            raise UsageError("--background is for our own policy; the other load of a cluster is not simulated")
        return Handover(machines, works, rules).run(progress)
    several = next((work.job.name for work in works if work.job.nodes > 1), None)
    if several is not None:
        raise UsageError(f"job {several!r} spans several nodes, which needs a cluster's engine: use --policy handover")
    return Simulation(machines, works, rules, scenario.background, scenario.seed, scenario.starts_at).run(progress)


# The scheduler of the guides, literally and in virtual time, to compare with. It is the loop that the guides' public
# tracker runs: it polls every 10 s, a GPU counts as free after 10 polls in a row that found it so, the count begins
# anew for each start, and one start is made at a time: 10 polls (90 s), 0.5 s to read the GPUs, the start, then 5 s of
# sleep, 95.5 s in all even when every GPU is free. Jobs go in the order of the list; there are no priorities, no
# retries and no sharing. On several machines each runs its own loop on its part of the list, dealt out in turn.


def run_guides(
    machines: Sequence[Machine],
    works: Sequence[Work],
    background: ExternalUsers | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> History:
    """Runs the works under the loop of the guides."""
    attempts: list[FinishedAttempt] = []
    visits: list[Visit] = []
    refused: dict[int, str] = {}
    first = ended = 0
    for number, gpus in enumerate(machines):
        loop = _GuidesLoop(gpus, first, background, seed)
        for job in range(number, len(works), len(machines)):
            requested = works[job].job.gpus
            if requested > len(gpus):
                refused[job] = f"asks for {requested} GPUs; there are {len(gpus)} to use"
            else:
                attempts.append(loop.start(job, works[job]))
            ended += 1
            if progress is not None and ended % _PROGRESS_EVERY_JOBS == 0:
                progress(ended, len(works))
        visits += loop.visits()
        first += len(gpus)
    failed = sum(attempt.ending is Ending.FAILED for attempt in attempts) + len(refused)
    if progress is not None:
        progress(len(works), len(works))
    return History(
        machines=tuple(len(gpus) for gpus in machines),
        attempts=tuple(sorted(attempts, key=lambda attempt: attempt.end)),
        visits=tuple(visits),
        done=len(works) - failed,
        failed=failed,
        cancelled=0,
        refused=refused,
    )


class _GuidesLoop:
    """One machine's loop, between two starts. ``first``: number of its first GPU."""

    def __init__(self, gpus: Machine, first: int, background: ExternalUsers | None, seed: int):
        self._first = first
        self._gpus = [_GuidesGpu(gpu.uuid, background, seed) for gpu in gpus]
        self._now = 0.0

    def start(self, job: int, work: Work) -> FinishedAttempt:
        """Waits until the job can start, starts it, and sleeps."""
        self._now = max(self._now, work.arrives_s)
        requested = max(1, work.job.gpus)
        counts = [0] * len(self._gpus)
        while True:
            for position, gpu in enumerate(self._gpus):
                counts[position] = counts[position] + 1 if gpu.is_free(self._now) else 0
            free = [position for position, count in enumerate(counts) if count >= _GUIDES_CHECKS]
            if len(free) >= requested:
                break
            self._now += GUIDES_INTERVAL_S
        start = self._now + GUIDES_READ_S
        trial = work.trials[0]
        end = start + trial.seconds
        chosen = free[:requested]
        for position in chosen:
            self._gpus[position].ours_until = end
        self._now = start + GUIDES_SLEEP_S
        return FinishedAttempt(
            job=job,
            gpus=tuple(self._first + position for position in chosen),
            start=start,
            end=end,
            wait_s=start - work.arrives_s,
            ending=Ending.DONE if trial.failure is None else Ending.FAILED,
            failure=trial.failure,
        )

    def visits(self) -> list[Visit]:
        """The visits of external users on this machine so far."""
        return [
            Visit(self._first + position, session.start, session.end)
            for position, gpu in enumerate(self._gpus)
            for session in gpu.sessions
        ]


class _GuidesGpu:
    """One GPU: used by a job of ours until ``ours_until``, and by external users in ``sessions``. Time only goes on."""

    def __init__(self, uuid: str, background: ExternalUsers | None, seed: int):
        self._plan: Iterator[Session] = iter(()) if background is None else background.sessions(seed, uuid)
        self._next = next(self._plan, None)
        self._external_until = 0.0
        self.ours_until = 0.0
        self.sessions: list[Session] = []

    def is_free(self, now: float) -> bool:
        """Whether a poll at this second finds it free."""
        while self._next is not None and self._next.start <= now:
            if self._next.start >= self.ours_until or self._next.barges:
                self.sessions.append(self._next)
                self._external_until = max(self._external_until, self._next.end)
            self._next = next(self._plan, None)
        return now >= self.ours_until and now >= self._external_until
