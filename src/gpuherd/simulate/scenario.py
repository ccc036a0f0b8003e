"""A scenario: machines, work, external users and the variants to compare; and the guides' scheduler in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from gpuherd.errors import UsageError
from gpuherd.simulate.cluster import MONDAY, Machine
from gpuherd.simulate.engine import Simulation
from gpuherd.simulate.external_users import Session, Strangers
from gpuherd.simulate.options import Rules, Variant
from gpuherd.simulate.remote import HandedOver
from gpuherd.simulate.results import Ending, Figures, History, Ran, Visit, figures
from gpuherd.simulate.workload import Work

# The scheduler of the guides, literally and in virtual time, to compare with.
#
# It is the loop that the guides' public tracker runs: it looks every 10 s, a GPU counts as free after 10 looks in a
# row that found it so, the count begins anew for each start, and one start is made at a time: 10 looks (90 s), 0.5 s
# to read the GPUs, the start, then 5 s of sleep, 95.5 s in all even when every GPU is free. Jobs go in the order of
# the list; there are no priorities, no retries and no sharing. On several machines each runs its own loop on its part
# of the list, dealt out in turn.

MAX_CHECKS = 10
CHECK_INTERVAL_S = 10.0
READ_S = 0.5
SLEEP_S = 5.0


def run_guides(
    machines: Sequence[Machine],
    works: Sequence[Work],
    background: Strangers | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> History:
    """What becomes of the works under the loop of the guides."""
    attempts: list[Ran] = []
    visits: list[Visit] = []
    never: dict[int, str] = {}
    first = ended = 0
    for number, gpus in enumerate(machines):
        loop = _Loop(gpus, first, background, seed)
        for job in range(number, len(works), len(machines)):
            asked = works[job].job.gpus
            if asked > len(gpus):
                never[job] = f"asks for {asked} GPUs; there are {len(gpus)} to use"
            else:
                attempts.append(loop.start(job, works[job]))
            ended += 1
            if progress is not None and ended % 256 == 0:
                progress(ended, len(works))
        visits += loop.visits()
        first += len(gpus)
    failed = sum(ran.ending is Ending.FAILED for ran in attempts) + len(never)
    if progress is not None:
        progress(len(works), len(works))
    return History(
        machines=tuple(len(gpus) for gpus in machines),
        attempts=tuple(sorted(attempts, key=lambda ran: ran.end)),
        visits=tuple(visits),
        done=len(works) - failed,
        failed=failed,
        cancelled=0,
        never=never,
    )


class _Loop:
    """One machine's loop, between two starts."""

    def __init__(self, gpus: Machine, first: int, background: Strangers | None, seed: int):
        self._first = first
        self._users = [_User(gpu.uuid, background, seed) for gpu in gpus]
        self._now = 0.0

    def start(self, job: int, work: Work) -> Ran:
        """Waits until the job can start, starts it, and sleeps."""
        self._now = max(self._now, work.arrives_s)
        asked = max(1, work.job.gpus)
        counts = [0] * len(self._users)
        while True:
            for position, user in enumerate(self._users):
                counts[position] = counts[position] + 1 if user.is_free(self._now) else 0
            free = [position for position, count in enumerate(counts) if count >= MAX_CHECKS]
            if len(free) >= asked:
                break
            self._now += CHECK_INTERVAL_S
        start = self._now + READ_S
        trial = work.trials[0]
        end = start + trial.seconds
        chosen = free[:asked]
        for position in chosen:
            self._users[position].takes(end)
        self._now = start + SLEEP_S
        return Ran(
            job=job,
            gpus=tuple(self._first + position for position in chosen),
            start=start,
            end=end,
            wait_s=start - work.arrives_s,
            ending=Ending.DONE if trial.failure is None else Ending.FAILED,
            failure=trial.failure,
        )

    def visits(self) -> list[Visit]:
        """What strangers have done on this machine so far."""
        return [
            Visit(self._first + position, session.start, session.end)
            for position, user in enumerate(self._users)
            for session in user.seen
        ]


class _User:
    """Who uses one GPU: our own job until some second, and strangers by their plan. Time only goes on."""

    def __init__(self, uuid: str, background: Strangers | None, seed: int):
        self._plan: Iterator[Session] = iter(()) if background is None else background.sessions(seed, uuid)
        self._next = next(self._plan, None)
        self._ours_until = 0.0
        self._stranger_until = 0.0
        self.seen: list[Session] = []

    def takes(self, until: float) -> None:
        """Our job runs there until then."""
        self._ours_until = until

    def is_free(self, now: float) -> bool:
        """Whether a look at this second finds it free."""
        while self._next is not None and self._next.start <= now:
            # As everywhere here: strangers who find a job of ours go elsewhere, unless they don't look.
            if self._next.start >= self._ours_until or self._next.barges:
                self.seen.append(self._next)
                self._stranger_until = max(self._stranger_until, self._next.end)
            self._next = next(self._plan, None)
        return now >= self._ours_until and now >= self._stranger_until


# What is simulated, whole: machines, work, strangers, and the variants to compare; and running them, one by one.


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """The same for all variants.

    Attributes:
        machines: the GPUs of each machine.
        works: the jobs.
        background: strangers, None for none.
        seed: of the strangers.
        begin: local time of second 0, for quiet hours.
    """

    machines: tuple[Machine, ...]
    works: tuple[Work, ...]
    background: Strangers | None = None
    seed: int = 0
    begin: datetime = MONDAY


@dataclass(frozen=True, slots=True)
class Result:
    """A variant, what happened, and its figures."""

    variant: Variant
    history: History
    figures: Figures


Progress = Callable[[int, int, int], None]


def simulate(scenario: Scenario, variants: Sequence[Variant], progress: Progress | None = None) -> tuple[Result, ...]:
    """Runs every variant. ``progress`` is told of which variant how many of how many jobs have ended.

    Raises UsageError for jobs and strangers that a variant's policy does not know.
    """
    results = []
    for number, variant in enumerate(variants):
        history = run_one(scenario, variant, None if progress is None else _for(progress, number))
        results.append(Result(variant, history, figures(history, scenario.works)))
    return tuple(results)


def run_one(scenario: Scenario, variant: Variant, progress: Callable[[int, int], None] | None = None) -> History:
    """Runs one variant."""
    if variant.rules.policy == "guides":
        return run_guides(scenario.machines, scenario.works, scenario.background, scenario.seed, progress)
    if variant.rules.policy == "handover":
        return _handed_over(scenario, variant.rules, progress)
    several = next((work.job.name for work in scenario.works if work.job.nodes > 1), None)
    if several is not None:
        raise UsageError(
            f"job {several!r} spans several nodes, which only a cluster's engine gives; say --policy handover"
        )
    simulation = Simulation(
        scenario.machines, scenario.works, variant.rules, scenario.background, scenario.seed, scenario.begin
    )
    return simulation.run(progress)


def _handed_over(scenario: Scenario, rules: Rules, progress: Callable[[int, int], None] | None) -> History:
    if scenario.background is not None:
        raise UsageError("--background is for our own policy; what else a cluster runs is not simulated")
    return HandedOver(scenario.machines, scenario.works, rules).run(progress)


def _for(progress: Progress, number: int) -> Callable[[int, int], None]:
    return lambda done, total: progress(number, done, total)
