"""No job begins before what it needs has succeeded: the follower and the leaders of nodes, in every order of events.

The engine is a fake that behaves as SLURM does: it forgets jobs some time after their end, takes ``afterok`` on a job
that it does not know for met, and when its controller crashes it loses what it had not saved, and gives their numbers
to others. Time is the test's. All else is real: queue, files, the follower's decisions, and the leader up to the point
where it would start the command.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from gpuherd.engines.base import Batch, End, EngineAway, Phase, Placement, Sighting, Ticket
from gpuherd.jobs import DispatchOptions, Job, Queue, RunDirectory, clock
from gpuherd.jobs.remote import agent, dispatcher, node_job, tracker
from gpuherd.jobs.remote.dispatcher import RemoteDispatcher
from gpuherd.jobs.remote.outcome import RemoteAttempt
from gpuherd.jobs.remote.protocol import EndReport, Order, exit_code, order_of, write_ended
from gpuherd.jobs.reporter import Reporter

REMEMBERS_S = 10.0
NEEDS = {"a": (), "b": ("a",), "x": (), "c": ("a", "x"), "d": ("b", "c"), "e": ("d",)}
JOBS = [Job(name=name, argv=("true",), gpus=0, needs=needs, retries=1) for name, needs in NEEDS.items()]


@dataclass
class Parcel:
    """As the engine has it. ``ended_at``: when it called it ended."""

    batch: str
    index: int
    command: tuple[str, ...]
    after: tuple[str, ...]
    phase: Phase = Phase.WAITING
    end: End | None = None
    ended_at: float = 0.0


@dataclass
class Slurm:
    """An ``Engine``. ``saved``: what a controller knows after a crash."""

    now: Callable[[], float]
    name: str = "slurm"
    look_s: float = 2.0
    chains: bool = True
    remembers_s: float = REMEMBERS_S
    parcels: dict[str, Parcel] = field(default_factory=dict)
    last: int = 0
    saved: tuple[dict[str, Parcel], int] = field(default_factory=lambda: ({}, 0))
    loses_answers: bool = False

    def check(self, wanted: Collection[Placement]) -> Mapping[Placement, str]:
        return {}

    def submit(self, batch: Batch) -> Sequence[str]:
        self.last += 1
        handles = [f"{self.last}_{index}" for index in range(len(batch.parcels))]
        for index, handle in enumerate(handles):
            self.parcels[handle] = Parcel(batch.name, index, batch.command, batch.after)
        if self.loses_answers:
            self.loses_answers = False
            raise EngineAway("the connection was lost before the answer came")
        return handles

    def look(self, tickets: Collection[Ticket]) -> Mapping[int, Sighting]:
        found = {}
        for ticket in tickets:
            for handle, parcel in self.parcels.items():
                same = (parcel.batch, parcel.index) == (ticket.batch, ticket.index)
                if same and ticket.handle in (None, handle):
                    by = "root" if parcel.end is End.CANCELLED else None
                    found[ticket.attempt] = Sighting(handle=handle, phase=parcel.phase, end=parcel.end, by=by)
        return found

    def cancel(self, handles: Collection[str]) -> None:
        for handle in handles:
            if handle in self.parcels and self.parcels[handle].phase is not Phase.ENDED:
                self.over(handle, End.CANCELLED)

    def close(self) -> None:
        """Nothing is open."""

    # --- what befalls it

    def over(self, handle: str, end: End) -> None:
        parcel = self.parcels[handle]
        parcel.phase, parcel.end, parcel.ended_at = Phase.ENDED, end, self.now()

    def settle_dependencies(self) -> None:
        for handle in self.waiting():
            ends = [self.parcels[each].end for each in self.parcels[handle].after if each in self.parcels]
            if any(end is not None and end is not End.OK for end in ends):
                self.over(handle, End.NEVER)

    def can_begin(self) -> list[str]:
        self.settle_dependencies()
        return [
            handle
            for handle in self.waiting()
            if all(self.parcels[each].end is End.OK for each in self.parcels[handle].after if each in self.parcels)
        ]

    def waiting(self) -> list[str]:
        return [handle for handle, parcel in self.parcels.items() if parcel.phase is Phase.WAITING]

    def forget(self) -> None:
        self.settle_dependencies()
        old = [
            handle
            for handle, parcel in self.parcels.items()
            if parcel.phase is Phase.ENDED and self.now() >= parcel.ended_at + REMEMBERS_S
        ]
        for handle in old:
            del self.parcels[handle]

    def save(self) -> None:
        self.saved = deepcopy((self.parcels, self.last))

    def crash(self) -> None:
        self.parcels, self.last = deepcopy(self.saved)


class Answers:
    """In place of ``in_background``: answers by how things stand at the question, when the test says so."""

    def __init__(self) -> None:
        self._future: Future[Any] = Future()
        self._answer: Any = None

    def __call__(self, ask: Callable[[], Any], _then: Callable[[], object]) -> Future[Any]:
        self._future, self._answer = Future(), ask()
        return self._future

    def come(self) -> None:
        if not self._future.done():
            self._future.set_result(self._answer)


class _Begins(Exception):
    """The leader would start the command now."""


class World(RuleBasedStateMachine):
    """A run, its follower, and all that can happen to them."""

    crashes = True

    def __init__(self) -> None:
        super().__init__()
        self.mono = 1000.0
        # In memory, where there is such a place: nothing here is about disks, and each step syncs files.
        memory = Path("/dev/shm")
        self.root = Path(tempfile.mkdtemp(prefix="order-", dir=memory if memory.is_dir() else None))
        self.run = RunDirectory(self.root)
        self.run.create()
        self.engine = Slurm(now=lambda: self.mono)
        self.running: dict[tuple[str, int], tuple[str, str, Order]] = {}
        self.succeeded: set[str] = set()
        self._patches = ExitStack()
        self.answers = Answers()
        for owner, name, value in (
            (clock, "mono", lambda: self.mono),
            (clock, "wall", lambda: 1.7e9 + self.mono),
            (dispatcher, "REPORT_DELAY_S", 0.0),
            (tracker, "in_background", self.answers),
            (node_job.NodePart, "run", self._would_start),
        ):
            self._patches.enter_context(patch.object(owner, name, value))

    @initialize(at_most=st.sampled_from([2, 3, 10]))
    def start(self, at_most: int) -> None:
        self.options = DispatchOptions(engine="slurm", at_most=at_most)
        self._follow()

    def _follow(self) -> None:
        self.held = ExitStack()
        self.queue = self.held.enter_context(Queue(self.run.queue))
        reporter = Reporter(self.queue, self.run)
        self.follower = RemoteDispatcher(self.queue, self.run, self.options, self.engine, reporter, JOBS, grace_s=0.0)
        self.queue.submit(JOBS)
        at = clock.wall()
        self.follower._begin(self.queue.begin_run(at, self.mono, "slurm"), at, self.held)
        self.follower._adopt()

    # --- the follower

    @rule()
    def step(self) -> None:
        self.follower._look_after(self.mono)
        self.follower._start_what_can()

    @rule()
    def answer_comes(self) -> None:
        self.answers.come()
        self.step()

    @rule(seconds=st.sampled_from([0.1, 2.0, REMEMBERS_S + 1, 500.0]))
    def wake(self, seconds: float) -> None:
        """It goes on after a while: it had nothing to do, its machine slept, or it was stopped."""
        self.mono += seconds

    @rule()
    def kill_and_start_again(self) -> None:
        self.held.close()
        self._follow()

    @rule(name=st.sampled_from(sorted(NEEDS)))
    def cancel(self, name: str) -> None:
        self.queue.cancel([name], "me")
        self.follower.enforce_marks()

    @rule(name=st.sampled_from(sorted(NEEDS)))
    def retry(self, name: str) -> None:
        self.queue.retry([name], clock.wall())
        self.follower.decide_soon(self.mono)

    # --- the engine

    @rule(pick=st.integers(0, 99))
    def begin(self, pick: int) -> None:
        ready = self.engine.can_begin()
        if ready:
            self._lead(ready[pick % len(ready)])

    def _lead(self, handle: str) -> None:
        parcel = self.engine.parcels[handle]
        manifest = parcel.command[-1]
        parcel.phase = Phase.RUNNING
        try:
            _, order = order_of(Path(manifest), parcel.index)
            code = agent.lead(manifest, parcel.index, handle=handle)
        except OSError:
            code = 1  # the batch is over, and its manifest gone
        except _Begins:
            self.running[parcel.batch, parcel.index] = (handle, self._job_of(order), order)
            return
        self.engine.over(handle, End.OK if code == 0 else End.FAILED)

    def _would_start(self, *_: object) -> EndReport:
        raise _Begins

    def _job_of(self, order: Order) -> str:
        name = Path(order.log).name.partition(".")[0]
        missing = set(NEEDS[name]) - self.succeeded
        assert not missing, f"{name} begins, and {missing} have not succeeded"
        return name

    @rule(pick=st.integers(0, 99), code=st.sampled_from([0, 0, 1, None]), told=st.booleans())
    def end(self, pick: int, code: int | None, told: bool) -> None:
        """One of those that run ends: well, badly, or with its node (None), which tells nothing."""
        if not self.running:
            return
        which = sorted(self.running)[pick % len(self.running)]
        handle, name, order = self.running.pop(which)
        ended = EndReport(at=clock.wall(), ran_s=1.0, code=code)
        if code is not None and (told or code == 0):
            write_ended(Path(order.ended), ended)
        if code == 0:
            self.succeeded.add(name)
        parcel = self.engine.parcels.get(handle)
        if parcel is not None and (parcel.batch, parcel.index) == which:
            how = End.NODE_LOST if code is None else End.OK if exit_code(ended) == 0 else End.FAILED
            self.engine.over(handle, how)

    @rule(pick=st.integers(0, 99))
    def administrator_cancels(self, pick: int) -> None:
        waiting = self.engine.waiting()
        if waiting:
            self.engine.over(waiting[pick % len(waiting)], End.CANCELLED)

    @rule()
    def forget(self) -> None:
        self.engine.forget()

    @rule(pick=st.integers(0, 99))
    def sleep(self, pick: int) -> None:
        """One of those that wait is cancelled and forgotten while the follower's machine sleeps."""
        self.administrator_cancels(pick)
        self.mono += REMEMBERS_S + 1
        self.engine.forget()
        self.step()

    @precondition(lambda self: self.crashes)
    @rule()
    def save(self) -> None:
        self.engine.save()

    @precondition(lambda self: self.crashes)
    @rule()
    def crash(self) -> None:
        """What has ended since it saved is found out when the nodes tell what they run."""
        self.engine.crash()
        for handle, parcel in self.engine.parcels.items():
            if parcel.phase is Phase.RUNNING and (parcel.batch, parcel.index) not in self.running:
                self.engine.over(handle, End.NODE_LOST)

    @precondition(lambda self: self.crashes)
    @rule()
    def lose_an_answer(self) -> None:
        self.engine.loses_answers = True

    # --- the end

    def teardown(self) -> None:
        try:
            if hasattr(self, "queue"):
                self._come_to_an_end()
                self.held.close()
        finally:
            self._patches.close()
            shutil.rmtree(self.root)

    def _come_to_an_end(self) -> None:
        """When nothing more befalls it, every job ends."""
        for _ in range(80):
            self.engine.forget()
            for _ in range(3):
                self.mono += 2.0
                self.answer_comes()
            for handle in self.engine.can_begin():
                self._lead(handle)
            while self.running:
                self.end(0, 0, told=True)
            if not self.follower._tracker.open and not {"waiting", "running"} & set(self.queue.states().values()):
                return
        raise AssertionError(f"it does not end: {self.queue.states()}, {self.engine.parcels}")


