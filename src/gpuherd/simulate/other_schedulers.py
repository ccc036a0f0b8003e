"""Runs by other schedulers than ours, in virtual time, to compare with: a cluster's own, and the guides' loop."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.completion import Observed
from gpuherd.jobs.records import QueuedJob
from gpuherd.jobs.remote.submit import stepped
from gpuherd.jobs.scheduler.ordering import SEARCHED
from gpuherd.jobs.scheduler.types import Limits
from gpuherd.simulate.options import GUIDES_INTERVAL_S, GUIDES_READ_S, GUIDES_SLEEP_S, Rules
from gpuherd.simulate.results import Ending, FinishedAttempt, History, Visit
from gpuherd.simulate.state import JobQueue, VirtualRun
from gpuherd.simulate.workload import ExternalUsers, Machine, Session, Work

# Jobs handed to a cluster's own scheduler: what the hand-over costs. Our policy does not decide here what runs where;
# ``ClusterScheduler``, a simple model of SLURM or Ray, does. Our part is that of ``jobs/remote``: at most ``at_most``
# jobs are in the cluster's hands, handed over as arrays; ends are seen at the next poll, and then other jobs are handed
# over. The cost is GPU time that no job uses.

# SLURM's default for the size of an array.
_LARGEST_ARRAY = 1000


class Nodes:
    """The GPUs of a cluster as its own scheduler sees them. It knows no jobs and no time.

    Nodes are found by the number of their free GPUs, so that a job costs the same on ten nodes and on ten thousand. A
    node's GPUs count as its smallest.

    Attributes:
        free: the numbers of each node's free GPUs, counted over the whole cluster.
        sizes: how many GPUs each node has.
        memory_mb: MB of each of them.
    """

    def __init__(self, machines: Sequence[Machine]):
        self.free: list[list[int]] = []
        self.sizes = [len(gpus) for gpus in machines]
        self.memory_mb = [min(gpu.total_mb for gpu in gpus) for gpus in machines]
        first = 0
        for size in self.sizes:
            # The lowest number is given first.
            self.free.append(list(range(first + size - 1, first - 1, -1)))
            first += size
        self._reserved: set[int] = set()
        # By memory and number of free GPUs: the nodes, in the order in which they came to have as many free.
        self._by_free: dict[int, list[dict[int, None]]] = {
            mb: [{} for _ in range(max(self.sizes) + 1)] for mb in sorted(set(self.memory_mb))
        }
        for node in range(len(self.sizes)):
            self._add(node)

    def could_hold(self, nodes: int, gpus: int, memory_mb: int | None) -> bool:
        """Whether as many nodes have as many GPUs with as much memory, were they empty."""
        fits = zip(self.sizes, self.memory_mb, strict=True)
        return sum(size >= gpus and mb >= (memory_mb or 0) for size, mb in fits) >= nodes

    def find(self, nodes: int, gpus: int, memory_mb: int | None) -> tuple[int, ...] | None:
        """As many nodes with as many free GPUs, those with the fewest first, without reserved ones; None when there are
        too few."""
        found = tuple(islice(self._with_free(gpus, memory_mb), nodes))
        return found if len(found) == nodes else None

    def emptiest(self, nodes: int, gpus: int, memory_mb: int | None) -> tuple[int, ...]:
        """As many nodes that are large enough, those with the most free GPUs first, without reserved ones."""
        found: list[int] = []
        for free in range(max(self.sizes), -1, -1):
            for mb, by_free in self._by_free.items():
                if mb >= (memory_mb or 0):
                    found += islice((node for node in by_free[free] if self.sizes[node] >= gpus), nodes - len(found))
        return tuple(found)

    def reserve(self, nodes: Collection[int]) -> None:
        """``find`` skips these nodes from now on."""
        for node in nodes:
            self._remove(node)
            self._reserved.add(node)

    def unreserve(self, nodes: Collection[int]) -> None:
        """``find`` sees these nodes again."""
        for node in nodes:
            self._reserved.discard(node)
            self._add(node)

    def take(self, nodes: Collection[int], gpus: int) -> tuple[int, ...]:
        """Allocates as many GPUs of each of these nodes; their numbers."""
        taken: list[int] = []
        for node in nodes:
            self._remove(node)
            taken += [self.free[node].pop() for _ in range(gpus)]
            self._add(node)
        return tuple(taken)

    def give_back(self, nodes: Collection[int], gpus: Sequence[int]) -> None:
        """Frees these GPUs, in the order in which ``take`` returned them."""
        each = len(gpus) // max(1, len(nodes))
        for place, node in enumerate(nodes):
            self._remove(node)
            self.free[node] += gpus[place * each : (place + 1) * each]
            self._add(node)

    def _with_free(self, gpus: int, memory_mb: int | None) -> Iterator[int]:
        for mb, by_free in self._by_free.items():
            if mb >= (memory_mb or 0):
                for nodes in by_free[gpus:]:
                    yield from nodes

    def _add(self, node: int) -> None:
        if node not in self._reserved:
            self._by_free[self.memory_mb[node]][len(self.free[node])][node] = None

    def _remove(self, node: int) -> None:
        self._by_free[self.memory_mb[node]][len(self.free[node])].pop(node, None)


@dataclass(frozen=True, slots=True, eq=False)
class ClusterJob:
    """A job in the cluster's queue.

    Attributes:
        array: number of the array in which it was submitted.
        limit_s: its time limit, None without one.
    """

    queued: QueuedJob
    array: int
    limit_s: float | None

    @property
    def request(self) -> tuple[int, int, int | None]:
        """Nodes, GPUs on each, MB on each of those."""
        return (self.queued.job.nodes, self.queued.gpus, self.queued.memory_mb)


@dataclass(frozen=True, slots=True, eq=False)
class RunningJob:
    """A job on its nodes. ``gpus``: by number over the whole cluster; ``over_at``: when its time limit ends it."""

    job: ClusterJob
    nodes: tuple[int, ...]
    gpus: tuple[int, ...]
    over_at: float


# Jobs with the same request and array: when one can't start, the next can't either.
_Kind = tuple[int, int, int | None, int]


class ClusterScheduler:
    """The queue of one cluster: first come, first served, with one reservation and backfilling.

    SLURM and others do this in their plain form. Jobs start in the order in which they came. For the first that can't
    start its nodes are reserved; later jobs start on the others, and on reserved ones if their time limits end them
    before all of these are surely free (EASY, Lifka 1995). docs/what-if.md lists what the model leaves out.

    Args:
        nodes: its GPUs.
        array_limit: how many jobs of one array may run at once, None for any number.
    """

    def __init__(self, nodes: Nodes, array_limit: int | None = None):
        self._nodes = nodes
        self._array_limit = array_limit
        self._waiting: dict[_Kind, deque[tuple[int, ClusterJob]]] = {}
        self._submitted = 0
        self._of_array: dict[int, int] = defaultdict(int)
        self._on_node: dict[int, dict[RunningJob, None]] = defaultdict(dict)
        self._timed = False
        # The job for which nodes are reserved, and when they are surely free (infinity when that is not known).
        self._first: ClusterJob | None = None
        self._reserved: tuple[int, ...] = ()
        self._free_at = math.inf

    def __bool__(self) -> bool:
        """Whether any job waits."""
        return bool(self._waiting)

    def submit(self, jobs: Sequence[ClusterJob]) -> None:
        """Appends jobs to the queue, in this order."""
        for job in jobs:
            array = job.array if self._array_limit is not None else 0
            self._waiting.setdefault((*job.request, array), deque()).append((self._submitted, job))
            self._submitted += 1
            self._timed = self._timed or job.limit_s is not None

    def end(self, running: RunningJob) -> None:
        """A job has ended: frees its GPUs."""
        self._nodes.give_back(running.nodes, running.gpus)
        self._of_array[running.job.array] -= 1
        if self._timed:
            for node in running.nodes:
                del self._on_node[node][running]

    def schedule(self, now: float, most: float, started: Callable[[RunningJob], None]) -> bool:
        """One pass over the queue, which starts at most as many jobs and calls ``started`` for each. Returns whether it
        stopped at that number, so that more could start."""
        heads = [(jobs[0][0], kind) for kind, jobs in self._waiting.items()]
        heapq.heapify(heads)
        while heads:
            if most < 1:
                return True
            _, kind = heapq.heappop(heads)
            jobs = self._waiting[kind]
            if self._array_limit is not None and self._of_array[jobs[0][1].array] >= self._array_limit:
                continue  # All jobs of the kind are of this array.
            found = self._place(jobs[0][1])
            place = 0
            if found is None and self._timed and self._first is not None:
                place, found = self._backfill(jobs, now)
            if found is None:
                self._reserve(jobs[0][1], now)
                continue
            job = jobs[place][1]
            del jobs[place]
            if jobs:
                heapq.heappush(heads, (jobs[0][0], kind))
            else:
                del self._waiting[kind]
            most -= 1
            started(self._start(job, found, now))
        return False

    def _start(self, job: ClusterJob, nodes: tuple[int, ...], now: float) -> RunningJob:
        if job is self._first:
            self._nodes.unreserve(self._reserved)
            self._first, self._reserved = None, ()
        gpus = self._nodes.take(nodes, job.queued.gpus)
        running = RunningJob(job, nodes, gpus, math.inf if job.limit_s is None else now + job.limit_s)
        self._of_array[job.array] += 1
        if self._timed:
            for node in nodes:
                self._on_node[node][running] = None
        return running

    def _place(self, job: ClusterJob) -> tuple[int, ...] | None:
        """Nodes on which the job can start now."""
        nodes, gpus, memory_mb = job.request
        if job is self._first and all(len(self._nodes.free[node]) >= gpus for node in self._reserved):
            return self._reserved
        return self._nodes.find(nodes, gpus, memory_mb)

    def _backfill(self, jobs: deque[tuple[int, ClusterJob]], now: float) -> tuple[int, tuple[int, ...] | None]:
        """The first of these jobs that is surely over before the reserved nodes are needed: its place, and reserved
        nodes for it."""
        for place, (_, job) in enumerate(islice(jobs, SEARCHED)):
            if job.limit_s is None or now + job.limit_s > self._free_at or job is self._first:
                continue
            nodes, gpus, memory_mb = job.request
            free = [
                node
                for node in self._reserved
                if len(self._nodes.free[node]) >= gpus and self._nodes.memory_mb[node] >= (memory_mb or 0)
            ]
            if len(free) >= nodes:
                return place, tuple(free[:nodes])
        return 0, None

    def _reserve(self, job: ClusterJob, now: float) -> None:
        """Reserves nodes for the first job that lacks GPUs, until it has started."""
        if self._first is not None:
            return
        nodes, gpus, memory_mb = job.request
        self._first, self._reserved = job, self._nodes.emptiest(nodes, gpus, memory_mb)
        self._nodes.reserve(self._reserved)
        self._free_at = max((self._surely_free_at(node, gpus, now) for node in self._reserved), default=now)

    def _surely_free_at(self, node: int, gpus: int, now: float) -> float:
        """When as many GPUs of a node are surely free, by the time limits of the jobs that run there."""
        lacks = gpus - len(self._nodes.free[node])
        if lacks <= 0:
            return now
        for running in sorted(self._on_node[node], key=lambda each: each.over_at):
            lacks -= running.job.queued.gpus
            if lacks <= 0:
                return running.over_at
        return math.inf


class Handover(VirtualRun):
    """One run of the works on the nodes of a cluster.

    Args:
        machines: the GPUs of each node.
        works: the jobs, in the order of their arrival.
        rules: ``at_most``, ``array_limit``, ``look``, ``engine_cycle``, ``engine_rate``, ``start_up``, ``order`` and
            ``timeout`` are read.
    """

    def __init__(self, machines: Sequence[Machine], works: Sequence[Work], rules: Rules):
        limits = Limits(rules.at_most, 1, longest_first=rules.order == "longest")
        super().__init__(machines, works, JobQueue(works, limits, share=False, timeout_s=rules.timeout))
        self._rules = rules
        self._nodes = Nodes(machines)
        self._scheduler = ClusterScheduler(self._nodes, rules.array_limit)
        # Jobs in the cluster's hands as far as we know, and those of them that have ended since the last poll.
        self._open = 0
        self._ended: list[tuple[RunningJob, FailureClass | None]] = []
        self._arrays = 0
        self._poll_at: float | None = None
        self._pass_at: float | None = None
        self._passed_at = -math.inf
        # Starts that the cluster's rate still allows, and when that was last computed.
        self._credit, self._credited_at = 0.0, 0.0
        self._could_run: dict[tuple[int, int, int | None], bool] = {}

    def _arrive(self, numbers: Sequence[int]) -> None:
        super()._arrive(numbers)
        self._poll_soon()

    # --- our part -----------------------------------------------------------------------------------------------

    def _poll_soon(self) -> None:
        """Plans the next poll; there is one every ``look`` seconds."""
        if self._poll_at is None:
            every = self._rules.look
            self._poll_at = max(self._now, math.ceil(self._now / every) * every)
            self._events.at(self._poll_at, self._poll)

    def _poll(self) -> None:
        self._poll_at = None
        ended, self._ended = self._ended, []
        self._open -= len(ended)
        for running, failure in ended:
            queued = running.job.queued
            if failure is None:
                self._jobs.succeed(queued.id, self._now)
                continue
            again = self._jobs.fail(queued, failure, Observed(), self._now)
            if again is not None:
                self._events.at(again.ready_at, self._put_back, again)
        self._hand_over()

    def _put_back(self, queued: QueuedJob) -> None:
        self._jobs.put_back(queued)
        self._poll_soon()

    def _hand_over(self) -> None:
        """Hands over as many jobs as ``at_most`` allows: those with the same request and time limit as arrays, in the
        order of their first jobs."""
        places = self._rules.at_most - self._open
        arrays: dict[int, list[ClusterJob]] = {}
        latest: dict[tuple[object, ...], int] = {}
        for waiting in (self._jobs.on_gpus, self._jobs.on_cpu):
            for job in waiting.head(places):
                queued = self._jobs.start(job.id)
                request = (queued.job.nodes, queued.gpus, queued.memory_mb)
                if not self._could_ever_run(request):
                    nodes, gpus, memory_mb = request
                    each = f"{gpus} GPUs" if memory_mb is None else f"{gpus} GPUs of {memory_mb} MB"
                    where = "a node" if nodes == 1 else f"each of {nodes} nodes"
                    self._refuse(queued, f"asks for {each} on {where}; the cluster has none such")
                    self._poll_soon()
                    continue
                places -= 1
                kind = (*request, None if job.limit_s is None else stepped(job.limit_s))
                if kind not in latest or len(arrays[latest[kind]]) == _LARGEST_ARRAY:
                    self._arrays += 1
                    latest[kind] = self._arrays
                    arrays[self._arrays] = []
                arrays[latest[kind]].append(ClusterJob(queued, latest[kind], job.limit_s))
        for jobs in arrays.values():
            self._open += len(jobs)
            self._scheduler.submit(jobs)
        if arrays:
            self._pass_soon()

    def _could_ever_run(self, request: tuple[int, int, int | None]) -> bool:
        if request not in self._could_run:
            self._could_run[request] = self._nodes.could_hold(*request)
        return self._could_run[request]

    # --- the cluster's part -------------------------------------------------------------------------------------

    def _pass_soon(self) -> None:
        """Plans the next pass of the cluster's scheduler, at most one every ``engine_cycle``."""
        if self._pass_at is None:
            self._pass_at = max(self._now, self._passed_at + self._rules.engine_cycle)
            self._events.at(self._pass_at, self._pass)

    def _pass(self) -> None:
        self._pass_at, self._passed_at = None, self._now
        self._decisions += 1
        rate = self._rules.engine_rate
        most = math.inf if rate is None else self._allowed(rate)
        if self._scheduler.schedule(self._now, most, self._start):
            self._pass_soon()

    def _allowed(self, rate: float) -> float:
        """How many jobs may start now, at this rate in a second; at most a cycle's worth of starts is saved up."""
        cycle = max(self._rules.engine_cycle, 1 / rate)
        self._credit = min(self._credit + rate * (self._now - self._credited_at), rate * cycle)
        self._credited_at = self._now
        return self._credit

    def _start(self, running: RunningJob) -> None:
        trial = self._jobs.trial(running.job.queued)
        self._credit -= 1
        start = self._now + self._rules.start_up
        self._events.at(start + trial.seconds, self._end, running, start, trial.failure)

    def _end(self, running: RunningJob, start: float, failure: FailureClass | None) -> None:
        queued = running.job.queued
        self._scheduler.end(running)
        self._record(queued, running.gpus, start, Ending.DONE if failure is None else Ending.FAILED, failure)
        self._ended.append((running, failure))
        self._poll_soon()
        if self._scheduler:
            self._pass_soon()


