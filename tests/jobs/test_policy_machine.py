"""The policy against a world that hypothesis shakes, and an oracle that is slow and obviously right.

The world is a few machines, strangers who come and go, jobs that start, end, fail and come back. After every decision
the oracle goes through the jobs in order, once more and by trying all sets of GPUs:

* what starts is there, is large enough, is given once (or shared with a sum that fits) and keeps every limit;
* what waits could not have started when its turn came;
* what starts after the first large one that waits takes nothing from it: where time limits say when it surely has its
  GPUs, that is no later than before; else its best machine has as many GPUs free for it as before. Its part of the
  limit is still there, and the room for the first sharing job has not shrunk;
* what is refused could not run in an empty world.

When a large job is the first of all, and time limits say when it surely has its GPUs, then it has started by then, over
all later decisions, unless strangers, older jobs, or changed limits come between. The pool that is kept over all steps
gives the same decision as a fresh one. In the end the strangers go, small jobs
keep coming without end, and every job that waits must start all the same: also where each decision sees only a part of
the queue, by ``Lookahead``. After such decisions, one on the whole queue finds nobody who could start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpuherd.gpus.choose import choose
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.scheduler.ordering import Lookahead
from gpuherd.jobs.scheduler.policy import decide, decide_with
from gpuherd.jobs.scheduler.pool import Pool
from gpuherd.jobs.scheduler.types import Decision, GpuView, Limits, Start, WaitingJob

SMALL_MB, LARGE_MB = 24_000, 80_000
BASELINE_MB = 300


def kind_of(job: WaitingJob) -> tuple[int, int | None, bool]:
    return (job.gpus, job.memory_mb, job.share)


def pick(candidates: Sequence[Gpu], count: int, memory_mb: int | None) -> tuple[Gpu, ...] | None:
    return choose(candidates, count, memory_mb=memory_mb, keep_together=True)


@dataclass
class Place:
    """A GPU of the world: who is on it."""

    uuid: str
    index: int
    machine: str
    total_mb: int
    tenants: dict[int, WaitingJob] = field(default_factory=dict)
    stranger: bool = False
    draining: bool = False

    @property
    def used_mb(self) -> int:
        return BASELINE_MB + sum(job.memory_mb or 0 for job in self.tenants.values())

    @property
    def room_mb(self) -> int | None:
        """What may be promised to one more sharing job, None when nothing may."""
        alone = any(not job.share for job in self.tenants.values())
        return None if alone or self.stranger or self.draining else self.total_mb - self.used_mb

    @property
    def is_free(self) -> bool:
        return not (self.tenants or self.stranger or self.draining)

    @property
    def will_come(self) -> bool:
        return bool(self.tenants) or not self.stranger

    def holds(self, job: WaitingJob) -> bool:
        return job.memory_mb is None or self.total_mb >= job.memory_mb

    def has_room(self, job: WaitingJob) -> bool:
        """Whether what is free on it now, when nobody is there, is enough."""
        return self.total_mb - BASELINE_MB >= (job.memory_mb or 0)

    def sure_at(self, ends: dict[int, float]) -> float:
        """When it surely is free for one job alone, by the time limits of those on it."""
        if not self.tenants:
            return math.inf if self.stranger else -math.inf
        return math.inf if self.room_mb is not None else max(ends.get(job, math.inf) for job in self.tenants)

    def view(self, ends: dict[int, float]) -> GpuView:
        # Sharing jobs have not taken their memory yet: all but the baseline looks free.
        gpu = Gpu(self.index, self.uuid, "G", self.total_mb, BASELINE_MB, self.total_mb - BASELINE_MB)
        busy = "our job" if self.tenants else "alice" if self.stranger else "draining" if self.draining else None
        return GpuView(
            gpu,
            busy,
            ours=bool(self.tenants),
            shareable_mb=self.room_mb if self.tenants else None,
            returning=self.draining and not self.stranger,
            node=self.machine,
            over_at=self.over_at(ends),
        )

    def over_at(self, ends: dict[int, float]) -> float | None:
        alone = [job.id for job in self.tenants.values() if not job.share]
        return ends.get(alone[0]) if alone else None


class Oracle:
    """Goes through a decision in order and checks it, by trying."""

    def __init__(
        self, places: dict[str, Place], limits: Limits, running: int, cpu_running: int, ends: dict[int, float]
    ):
        self.places = {uuid: replace(place, tenants=dict(place.tenants)) for uuid, place in places.items()}
        self.limits = limits
        self.running = running
        self.on_cpu = cpu_running
        self.ends = dict(ends)
        # Of the large jobs that wait and for which GPUs are kept: the most GPUs free on one machine, and when it surely
        # has enough; the least and the most that may be kept of the limit, with the GPUs in use then; and of the last
        # sharing job the room on a shared GPU.
        self.gaps: list[tuple[WaitingJob, int, float]] = []
        self.parts: list[tuple[int, int, int]] = []
        self.room_kept: tuple[WaitingJob, int] | None = None
        # Over the limit, which has just been lowered: so many shared GPUs must empty, and none is taken into use.
        self.over = max(0, self.in_use() - self.most())
        self.open = sum(bool(place.tenants) and place.room_mb is not None for place in self.places.values())
        self.joined: set[str] = set()
        self.closes = self.over > 0

    def check(self, jobs: Sequence[WaitingJob], decision: Decision) -> None:
        starts = {start.job: start for start in decision.starts}
        refused = {wait.job for wait in decision.refused}
        waits = {wait.job for wait in decision.waits}
        assert len(starts) + len(refused) + len(waits) == len(jobs)
        assert starts.keys() | refused | waits == {job.id for job in jobs}
        assert all(wait.reason for wait in (*decision.waits, *decision.refused))
        for job in sorted(jobs, key=lambda job: (-job.priority, job.id)):
            if job.id in refused:
                assert not self.could_ever(job)
            elif job.id in starts:
                self.carry_out(job, starts[job.id])
            else:
                assert self.could_ever(job)
                assert not self.could_start(job), f"{job} could have started"
                self.remember(job)

    # --- what is possible -------------------------------------------------------------------------------------

    def usable(self, job: WaitingJob) -> list[Place]:
        """GPUs large enough; without those where it failed if there are enough others that are free or ours."""
        fitting = [place for place in self.places.values() if place.holds(job)]
        others = [place for place in fitting if place.uuid not in job.avoid]
        return others if any(self.enough(job, others)) else fitting

    def enough(self, job: WaitingJob, places: Iterable[Place]) -> list[str]:
        """Machines that have enough of these GPUs free or ours."""
        coming = [place.machine for place in places if place.will_come and (not place.is_free or place.has_room(job))]
        return [machine for machine in sorted(set(coming)) if coming.count(machine) >= job.gpus]

    def could_ever(self, job: WaitingJob) -> bool:
        sizes = [place.machine for place in self.places.values() if place.holds(job)]
        return job.gpus == 0 or (
            job.gpus <= self.limits.max_gpus and any(sizes.count(name) >= job.gpus for name in sizes)
        )

    def in_use(self) -> int:
        return sum(bool(place.tenants) for place in self.places.values())

    def most(self) -> int:
        now = self.limits.gpus_now
        return self.limits.max_gpus if now is None else min(now, self.limits.max_gpus)

    def left(self) -> int:
        """GPUs that may still be taken into use by a job that comes after those that wait so far."""
        reserved = sum(most for _, _, most in self.parts)
        return self.most() - self.in_use() - reserved

    def could_start(self, job: WaitingJob) -> bool:
        """Whether it could, with what is not kept for those before it."""
        if self.limits.closed is not None:
            return False
        if self.limits.max_concurrent is not None and self.running >= self.limits.max_concurrent:
            return False
        if job.gpus == 0:
            return self.on_cpu < self.limits.cpu_slots
        usable = self.usable(job)
        if job.share and not self.closes:
            room = [place.room_mb for place in usable if place.tenants and place.room_mb is not None]
            if any(mb >= (job.memory_mb or 0) for mb in room):
                return True
        if self.left() < job.gpus:
            return False
        free = [place for place in usable if place.is_free and not self.is_kept(place)]
        free = [place for place in free if place.has_room(job)]
        return any(len({place.machine for place in group}) == 1 for group in combinations(free, job.gpus))

    def is_kept(self, place: Place) -> bool:
        """Whether the GPU may be one of those that are kept for a job which waits."""
        return any(place.holds(job) and place.machine in self.enough(job, self.usable(job)) for job, _, _ in self.gaps)

    # --- carrying out -----------------------------------------------------------------------------------------

    def carry_out(self, job: WaitingJob, start: Start) -> None:
        assert self.limits.closed is None
        assert len(start.gpus) == job.gpus
        places = [self.places[gpu.uuid] for gpu in start.gpus]
        assert len({place.uuid for place in places}) == len(places)
        assert len({place.machine for place in places}) <= 1, "a job's GPUs are of one machine"
        assert start.shared == (job.share and job.gpus > 0)
        usable = self.usable(job)
        for place in places:
            assert place.holds(job)
            assert place in usable, "it failed there, and there are others"
            if place.tenants:
                assert job.share
                self.joined.add(place.uuid)
                assert place.room_mb is not None
                assert place.room_mb >= (job.memory_mb or 0), "the sum no longer fits"
            else:
                assert place.is_free
                assert place.has_room(job)
            place.tenants[job.id] = job
        if job.limit_s is not None:
            self.ends[job.id] = self.limits.now + job.limit_s
        self.running += 1
        self.on_cpu += not start.gpus
        assert self.limits.max_concurrent is None or self.running <= self.limits.max_concurrent
        assert self.on_cpu <= self.limits.cpu_slots or start.gpus
        assert not places or self.in_use() <= self.most() + self.over
        assert not self.over or len(self.joined) <= max(0, self.open - self.over)
        self.check_what_is_kept()

    def remember(self, job: WaitingJob) -> None:
        """Writes down what those that come after must not take from a job that waits."""
        if job.gpus == 0 or job.gpus > self.most() or self.limits.closed is not None:
            return
        if self.limits.max_concurrent is not None and self.running >= self.limits.max_concurrent:
            return
        if job.gpus > 1 and self.gap(job) is not None and len(self.gaps) < self.limits.reservations:
            sure_at = self.sure_at(job)
            self.gaps.append((job, self.gap(job) or 0, sure_at))
            parts = self.parts_of(job)
            self.parts.append((self.in_use_after(sure_at), min(parts), max(parts)))
        if job.share and not self.closes:
            self.room_kept = (job, self.room(job))
        # From here on shared GPUs may be closed for it.
        self.closes = self.closes or self.gap(job) is not None

    def gap(self, job: WaitingJob) -> int | None:
        """The most GPUs free for it on a machine that will have enough, None when it waits for strangers."""
        usable = self.usable(job)
        machines = self.enough(job, usable)
        counts = [sum(p.is_free and p.has_room(job) and p.machine == name for p in usable) for name in machines]
        return max(counts, default=None)

    def sure_at(self, job: WaitingJob) -> float:
        """When it surely has its GPUs on one machine, by time limits; infinity when nobody knows."""
        found = [math.inf]
        for machine in {place.machine for place in self.places.values()}:
            here = [place for place in self.usable(job) if place.machine == machine]
            here = [place for place in here if not place.is_free or place.has_room(job)]
            times = sorted(place.sure_at(self.ends) for place in here)
            found += times[job.gpus - 1 : job.gpus]
        return min(found)

    def parts_of(self, job: WaitingJob) -> list[int]:
        """What may be kept of the limit for it: its GPUs that are not in use on the machine that is kept."""
        usable = self.usable(job)
        parts = []
        for machine in self.enough(job, usable):
            here = [place for place in usable if place.machine == machine and place.will_come and not place.tenants]
            parts.append(min(job.gpus, len(here)))
        return parts

    def in_use_after(self, at: float) -> int:
        """How many of the GPUs that are in use now may still be at this time."""
        if not math.isfinite(at):
            return self.in_use()
        return sum(bool(place.tenants) and place.sure_at(self.ends) > at for place in self.places.values())

    def room(self, job: WaitingJob) -> int:
        return max((place.room_mb or 0 for place in self.usable(job) if place.tenants), default=0)

    def check_what_is_kept(self) -> None:
        # The first that waits has the first claim; those behind it may find its GPUs among theirs.
        if self.gaps:
            job, before, sure_at = self.gaps[0]
            if math.isfinite(sure_at):
                assert self.sure_at(job) <= sure_at, f"{job} was put off"
            else:
                assert (self.gap(job) or 0) >= before, f"a GPU that {job} waits for was given away"
            in_use, part, _ = self.parts[0]
            allowed = max(in_use, self.most() - part)
            assert self.in_use_after(sure_at) <= allowed, f"the part of the limit of {job} was given away"
        if self.room_kept is not None:
            job, room_mb = self.room_kept
            assert self.room(job) >= room_mb, f"the room that {job} waits for was given away"


class World(RuleBasedStateMachine):
    """Some machines, strangers, and jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, Place] = {}
        self.waiting: dict[int, WaitingJob] = {}
        self.running: dict[int, WaitingJob] = {}
        self.limits = Limits(99, 2)
        # How many of the foremost jobs are looked at in the end; None for all.
        self.part: int | None = None
        self.pool = Pool()
        self.next_id = 1
        # When jobs with a time limit are killed, by id; and the first large job with the time by which it must start.
        self.now = 0.0
        self.ends: dict[int, float] = {}
        self.promise: tuple[int, float] | None = None

    strangers = Bundle("strangers")

    @initialize(
        sizes=st.lists(st.lists(st.sampled_from([SMALL_MB, LARGE_MB]), min_size=1, max_size=4), min_size=1, max_size=2),
        max_gpus=st.integers(1, 8),
        cpu_slots=st.integers(1, 2),
        reservations=st.integers(1, 3),
        part=st.none() | st.integers(1, 2),
    )
    def build(
        self, sizes: list[list[int]], max_gpus: int, cpu_slots: int, reservations: int, part: int | None = None
    ) -> None:
        self.part = part
        for number, machine in enumerate(sizes):
            for index, total_mb in enumerate(machine):
                uuid = f"GPU-{number}-{index}"
                self.places[uuid] = Place(uuid, index, f"m{number}", total_mb)
        self.limits = Limits(max_gpus, cpu_slots, reservations=reservations)
        self.pool = Pool(place.view(self.ends) for place in self.places.values())

    # --- what happens -----------------------------------------------------------------------------------------

    @rule(
        gpus=st.sampled_from([0, 1, 1, 1, 2, 3, 4]),
        memory_mb=st.sampled_from([None, 10_000, 23_000, 23_900, 60_000]),
        priority=st.sampled_from([0, 0, 0, 1]),
        limit_s=st.sampled_from([None, 3.0, 6.0, 12.0]),
    )
    def submit(self, gpus: int, memory_mb: int | None, priority: int, limit_s: float | None) -> None:
        if gpus > 1 and memory_mb == 23_900:
            memory_mb = 23_000  # It would wait for the driver to give back its baseline, and keep GPUs meanwhile.
        self.add(WaitingJob(self.next_id, gpus, memory_mb, priority, limit_s=limit_s))

    @rule(memory_mb=st.sampled_from([3_000, 8_000, 20_000, 60_000]), priority=st.sampled_from([0, 0, 0, 1]))
    def submit_sharing(self, memory_mb: int, priority: int) -> None:
        self.add(WaitingJob(self.next_id, 1, memory_mb, priority, share=True))

    def add(self, job: WaitingJob) -> None:
        if job.priority:
            self.promise = None
        self.waiting[job.id] = job
        self.next_id += 1

    @rule(target=strangers, data=st.data())
    def a_stranger_comes(self, data: st.DataObject) -> str:
        uuid = data.draw(st.sampled_from(sorted(self.places)))
        self.places[uuid].stranger = True
        self.promise = None
        self.tell(uuid)
        return uuid

    @rule(uuid=consumes(strangers))
    def a_stranger_goes(self, uuid: str) -> None:
        self.places[uuid].stranger = False
        self.tell(uuid)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.booleans(), drains=st.booleans())
    def a_job_ends(self, data: st.DataObject, failed: bool, drains: bool) -> None:
        job = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        on = [place.uuid for place in self.places.values() if job.id in place.tenants]
        self.end(job, drains=drains)
        if failed or drains:
            self.promise = None
        if failed:
            self.waiting[job.id] = replace(job, avoid=job.avoid | frozenset(on))

    def end(self, job: WaitingJob, *, drains: bool = False) -> None:
        del self.running[job.id]
        self.ends.pop(job.id, None)
        for place in self.places.values():
            if place.tenants.pop(job.id, None) is not None:
                place.draining = drains and not place.tenants
                self.tell(place.uuid)

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for job in [job for job in self.running.values() if self.ends.get(job.id, math.inf) <= self.now]:
            self.end(job)

    @rule()
    def memory_has_drained(self) -> None:
        for place in self.places.values():
            place.draining = False
            self.tell(place.uuid)

    @rule(
        now=st.none() | st.integers(0, 4), concurrent=st.none() | st.integers(1, 6), closed=st.sampled_from([0, 0, 1])
    )
    def the_limits_change(self, now: int | None, concurrent: int | None, closed: int) -> None:
        self.promise = None
        self.limits = replace(
            self.limits, gpus_now=now, max_concurrent=concurrent, closed="the disk is full" if closed else None
        )

    @rule()
    def decide(self) -> None:
        decision = self.decision()
        jobs = list(self.waiting.values())
        limits = self.limits_now()
        self.oracle().check(jobs, decision)
        views = [place.view(self.ends) for place in self.places.values()]
        fresh = decide(jobs, views, limits, pick, cpu_running=self.on_cpu())
        assert decision == fresh, "a pool that lasts decides otherwise than a fresh one"
        self.carry_out(decision)
        self.keep_the_promise()

    @rule(few=st.integers(1, 3))
    def decide_on_a_part(self, few: int) -> None:
        """As a dispatcher does, which never looks at a whole long queue: nobody stays hidden who could start."""
        self.promise = None
        self.limits = replace(self.limits, reservations=1)
        self.start_by_parts(few)
        jobs = list(self.waiting.values())
        whole = decide_with(self.pool, jobs, self.limits_now(), pick, cpu_running=self.on_cpu())
        for start in whole.starts:
            # Of one kind all are alike, but for where they failed, and what short ones may borrow.
            job = self.waiting[start.job]
            alike = [other for other in jobs if kind_of(other) == kind_of(job)]
            assert job.limit_s is not None or any(other.avoid for other in alike), f"{job} stayed hidden"

    def start_by_parts(self, few: int) -> None:
        """Decisions on ``few`` of the foremost, and on as many more as each time seems worth while."""
        lookahead = Lookahead()
        while True:
            jobs, unseen = self.seen(lookahead, few)
            decision = decide_with(self.pool, jobs, self.limits_now(), pick, cpu_running=self.on_cpu())
            self.oracle().check(jobs, decision)
            self.carry_out(decision)
            before, lookahead = lookahead, lookahead.after(decision, unseen=unseen)
            if not (decision.starts or decision.refused or lookahead.is_beyond(before)):
                return

    def seen(self, lookahead: Lookahead, few: int) -> tuple[list[WaitingJob], bool]:
        """The jobs that one decision looks at, and whether there are others on GPUs."""
        ordered = sorted(self.waiting.values(), key=lambda job: (-job.priority, job.id))
        on_gpus = [job for job in ordered if job.gpus]
        seen = on_gpus[: few + (64 if lookahead.backfills else 0)]
        if lookahead.by_kind:
            for kind in {kind_of(job) for job in on_gpus}:
                seen += [job for job in on_gpus if kind_of(job) == kind][:2]
        jobs = {job.id: job for job in (*seen, *(job for job in ordered if not job.gpus))}
        return list(jobs.values()), len(on_gpus) > few

    def keep_the_promise(self) -> None:
        """The first large job starts by the time that an earlier decision let it expect, or earlier."""
        if self.promise is not None and self.promise[0] in self.waiting:
            assert self.now < self.promise[1], f"job {self.promise[0]} was to start by {self.promise[1]}"
        first = min(
            (job for job in self.waiting.values() if job.gpus), key=lambda job: (-job.priority, job.id), default=None
        )
        limits, earlier = self.limits_now(), self.promise
        self.promise = None
        if first is None or first.gpus < 2 or limits.closed is not None or limits.max_concurrent is not None:
            return
        oracle = self.oracle()
        sure_at = oracle.sure_at(first)
        if not math.isfinite(sure_at) or oracle.in_use_after(sure_at) + first.gpus > oracle.most():
            return
        if earlier is not None and earlier[0] == first.id:
            assert sure_at <= earlier[1], f"{first} was put off"
        self.promise = (first.id, sure_at)

    def oracle(self) -> Oracle:
        return Oracle(self.places, self.limits_now(), len(self.running), self.on_cpu(), self.ends)

    def limits_now(self) -> Limits:
        return replace(self.limits, running=len(self.running), now=self.now)

    def decision(self) -> Decision:
        return decide_with(self.pool, list(self.waiting.values()), self.limits_now(), pick, cpu_running=self.on_cpu())

    def carry_out(self, decision: Decision) -> None:
        for wait in decision.refused:
            del self.waiting[wait.job]
        for start in decision.starts:
            job = self.running[start.job] = self.waiting.pop(start.job)
            if job.limit_s is not None:
                self.ends[job.id] = self.now + job.limit_s
            for gpu in start.gpus:
                self.places[gpu.uuid].tenants[job.id] = job
                self.tell(gpu.uuid)

    def on_cpu(self) -> int:
        return sum(job.gpus == 0 for job in self.running.values())

    def tell(self, uuid: str) -> None:
        self.pool.update(self.places[uuid].view(self.ends))

    # --- what always holds ------------------------------------------------------------------------------------

    @invariant()
    def the_pool_counts_right(self) -> None:
        views = [place.view(self.ends) for place in self.places.values()]
        assert {view.gpu.uuid: view for view in self.pool.views()} == {view.gpu.uuid: view for view in views}
        assert self.pool.in_use == sum(view.ours for view in views)
        assert self.pool.free == sum(view.is_free for view in views)
        assert self.pool.open_count == sum(view.is_open for view in views)
        assert self.pool.timed == sum(view.over_at is not None for view in views)

    @invariant()
    def shared_sums_fit(self) -> None:
        for place in self.places.values():
            if len(place.tenants) > 1:
                assert all(job.share for job in place.tenants.values())
            if any(job.share for job in place.tenants.values()):
                assert place.used_mb <= place.total_mb

    def teardown(self) -> None:
        """Nobody starves: strangers go, small jobs keep coming, and all that wait now start, in few generations."""
        if not self.places:
            return
        self.limits = replace(self.limits, gpus_now=None, max_concurrent=None, closed=None)
        for place in self.places.values():
            place.stranger = place.draining = False
            self.tell(place.uuid)
        # But not those for which the baseline leaves too little of a small GPU: for one they may wait for ever.
        old = {job.id for job in self.waiting.values() if job.memory_mb != 23_900}
        for _ in range(6 * len(old) + 6):
            generation = list(self.running.values())
            for job in generation:
                if job.id in self.running:
                    self.end(job)
                self.time_passes(4.0)
                self.flood()
                self.start_all()
            self.flood()
            self.start_all()
            old &= self.waiting.keys()
            if not old:
                return
        raise AssertionError(f"starved: {[self.waiting[job] for job in old]}")

    def start_all(self) -> None:
        if self.part is None:
            self.carry_out(self.decision())
        else:
            self.start_by_parts(self.part)

    def flood(self) -> None:
        """Small jobs wait at all times, sharing ones, short ones and others."""
        for kind in (
            WaitingJob(0, 1),
            WaitingJob(0, 1, limit_s=3.0),
            WaitingJob(0, 1, 3_000, share=True),
            WaitingJob(0, 1, 9_000, share=True),
        ):
            alike = [job for job in self.waiting.values() if replace(job, id=0) == kind]
            for _ in range(2 - len(alike)):
                self.add(replace(kind, id=self.next_id))


