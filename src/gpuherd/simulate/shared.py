"""Several users on one machine, each with a gpuherd of their own, in virtual time.

Each user's dispatcher decides with the user's own queue, as in ``engine``. For it the others' jobs are users of the
GPUs that come and go; a GPU that another's job has left must be quiet first. Between users the rule of real runs
decides: before each decision ``gpus.turns.assign`` says for whom the free GPUs are meant, from the tickets of all
users who wait and from loads that are kept in virtual time, and those that are meant for others are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from statistics import mean, median

from gpuherd.gpus.turn_prediction import HeldGpu, grown, predict_start
from gpuherd.gpus.turns import Load, Ticket, TurnRules, assign, goes_on
from gpuherd.jobs.scheduler.types import Start
from gpuherd.simulate.devices import RunningAttempt, SimulatedGpu, SimulatedGpus
from gpuherd.simulate.engine import Simulation, idle_rule
from gpuherd.simulate.external import ExternalUse
from gpuherd.simulate.options import Rules
from gpuherd.simulate.people import User
from gpuherd.simulate.results import History, UserHistory
from gpuherd.simulate.state import EventQueue
from gpuherd.simulate.workload import MONDAY, ExternalUsers, Machine, Work

# A decision follows so long after the moment at which a GPU is no longer kept, so that it is surely past it.
_AFTER_S = 0.001
# For so long after its job has left a GPU a user may go on with it before the user's turn, as in ``jobs.gpu.turns``.
_LEFT_S = 5.0
# Of external users, and of GPUs that are not quiet yet, in predictions.
_NOBODY = 0
_PROGRESS_EVERY_STEPS = 256


@dataclass(slots=True)
class _Shared:
    """What all users' gpuherds know of each other: tickets, and loads as they were at some second."""

    rules: TurnRules | None
    events: EventQueue
    tickets: dict[int, Ticket] = field(default_factory=dict)
    dispatchers: list[UserDispatcher] = field(default_factory=list)
    _loads: dict[int, tuple[Load, float]] = field(default_factory=dict)

    def set_load(self, uid: int, load: Load) -> None:
        self._loads[uid] = (load, self.events.now)

    def loads(self) -> dict[int, Load]:
        """The users' loads now, by uid."""
        half_life_s = (self.rules or TurnRules()).half_life_s
        now = self.events.now
        return {uid: grown(load, now - at, half_life_s) for uid, (load, at) in self._loads.items()}

    def add_held(self, uid: int, more: int) -> None:
        load = self.loads()[uid]
        self.set_load(uid, replace(load, held=load.held + more))


class _SharedGpus(SimulatedGpus):
    """The GPUs as one user's dispatcher sees them. What its jobs take and leave, the others see."""

    def __init__(self, machines: Sequence[Machine], rules: Rules, background: ExternalUsers | None, shared: _Shared):
        super().__init__(machines, idle_rule(rules, background), shared.events)
        self._shared = shared
        self.user = User("")
        self.uid = _NOBODY
        self.took_at = 0.0

    def add_attempt(self, gpu: SimulatedGpu, attempt: RunningAttempt) -> None:
        """An attempt of this user starts here."""
        if not gpu.attempts:
            self.took_at = self.events.now
            self._shared.add_held(self.uid, 1)
            for each in self._others():
                each.hold(each.all[gpu.number], self.user.name)
        gpu.kept_for = ""
        super().add_attempt(gpu, attempt)

    def remove_attempt(self, gpu: SimulatedGpu, attempt: RunningAttempt) -> None:
        """An attempt of this user has ended here."""
        super().remove_attempt(gpu, attempt)
        if not gpu.attempts:
            self._shared.add_held(self.uid, -1)
            for each in self._others():
                each.let_go(each.all[gpu.number])

    def _others(self) -> list[SimulatedGpus]:
        return [each.gpus for each in self._shared.dispatchers if each.gpus is not self]