# The scheduler of the guides, literally and in virtual time, to compare with. It is the loop that the guides' public
# tracker runs: it polls every 10 s, a GPU counts as free after 10 polls in a row that found it so, the count begins
# anew for each start, and one start is made at a time: 10 polls (90 s), 0.5 s to read the GPUs, the start, then 5 s of
# sleep, 95.5 s in all even when every GPU is free. Jobs go in the order of the list; there are no priorities, no
# retries and no sharing. On several machines each runs its own loop on its part of the list, dealt out in turn.


_GUIDES_CHECKS = 10
_PROGRESS_EVERY_JOBS = 256


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
    for number, machine in enumerate(machines):
        sessions = (iter(()) if background is None else background.sessions(seed, gpu.uuid) for gpu in machine)
        gpus = [_PolledGpu(first + place, each) for place, each in enumerate(sessions)]
        now = 0.0
        for job in range(number, len(works), len(machines)):
            if works[job].job.gpus > len(gpus):
                refused[job] = f"asks for {works[job].job.gpus} GPUs; there are {len(gpus)} to use"
            else:
                attempts.append(_run_when_free(gpus, job, works[job], now))
                now = attempts[-1].start + GUIDES_SLEEP_S
            ended += 1
            if progress is not None and ended % _PROGRESS_EVERY_JOBS == 0:
                progress(ended, len(works))
        visits += (visit for gpu in gpus for visit in gpu.visits)
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


