"""Which GPUs are held without being used? The whole rule, on one page. (Whether a GPU is free is in ``idle``.)

A look finds a GPU idle when
1. its memory is held: ``threshold_mb`` or more is in use, by whatever process, unless all that the driver lists are
   display servers;
2. the driver reports a utilisation of 0 %. Where it reports none (MIG instances) that is unknown, and the GPU is not
   idle.

It is idle since the first of the looks in a row that found it so. A row begins anew when a further process has come (it
may load its data), and after a gap of ``HOLE_S`` without looks. Utilisation is that of the last second or less, by the
driver: of a program that computes for a moment now and then some looks see nothing, and one that does see it ends the
row. Processes that wait for the GPU with work on the CPU are idle too; ``cores`` says how much they do there.

Others may know more: ``known`` has for how long the ledger has found a GPU idle. It counts unless our own looks have
seen the GPU at work since.

Pure: the caller passes the GPUs and the time of the look, in seconds of a monotonic clock.

>>> from gpuherd.gpus.state import Gpu, GpuProcess
>>> holder = GpuProcess(pid=4711, user="alice", command="python", memory_mb=30 * 1024)
>>> gpu = Gpu(index=0, uuid="GPU-a", name="A100", used_mb=30 * 1024, utilisation_percent=0, processes=(holder,))
>>> looks = observe(observe({}, [gpu], 500, now=0.0), [gpu], 500, now=40.0)
>>> idle_gpus(looks, [gpu], after_s=30.0, now=40.0)["GPU-a"].sentence
'idle for 40 s: alice holds 30 GB (pid 4711, python)'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gpuherd.errors import clean
from gpuherd.gpus.state import Gpu, GpuProcess
from gpuherd.units import duration

# After so long the GPU counts as idle, unless the settings say otherwise ([idle] after).
IDLE_AFTER_S = 1800.0
# After a longer time than this between two looks, the time in between is unknown.
HOLE_S = 60.0
# From so many cores on the work on the CPU is worth a word.
_BUSY_CORES = 0.5
_NOTHING: Mapping[int, float] = MappingProxyType({})
_NOTHING_KNOWN: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class IdleRow:
    """Looks in a row that found a GPU idle: the times of the first and the last one, and the processes there.

    Attributes:
        seen_before: an earlier look of ours found the GPU otherwise, so that it can't have been idle for longer.
        cpu_s: by pid, CPU seconds used so far, at the last look.
        cores: cores that the processes kept busy between the last two looks; None where that is not known.
    """

    since: float
    last: float
    pids: frozenset[int]
    seen_before: bool
    cpu_s: Mapping[int, float] = field(default_factory=dict)
    cores: float | None = None


@dataclass(frozen=True, slots=True)
class BusyLook:
    """The last look at a GPU that is not idle, and when."""

    last: float


# By GPU's UUID, what the looks so far have found.
Looks = Mapping[str, IdleRow | BusyLook]


@dataclass(frozen=True, slots=True)
class IdleGpu:
    """A GPU that is held without being used, for ``idle_s`` seconds.

    Attributes:
        used_mb: memory in use there, in MB.
        holders: the processes with memory there, those with the most first; () where the driver lists none.
        cores: CPU cores that they keep busy meanwhile; None where that is not known.
    """

    uuid: str
    idle_s: float
    used_mb: int
    holders: tuple[GpuProcess, ...]
    cores: float | None = None

    @property
    def sentence(self) -> str:
        """``idle for 42 min: alice holds 30 GB (pid 4711, python)``, safe for a terminal."""
        held = "; ".join(_holds(process) for process in self.holders) or f"someone holds {gigabytes(self.used_mb)}"
        return f"idle for {duration(self.idle_s, parts=1)}: {held}{self.on_cpu}"

    @property
    def on_cpu(self) -> str:
        """The end of a sentence about processes that work on the CPU meanwhile; "" where they do little or nothing."""
        if self.cores is None or self.cores < _BUSY_CORES:
            return ""
        return f", and uses {self.cores:.1f} CPU cores meanwhile"


def is_idle(gpu: Gpu, threshold_mb: int) -> bool:
    """Whether this look finds the GPU's memory held and the GPU not used."""
    if gpu.problem is not None or gpu.mig_instances or gpu.utilisation_percent is None:
        return False
    only_displays = bool(gpu.processes) and not any(process.compute for process in gpu.processes)
    return gpu.used_mb >= max(1, threshold_mb) and gpu.utilisation_percent == 0 and not only_displays


def observe(
    looks: Looks, gpus: Iterable[Gpu], threshold_mb: int, *, now: float, cpu_s: Mapping[int, float] = _NOTHING
) -> dict[str, IdleRow | BusyLook]:
    """The looks with this one. GPUs that are not among ``gpus`` are forgotten.

    Args:
        cpu_s: by pid, the CPU seconds that processes have used so far; those that are not known are missing.
    """
    found: dict[str, IdleRow | BusyLook] = {}
    for gpu in gpus:
        before = looks.get(gpu.uuid)
        if before is not None and now - before.last > HOLE_S:
            before = None
        if not is_idle(gpu, threshold_mb):
            found[gpu.uuid] = BusyLook(now)
            continue
        pids = frozenset(process.pid for process in gpu.processes)
        used = {pid: cpu_s[pid] for pid in pids if pid in cpu_s}
        if isinstance(before, IdleRow) and pids <= before.pids:
            cores = _cores(before, used, now)
            found[gpu.uuid] = IdleRow(before.since, now, pids, before.seen_before, used, cores)
        else:
            found[gpu.uuid] = IdleRow(now, now, pids, before is not None, used)
    return found


def idle_gpus(
    looks: Looks,
    gpus: Iterable[Gpu],
    *,
    after_s: float,
    now: float,
    known: Mapping[str, float] = _NOTHING_KNOWN,
) -> dict[str, IdleGpu]:
    """The GPUs that have been idle for ``after_s`` seconds or longer, by UUID, as of the last look at them.

    Args:
        known: by UUID, for how many seconds others (the ledger) have found GPUs idle.
    """
    found: dict[str, IdleGpu] = {}
    for gpu in gpus:
        row = looks.get(gpu.uuid)
        if not isinstance(row, IdleRow) or now - row.last > HOLE_S:
            continue
        idle_s = row.last - row.since
        if not row.seen_before:
            idle_s = max(idle_s, known.get(gpu.uuid, 0.0))
        if idle_s >= after_s:
            holders = sorted(gpu.processes, key=lambda process: -(process.memory_mb or 0))
            found[gpu.uuid] = IdleGpu(gpu.uuid, idle_s, gpu.used_mb, tuple(holders), row.cores)
    return found


def gigabytes(mb: int) -> str:
    """Memory for people.

    >>> gigabytes(900), gigabytes(1536), gigabytes(40_960)
    ('900 MB', '1.5 GB', '40 GB')
    """
    if mb < 1024:
        return f"{mb} MB"
    return f"{mb / 1024:.1f}".removesuffix(".0") + " GB"


def _holds(process: GpuProcess) -> str:
    memory = "memory" if process.memory_mb is None else gigabytes(process.memory_mb)
    who, command = clean(process.user or "someone"), clean(process.command or "a process")
    return f"{who} holds {memory} (pid {process.pid}, {command})"


def _cores(before: IdleRow, used: Mapping[int, float], now: float) -> float | None:
    """CPU cores that the processes kept busy since the look before."""
    both = used.keys() & before.cpu_s.keys()
    if not both or now <= before.last:
        return before.cores
    return max(0.0, sum(used[pid] - before.cpu_s[pid] for pid in both) / (now - before.last))
