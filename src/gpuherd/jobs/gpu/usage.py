"""Usage of the GPUs on which our jobs run: memory of our attempts, other users' processes, and faults that the driver
reports. Contention: what our jobs do when other users' processes come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path

from gpuherd.engines.process_tree import ATTEMPT_VARIABLE, identify
from gpuherd.gpus.idle import describe
from gpuherd.gpus.state import Gpu, GpuProcess
from gpuherd.jobs.options import YieldTo

# --- faults ----------------------------------------------------------------------------------------------------------

# Errors count from the moment at which our job took the GPU; for one that was taken over from an earlier dispatcher,
# from the first look.


class GpuFaults:
    """Memory errors, critical errors and losses of GPUs since our jobs took them."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int | None, int]] = {}
        self._before: dict[str, tuple[int | None, int]] = {}

    def look(self, gpus: Iterable[Gpu]) -> None:
        """The GPUs as the driver describes them now, with their errors."""
        for gpu in gpus:
            if gpu.problem is None:
                self._last[gpu.uuid] = (gpu.uncorrected_errors, gpu.xids)
                self._before.setdefault(gpu.uuid, self._last[gpu.uuid])

    def taken(self, uuids: Iterable[str]) -> None:
        """Our job takes these GPUs: the errors so far are not its doing."""
        self._before |= {uuid: self._last[uuid] for uuid in uuids if uuid in self._last}

    def problem(self, gpus: Mapping[str, Gpu], uuids: Collection[str]) -> str | None:
        """A sentence about the faults of these GPUs since they were taken, None without any. ``gpus``: as of now."""
        found = [sentence for uuid in uuids if uuid in gpus for sentence in self._sentences(gpus[uuid])]
        self.look(gpus.values())
        return "; ".join(found) or None

    def _sentences(self, gpu: Gpu) -> Iterable[str]:
        errors_before, xids_before = self._before.get(gpu.uuid, (None, 0))
        if gpu.problem is not None:
            yield f"GPU {gpu.label}: {gpu.problem}"
        if gpu.fault is not None and gpu.xids != xids_before:
            yield f"GPU {gpu.label}: {gpu.fault}"
        if gpu.uncorrected_errors is not None and errors_before is not None and gpu.uncorrected_errors > errors_before:
            yield f"GPU {gpu.label}: uncorrectable memory errors: {gpu.uncorrected_errors - errors_before}"


# --- contention: other users on our GPUs (pure) ----------------------------------------------------------------------

# A stranger counts after ``PRESENCE_S``: a program that only queries the driver is gone by then. Then the job is
# reported (``ignore``), paused (``pause``: it keeps its memory and gives up the GPU's time), or put back into the queue
# (``requeue``). A paused job goes on when no stranger has been on any of its GPUs for the quiet time after which a free
# GPU is taken too, so that a stranger between two phases of work doesn't stop and start it again and again.

PRESENCE_S = 2.0
# A stranger that comes back within this time is not reported again.
REMEMBERED_S = 60.0


class ActionKind(Enum):
    """An action on an attempt; each comes with a sentence for people."""

    REPORT = "report"
    PAUSE = "pause"
    RESUME = "resume"
    REQUEUE = "requeue"


@dataclass(frozen=True, slots=True)
class Stranger:
    """Another user's process on a GPU of ours. ``who`` identifies it; ``sentence`` is for people.

    ``pid`` and ``memory_mb`` are None where the driver does not report them.
    """

    gpu: str
    label: str
    who: str
    sentence: str
    pid: int | None = None
    memory_mb: int | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Identifies it from look to look."""
        return self.gpu, self.who


@dataclass(frozen=True, slots=True)
class OurAttempt:
    """A running attempt of ours: its id, the job's title, and its GPUs by UUID."""

    id: int
    job: str
    gpus: frozenset[str]


@dataclass(frozen=True, slots=True)
class Action:
    """An action to carry out on an attempt, and the sentence to report."""

    kind: ActionKind
    attempt: int
    sentence: str


@dataclass(frozen=True, slots=True)
class StrangerSighting:
    """A stranger seen: since when without a break (None: not at the last look), when last, and whether reported."""

    since: float | None
    last: float
    reported: bool = False


# By ``Stranger.key``, the strangers seen so far.
Sightings = Mapping[tuple[str, str], StrangerSighting]