def _run_when_free(gpus: Sequence[_PolledGpu], job: int, work: Work, now: float) -> FinishedAttempt:
    """Polls the GPUs of a machine from this second on until the job has enough, and starts it."""
    now, requested = max(now, work.arrives_s), max(1, work.job.gpus)
    counts = dict.fromkeys(gpus, 0)
    while True:
        for gpu in gpus:
            counts[gpu] = counts[gpu] + 1 if gpu.is_free(now) else 0
        chosen = [gpu for gpu in gpus if counts[gpu] >= _GUIDES_CHECKS][:requested]
        if len(chosen) == requested:
            break
        now += GUIDES_INTERVAL_S
    start, trial = now + GUIDES_READ_S, work.trials[0]
    for gpu in chosen:
        gpu.ours_until = start + trial.seconds
    return FinishedAttempt(
        job=job,
        gpus=tuple(gpu.number for gpu in chosen),
        start=start,
        end=start + trial.seconds,
        wait_s=start - work.arrives_s,
        ending=Ending.DONE if trial.failure is None else Ending.FAILED,
        failure=trial.failure,
    )


class _PolledGpu:
    """One GPU: used by a job of ours until ``ours_until``, and by external users in ``visits``. Time only goes on."""

    def __init__(self, number: int, sessions: Iterator[Session]):
        self.number = number
        self._sessions = sessions
        self._next = next(sessions, None)
        self._external_until = 0.0
        self.ours_until = 0.0
        self.visits: list[Visit] = []

    def is_free(self, now: float) -> bool:
        """Whether a poll at this second finds it free."""
        while self._next is not None and self._next.start <= now:
            if self._next.start >= self.ours_until or self._next.barges:
                self.visits.append(Visit(self.number, self._next.start, self._next.end))
                self._external_until = max(self._external_until, self._next.end)
            self._next = next(self._sessions, None)
        return now >= self.ours_until and now >= self._external_until