TestPolicy = World.TestCase
TestPolicy.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.slow
def test_many_worlds() -> None:
    """The same, of more worlds."""
    run_state_machine_as_test(World, settings=settings(TestPolicy.settings, max_examples=1000))


KINDS = st.tuples(
    st.sampled_from([1, 1, 1, 2, 3, 4]),  # GPUs
    st.sampled_from([None, None, 60_000]),  # MB
    st.sampled_from([None, 4.0, 8.0, 16.0, 16.0, 32.0]),  # time limit
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),  # how much of it it takes
    st.sampled_from([0.0, 0.0, 1.0, 3.0]),  # seconds after the one before it
)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.sampled_from([[4], [8], [4, 4], [3, 5], [4, 2, 4]]),
    small=st.integers(0, 2),
    fewer=st.integers(0, 3),
    reservations=st.integers(1, 3),
    kinds=st.lists(KINDS, min_size=6, max_size=24),
)
def test_with_time_limits_no_first_job_is_put_off(
    sizes: list[int],
    small: int,
    fewer: int,
    reservations: int,
    kinds: list[tuple[int, int | None, float | None, float, float]],
) -> None:
    """A whole queue from its first job to its last, most jobs with time limits: the oracle goes through each decision,
    and the promise to the first large job is kept from one to the next."""
    world = World()
    memories = [[SMALL_MB if number < small else LARGE_MB for number in range(size)] for size in sizes]
    world.build(sizes=memories, max_gpus=max(1, sum(sizes) - fewer), cpu_slots=1, reservations=reservations)
    lengths: dict[int, float] = {}
    coming: list[tuple[float, WaitingJob]] = []
    at = 0.0
    for number, (gpus, memory_mb, limit_s, share, gap_s) in enumerate(kinds, 1):
        at += gap_s
        coming.append((at, WaitingJob(number, gpus, memory_mb, limit_s=limit_s)))
        lengths[number] = (limit_s or 10.0) * share
    over: dict[int, float] = {}
    while coming or world.running:
        world.now = min([at for at, _ in coming[:1]] + list(over.values()))
        for done in [job for job, at in over.items() if at <= world.now]:
            del over[done]
            world.end(world.running[done])
        while coming and coming[0][0] <= world.now:
            world.add(coming.pop(0)[1])
        before = set(world.running)
        world.decide()
        world.the_pool_counts_right()
        over |= {job: world.now + lengths[job] for job in world.running.keys() - before}
    assert not world.waiting, "all have started"