def contention_actions(
    mode: YieldTo,
    seen: Sightings,
    strangers: Sequence[Stranger],
    running: Sequence[OurAttempt],
    paused: AbstractSet[int],
    *,
    now: float,
    quiet_s: float,
) -> tuple[tuple[Action, ...], Sightings]:
    """The actions after a look, and the sightings for the next one.

    Args:
        strangers: other users' processes on our GPUs at this look.
        running: our attempts, the paused ones too; those that are being stopped should be left out.
        paused: ids of the attempts that were paused for a stranger (not those that a person has paused).
        now: the look's time in seconds, of a monotonic clock.
        quiet_s: seconds without a stranger after which a paused job goes on.
    """
    ours = {gpu for attempt in running for gpu in attempt.gpus}
    kept_s = max(quiet_s, REMEMBERED_S)
    kept = {key: each for key, each in seen.items() if key[0] in ours and now - each.last < kept_s}
    sightings = {key: replace(each, since=None) for key, each in kept.items()}
    settled: list[Stranger] = []
    for stranger in strangers:
        before = seen.get(stranger.key, StrangerSighting(None, now))
        since = now if before.since is None else before.since
        settled += [stranger] if now - since >= PRESENCE_S else []
        sightings[stranger.key] = StrangerSighting(since, now, before.reported or stranger in settled)
    actions: list[Action] = []
    for attempt in running:
        here = [stranger for stranger in settled if stranger.gpu in attempt.gpus]
        if attempt.id in paused and mode == "ignore":
            actions.append(
                Action(ActionKind.RESUME, attempt.id, f"{attempt.job} goes on: it need not give way any more")
            )
        elif here:
            actions += _on_strangers(mode, attempt, here, seen, paused)
        elif attempt.id in paused and _quiet(attempt, sightings, now, quiet_s):
            actions.append(Action(ActionKind.RESUME, attempt.id, f"{attempt.job} goes on: nobody else uses its GPUs"))
    return tuple(actions), sightings


def _on_strangers(
    mode: YieldTo,
    attempt: OurAttempt,
    here: Sequence[Stranger],
    seen: Sightings,
    paused: AbstractSet[int],
) -> list[Action]:
    """The action on an attempt on whose GPUs there are strangers, if any."""
    if mode == "requeue":
        return [Action(ActionKind.REQUEUE, attempt.id, f"{attempt.job} goes back into the queue: {_who(here)}")]
    if mode == "pause":
        sentence = f"{attempt.job} is paused: {_who(here)}"
        return [] if attempt.id in paused else [Action(ActionKind.PAUSE, attempt.id, sentence)]
    fresh = [stranger for stranger in here if stranger.key not in seen or not seen[stranger.key].reported]
    return [Action(ActionKind.REPORT, attempt.id, f"{_who(fresh)}, where {attempt.job} runs")] if fresh else []


def _quiet(attempt: OurAttempt, seen: Sightings, now: float, quiet_s: float) -> bool:
    return all(now - each.last >= quiet_s for (gpu, _), each in seen.items() if gpu in attempt.gpus)


def _who(strangers: Sequence[Stranger]) -> str:
    return "; ".join(f"{stranger.sentence} on GPU {stranger.label}" for stranger in strangers)


# --- usage: our attempts and strangers -------------------------------------------------------------------------------

# A process is ours when it, or an ancestor, has an attempt's tag in its environment. Where the driver shows no pids, or
# those of another container's numbering, only memory reveals a stranger: more is in use than before our jobs came plus
# what they declare.

# The kernel's number for the machine's own numbering of processes (PROC_PID_INIT_INO); a container has another.
_MACHINE_PIDS = "pid:[4026531836]"
_LONGEST_DESCENT = 64

NOTHING: Mapping[str, int] = {}