class UserDispatcher(Simulation):
    """The dispatcher of one user.

    Attributes:
        user, uid: whose it is.
        numbers: of its jobs, among those of all users.
        waiting: from when until when jobs waited for GPUs, but for the wait that lasts.
        waiting_since: since when they wait now, None while none does.
        predicted_s: when the first GPU was to come, by the prediction that was made when the first job came.
        starts: how many attempts have started.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        works: Sequence[Work],
        rules: Rules,
        background: ExternalUsers | None,
        starts_at: datetime,
        user: User,
        shared: _Shared,
    ):
        self.numbers = [number for number, work in enumerate(works) if work.user == user.name]
        mine = [works[number] for number in self.numbers]
        self._own = _SharedGpus(machines, rules, background, shared)
        super().__init__(machines, mine, rules, background, starts_at=starts_at, gpus=self._own)
        self._shared = shared
        self.user = user
        self.uid = len(shared.dispatchers) + 1
        self._own.user, self._own.uid = user, self.uid
        shared.dispatchers.append(self)
        shared.set_load(self.uid, Load(user.used_s, 0, user.weight))
        lengths = [work.trials[0].seconds for work in mine]
        typical = median(lengths) if lengths else 0.0
        self._expected = [typical if work.expected_s is None else work.expected_s for work in mine]
        self._job_s = mean(self._expected) if mine else 0.0
        self.waiting: list[tuple[float, float]] = []
        self.waiting_since: float | None = None
        self.predicted_s: float | None = None
        self._has_waited = False
        self.starts = 0
        self._wake_at: float | None = None

    # --- its ticket ---------------------------------------------------------------------------------------------

    def update_ticket(self) -> None:
        """Leaves a ticket while jobs wait for GPUs, and takes it back when none does."""
        ticket = self._ticket()
        if ticket is None:
            self._shared.tickets.pop(self.uid, None)
        else:
            self._shared.tickets[self.uid] = ticket

    def _ticket(self) -> Ticket | None:
        waiting = self._jobs.on_gpus
        if not len(waiting):
            if self.waiting_since is not None:
                self.waiting.append((self.waiting_since, self._now))
            self.waiting_since = None
            return None
        if self.waiting_since is None:
            self.waiting_since = self._now
        kinds = waiting.kinds()
        limits = self._limits_now()
        room = limits.most_gpus - self.gpus.pool.in_use
        if limits.max_concurrent is not None and limits.running >= limits.max_concurrent:
            room = 0
        gpus = min(room, sum(gpus * count for gpus, _, count in kinds), len(self.gpus.all))
        # Those behind the first one don't overtake it: what it lacks is reserved for it.
        smallest = waiting.head(1)[0].gpus
        if gpus < smallest:
            return None
        return Ticket(
            self.user.name,
            self.uid,
            since=max(self.waiting_since, self._own.took_at),
            gpus=gpus,
            smallest=smallest,
            usable=self._usable(min(memory_mb or 0 for _, memory_mb, _ in kinds)),
            job_s=self._job_s,
            jobs=len(waiting),
        )

    def _usable(self, least_mb: int) -> frozenset[str] | None:
        usable = [each for each in self.gpus.all if each.gpu.total_mb >= least_mb and not each.excluded]
        if len(usable) == len(self.gpus.all):
            return None
        return frozenset(each.gpu.uuid for each in usable)

    # --- whose turn it is ---------------------------------------------------------------------------------------

    def _keep_for_others(self) -> None:
        rules, tickets = self._shared.rules, self._shared.tickets
        if rules is None:
            return
        free = self._free() if tickets.keys() - {self.uid} else {}
        if not free:
            self.gpus.keep({})
            return
        me, loads = self.user.name, self._shared.loads()
        given = assign(free, tickets.values(), loads, now=self._now, me=me, held=self._coming(), rules=rules)
        kept = given.kept_for_others(me)
        more = len(given.to.get(me, ()))
        for gpu in self.gpus.all:
            ticket = kept.get(gpu.gpu.uuid)
            if ticket is None or not gpu.ours_left or self._now - gpu.clean_since > _LEFT_S:
                continue
            if goes_on(loads[self.uid], loads[ticket.uid], more, rules):
                more += 1
                del kept[gpu.gpu.uuid]
        self.gpus.keep({uuid: ticket.key for uuid, ticket in kept.items()})
        if kept:
            self._wake_at_least_by(min(given.until[ticket.key] for ticket in kept.values()))

    def _free(self) -> dict[str, float]:
        return {each.gpu.uuid: each.clean_since for each in self.gpus.all if self.gpus.is_free(each)}

    def _coming(self) -> frozenset[str]:
        """GPUs that will be free: those that gpuherds hold, and those that are not quiet yet. Without the latter, what
        is kept for a large job would be given up whenever another GPU comes free."""
        return frozenset(
            each.gpu.uuid
            for each in self.gpus.all
            if each.external_since is None and not each.excluded and not self.gpus.is_free(each)
        )

    def _wake_at_least_by(self, second: float) -> None:
        """Plans a decision for when the first GPU is kept for others no longer."""
        at = max(self._now, second) + _AFTER_S
        if math.isfinite(at) and (self._wake_at is None or self._wake_at <= self._now or at < self._wake_at):
            self._wake_at = at
            self._events.wake_at(at)

    # --- when its turn comes ------------------------------------------------------------------------------------

    def predict_first(self) -> None:
        """Predicts the first GPU, once: when jobs wait for the first time."""
        ticket, rules = self._shared.tickets.get(self.uid), self._shared.rules
        if self._has_waited or ticket is None or rules is None:
            return
        self._has_waited = True
        polling_since = self._now if self._polling_since is None else self._polling_since
        quiet_s = self._idle_rule.quiet_s
        held = []
        for gpu in self.gpus.all:
            if gpu.clean and not gpu.excluded and not self.gpus.is_free(gpu):
                until = self.gpus.free_at(gpu, polling_since) - quiet_s
                held.append(HeldGpu(gpu.gpu.uuid, _NOBODY, until))
            elif not gpu.clean and gpu.external_since is None:
                held += self._shared_hold(gpu)
        self.predicted_s = predict_start(
            self.user.name,
            self._shared.tickets.values(),
            held,
            self._shared.loads(),
            now=self._now,
            free=self._free(),
            quiet_s=quiet_s,
            rules=rules,
        ).at

    def _shared_hold(self, gpu: SimulatedGpu) -> list[HeldGpu]:
        """Who holds a GPU, and until when as far as the holder knows."""
        for each in self._shared.dispatchers:
            ends = [each.expected_end(attempt) for attempt in each.gpus.all[gpu.number].attempts]
            if ends:
                known = [end for end in ends if end is not None]
                until = max(known) if len(known) == len(ends) else None
                return [HeldGpu(gpu.gpu.uuid, each.uid, until, each.user.name)]
        return []

    def expected_end(self, attempt: RunningAttempt) -> float | None:
        """When an attempt is expected to end; None while it is paused."""
        return None if attempt.ends_at is None else attempt.started + self._expected[attempt.queued.id]

    # --- its steps ----------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """How many of its jobs have not ended."""
        return self._jobs.unfinished

    @property
    def is_stuck(self) -> bool:
        """Whether none of its waiting jobs will ever start."""
        return self._is_stuck()

    def submit(self) -> None:
        """Plans the arrival of its jobs."""
        self._submit()

    def decide(self) -> bool:
        """Starts what can start. Returns whether anything did."""
        before = self.starts
        self._after_step()
        self.update_ticket()
        return self.starts != before

    def _start(self, start: Start) -> None:
        self.starts += 1
        super()._start(start)

    def end(self) -> History:
        """What has happened to its jobs, when the simulation has ended."""
        if self.waiting_since is not None:
            self.waiting.append((self.waiting_since, self._now))
        return self._history()


class SharedSimulation:
    """One run of the jobs of several users on one machine. Use: ``run`` once.

    Args:
        machines: one machine's GPUs.
        works: the jobs of all users in the order of their arrival, each with its user's name.
        users: the users; where two decide at the same moment, the first of them does so first.
        rules: the rules of each user's dispatcher, and those of the turns.
        background: external users, None for none.
        seed: of the external users.
        starts_at: local time of second 0, for quiet hours.

    Raises ValueError for works that are not in order, or that name no user.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        works: Sequence[Work],
        users: Sequence[User],
        rules: Rules,
        background: ExternalUsers | None = None,
        seed: int = 0,
        starts_at: datetime = MONDAY,
    ):
        if not {work.user for work in works} <= {user.name for user in users}:
            raise ValueError("each job must name one of the users")
        self._machines = machines
        self._works = works
        self._events = EventQueue()
        turn_rules = rules.turn_rules(idle_rule(rules, background).quiet_s)
        shared = _Shared(turn_rules, self._events)
        for user in users:
            UserDispatcher(machines, works, rules, background, starts_at, user, shared)
        self._dispatchers = shared.dispatchers
        self._external: ExternalUse | None = None
        if background is not None:
            self._external = ExternalUse(background, seed, self._events, self._dispatchers)

    def run(self, progress: Callable[[int, int], None] | None = None) -> History:
        """Runs to the end. ``progress`` is called now and then with the numbers of ended jobs and of all jobs."""
        for each in self._dispatchers:
            each.submit()
        total, steps = len(self._works), 0
        while (left := self._unfinished()) and self._events and not self._is_stuck():
            self._events.step()
            self._decide()
            steps += 1
            if progress is not None and steps % _PROGRESS_EVERY_STEPS == 0:
                progress(total - left, total)
        if progress is not None:
            progress(total - self._unfinished(), total)
        return self._history()

    def _unfinished(self) -> int:
        return sum(each.unfinished for each in self._dispatchers)

    def _is_stuck(self) -> bool:
        return all(each.is_stuck or not each.unfinished for each in self._dispatchers)

    def _decide(self) -> None:
        """Lets all dispatchers decide, until what one does changes nothing for the others."""
        for each in self._dispatchers:
            each.update_ticket()
        for each in self._dispatchers:
            each.predict_first()
        # Not any(): each of them decides in every round.
        while sum([each.decide() for each in self._dispatchers]):
            pass

    def _history(self) -> History:
        histories = [each.end() for each in self._dispatchers]
        attempts = [
            replace(attempt, job=each.numbers[attempt.job])
            for each, history in zip(self._dispatchers, histories, strict=True)
            for attempt in history.attempts
        ]
        return History(
            machines=histories[0].machines,
            attempts=tuple(sorted(attempts, key=lambda attempt: attempt.end)),
            visits=() if self._external is None else self._external.visits(),
            done=sum(each.done for each in histories),
            failed=sum(each.failed for each in histories),
            cancelled=sum(each.cancelled for each in histories),
            refused={
                each.numbers[job]: why
                for each, history in zip(self._dispatchers, histories, strict=True)
                for job, why in history.refused.items()
            },
            stuck=sum(each.stuck for each in histories),
            decisions=sum(each.decisions for each in histories),
            users=tuple(
                UserHistory(each.user.name, each.user.weight, tuple(each.waiting), each.predicted_s)
                for each in self._dispatchers
            ),
        )