class WithoutLeaders(World):
    """The follower alone keeps the order where no controller crashes: leaders begin whatever they are given."""

    crashes = False

    def __init__(self) -> None:
        super().__init__()
        self._patches.enter_context(patch.object(agent, "_missing", lambda *_: None))


class WithoutFollower(World):
    """Leaders alone keep the order: the follower believes of all that it has ever heard of that the engine knows it."""

    def __init__(self) -> None:
        super().__init__()
        known = patch.object(RemoteAttempt, "can_be_followed", lambda self, *_: self.handed.handle is not None)
        self._patches.enter_context(known)


def _try(machine: type[World], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("machine", [World, WithoutLeaders, WithoutFollower])
def test_nothing_begins_before_what_it_needs_has_succeeded(machine: type[World]) -> None:
    _try(machine, 10)


@pytest.mark.parametrize("killed", ["before", "after", "never"])
@pytest.mark.parametrize("machine", [World, WithoutLeaders, WithoutFollower])
def test_nothing_follows_a_job_that_was_cancelled_and_forgotten_meanwhile(machine: type[World], killed: str) -> None:
    """The order of events by which a job began before its need, which chance alone seldom finds."""
    world = machine()
    try:
        world.start(at_most=2)
        world.answer_comes()
        (handle,) = (each for each, parcel in world.engine.parcels.items() if parcel.index == 0)
        if killed == "before":
            world.kill_and_start_again()
        world.engine.over(handle, End.CANCELLED)
        world.wake(REMEMBERS_S + 1)
        world.forget()
        world.begin(0)
        world.end(0, 0, told=True)
        if killed == "after":
            world.kill_and_start_again()
        for _ in range(3):
            world.step()
            world.begin(0)
        assert world.succeeded == {"x"}
    finally:
        world.teardown()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", [World, WithoutLeaders, WithoutFollower])
def test_the_same_many_times(machine: type[World]) -> None:
    _try(machine, 200)