class GpuUsage:
    """Separates our processes from strangers, look by look, and records each attempt's peak memory.

    Args:
        slack_mb: unexplained memory that does not yet count as a stranger: the threshold under which a GPU is free.
    """

    def __init__(self, slack_mb: int) -> None:
        self._slack_mb = slack_mb
        self._baseline: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self._now: dict[str, int] = {}
        self._pids_are_true = _numbering() == _MACHINE_PIDS

    def change(self, slack_mb: int) -> None:
        """Sets the threshold from now on."""
        self._slack_mb = slack_mb

    @property
    def peaks(self) -> Mapping[str, int]:
        """By attempt's tag, the most memory in MB that it was seen to use on any one GPU; without those unseen."""
        return self._peaks

    @property
    def in_use(self) -> Mapping[str, int]:
        """By attempt's tag, MB in use at the last look, on the one of its GPUs where it used the most."""
        return self._now

    def idle_mb(self, uuid: str) -> int | None:
        """Memory in use on this GPU before our jobs came, in MB; None where that is not known."""
        return self._baseline.get(uuid)

    def taken(self, gpus: Iterable[Gpu]) -> None:
        """Our job is about to start on these GPUs, which are free: memory that is in use now belongs to no job."""
        for gpu in gpus:
            self._baseline[gpu.uuid] = gpu.used_mb

    def look(
        self,
        gpus: Mapping[str, Gpu],
        own: Mapping[str, Collection[str]],
        declared_mb: Mapping[str, int] = NOTHING,
    ) -> tuple[Stranger, ...]:
        """Notes memory and returns the strangers on our GPUs.

        Args:
            gpus: the GPUs by UUID as the driver has just described them.
            own: for each GPU on which our jobs run, the tags of their attempts.
            declared_mb: how much memory our jobs on a GPU may use together, where that is known.
        """
        tags = {tag for here in own.values() for tag in here}
        self._peaks = {tag: peak for tag, peak in self._peaks.items() if tag in tags}
        self._now = {}
        found: list[Stranger] = []
        for uuid, here in own.items():
            gpu = gpus.get(uuid)
            if gpu is None or gpu.problem is not None:
                continue
            tags_of = {process.pid: attempts_of(process.pid) for process in gpu.processes}
            attempts = {pid: next((tag for tag in tags if tag in here), None) for pid, tags in tags_of.items()}
            self._note_memory(gpu, here, attempts)
            if self._pids_are_true and gpu.processes:
                others = [process for process in gpu.processes if process.compute and attempts[process.pid] is None]
                found += [_stranger(gpu, process) for process in others]
            else:
                found += self._by_memory(gpu, declared_mb.get(uuid))
        self._baseline = {uuid: used for uuid, used in self._baseline.items() if uuid in own}
        return tuple(found)

    def _note_memory(self, gpu: Gpu, here: Collection[str], attempts: Mapping[int, str | None]) -> None:
        used: dict[str, int] = {}
        unknown = False
        for process in gpu.processes:
            tag = attempts[process.pid]
            if tag is not None:
                self._pids_are_true = True
                unknown = unknown or process.memory_mb is None
                used[tag] = used.get(tag, 0) + (process.memory_mb or 0)
        if len(here) == 1 and (unknown or not used) and not (self._pids_are_true and gpu.processes and not used):
            # The driver does not report how much each process uses; all memory since the start is the only job's.
            used = {tag: max(0, gpu.used_mb - self._baseline.get(gpu.uuid, 0)) for tag in here}
        for tag, mb in used.items():
            self._now[tag] = max(mb, self._now.get(tag, 0))
            if mb > self._peaks.get(tag, 0):
                self._peaks[tag] = mb

    def _by_memory(self, gpu: Gpu, declared_mb: int | None) -> list[Stranger]:
        if declared_mb is None:
            return []  # our own jobs may use all of it
        more = gpu.used_mb - self._baseline.get(gpu.uuid, 0) - declared_mb
        if more < max(1, self._slack_mb):
            return []
        sentence = f"someone, or our own job, uses {more} MB more than our jobs declare"
        return [Stranger(gpu.uuid, gpu.label, "memory", sentence, memory_mb=more)]


def _stranger(gpu: Gpu, process: GpuProcess) -> Stranger:
    return Stranger(gpu.uuid, gpu.label, str(process.pid), describe(process), process.pid, process.memory_mb)


def _numbering() -> str | None:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def _tag_in_environment(pid: int) -> tuple[str, ...]:
    wanted = f"{ATTEMPT_VARIABLE}=".encode()
    with suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(wanted):
                return (variable[len(wanted) :].decode("utf-8", "replace"),)
    return ()


def attempts_of(pid: int) -> tuple[str, ...]:
    """The tags of the attempts that started this process or an ancestor: two where a job is itself a gpuherd."""
    process = identify(pid) if pid > 1 else None
    return () if process is None else _tags(pid, process.start_ticks)


@lru_cache(maxsize=1024)
def _tags(pid: int, start_ticks: int) -> tuple[str, ...]:
    """Kept for each process, which its start time tells from another of the same pid: an ancestor may end before it."""
    del start_ticks
    found: list[str] = []
    for _ in range(_LONGEST_DESCENT):
        if pid <= 1:
            break
        found += _tag_in_environment(pid)
        pid = _parent(pid)
    return tuple(dict.fromkeys(found))


def _parent(pid: int) -> int:
    """The pid of the parent; 0 when there is none, or none to be seen."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return 0
