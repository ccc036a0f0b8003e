"""``Sampler``: processes on the machine's GPUs that no gpuherd records itself: strangers, notebooks, forgotten servers.

Of one user's recorders only one samples at a time: the one that has the user's lock. None does while root's samples,
which all believe. A process is known by its pid and start time; its user is whom the kernel names. Where the driver's
pids are not ours (in a container) nothing is sampled.

What the user of a process records themself is left out here: those of whom an open record is there for that GPU.
"""

from __future__ import annotations

import os
import select
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpuherd.engines.process_tree import boot_id, identify
from gpuherd.gpus.lease_files import is_locked, lock, user_name
from gpuherd.gpus.state import SIMULATED, Gpu, Machine
from gpuherd.ledger.files import open_files_in
from gpuherd.ledger.metering import Look, Meter, begun, part_of
from gpuherd.ledger.reader import records_of
from gpuherd.ledger.recorder import Recorder
from gpuherd.ledger.records import Kind, Use

EVERY_S = 10.0
# A gpuherd records its job a moment after it has the lease. Until then the job's process looks like a stranger's.
_DOUBT_S = 15.0
# Open files that are older than this are of a recorder that hangs, or of another machine.
_FRESH_S = 60.0
# Each costs a descriptor; ends of further processes are noticed at the next sample.
_MOST_WATCHED = 256
# The kernel's number for the machine's own numbering of processes (PROC_PID_INIT_INO); a container has another.
_MACHINE_PIDS = "pid:[4026531836]"


@dataclass(frozen=True, slots=True)
class Sight:
    """A process that computes on a GPU, as one look shows it. ``began``: its start, in seconds since boot."""

    gpu: Gpu
    pid: int
    start_ticks: int
    began: float
    uid: int
    command: str | None
    memory_mb: int | None

    @property
    def key(self) -> str:
        """The same for every recorder that sees the process on this GPU: the beginning of its uses' ids."""
        return f"process/{boot_id()[:8]}/{self.pid}-{self.start_ticks}/{self.gpu.uuid}"


def _key(use: Use) -> str:
    """``Sight.key`` of the process that this was."""
    return use.id.rpartition("/")[0]


def uid_of(pid: int) -> int | None:
    """The user as whom a process runs, by the kernel; None where it is gone or hidden."""
    # Not the owner of /proc/<pid>: that is root for a process which may not be traced.
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith(b"Uid:"):
                return int(line.split()[1])
    return None


def _pids_are_true(gpu: Gpu) -> bool:
    if SIMULATED in gpu.uuid:
        return True
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid") == _MACHINE_PIDS  # noqa: PTH115
    return False


def users_on(gpu: Gpu) -> frozenset[int]:
    """The uids of those whose processes compute on this GPU, as far as that can be seen."""
    if not _pids_are_true(gpu):
        return frozenset()
    found = (uid_of(process.pid) for process in gpu.processes if process.compute)
    return frozenset(uid for uid in found if uid is not None)


def sights(gpus: Iterable[Gpu]) -> list[Sight]:
    """The processes that compute on these GPUs and that can be known."""
    tick = os.sysconf("SC_CLK_TCK")
    found = []
    for gpu in gpus:
        for process in gpu.processes if _pids_are_true(gpu) else ():
            identity = identify(process.pid) if process.compute else None
            uid = None if identity is None else uid_of(process.pid)
            if identity is not None and uid is not None:
                ticks = identity.start_ticks
                found.append(Sight(gpu, process.pid, ticks, ticks / tick, uid, process.command, process.memory_mb))
    return found


def lease_holders(uuids: Collection[str]) -> Mapping[str, str | None]:
    """By UUID, the user whose gpuherd holds the GPU now."""
    from gpuherd.errors import CannotWrite, UsageError
    from gpuherd.gpus.leases import LeaseFolder

    try:
        folder = LeaseFolder.existing()
    except (CannotWrite, UsageError):
        return {}
    return {} if folder is None else {uuid: holder.user for uuid, holder in folder.holders(uuids).items()}


class Sampler:
    """Samples for one recorder, while it has its user's lock. ``close`` gives the lock up.

    Args:
        recorder: has the ledger's folder; it must have begun.
        read: a look at all GPUs, with processes and sensors.
        holders: by UUID, the name of the user whose gpuherd holds the GPU now.

    Attributes:
        due_at: when ``keep_time`` has something to do.
    """

    def __init__(
        self,
        recorder: Recorder,
        read: Callable[[], Machine],
        holders: Callable[[Collection[str]], Mapping[str, str | None]] = lambda _: {},
        every_s: float = EVERY_S,
    ) -> None:
        self.due_at = 0.0
        self._recorder = recorder
        self._read = read
        self._holders = holders
        self._every_s = every_s
        self._meters: dict[str, Meter] = {}
        self._doubtful: dict[str, float] = {}
        self._rested: dict[str, Use] = {}  # that went on when it stopped for a while
        self._sampled_at: float | None = None
        self._lock: int | None = None
        self._ends = select.epoll()
        self._watched: dict[int, tuple[int, int]] = {}

    def fileno(self) -> int:
        """A descriptor that is readable when a process has ended that was seen on a GPU: ``note_ends`` is wanted."""
        return self._ends.fileno()

    @property
    def samples(self) -> bool:
        """Whether it is this one that samples."""
        return self._lock is not None

    @property
    def uses(self) -> tuple[Use, ...]:
        """The uses that go on, for ``Recorder.sample``."""
        return tuple(meter.use for name, meter in self._meters.items() if name not in self._doubtful)

    def keep_time(self, now: float, wall: float) -> bool:
        """Samples if it is time, and returns whether it has. ``now`` by the clock since boot (``jobs.clock.mono``)."""
        if now < self.due_at:
            return False
        self.due_at = now + self._every_s
        if not self._may_sample():
            self.rest(now, wall)
            return False
        self.note_ends(now, wall)
        self._sample(self._read(), now, wall)
        return True

    def note_ends(self, now: float, wall: float) -> None:
        """Ends the uses of processes that have ended since the last call."""
        for fd, _ in self._ends.poll(0):
            key = self._watched.pop(fd, None)
            self._ends.unregister(fd)
            os.close(fd)
            if key is not None:
                mark = f"/{key[0]}-{key[1]}/"
                gone = [name for name in self._meters if mark in name]
                self._end({name: self._meters[name].advanced(mono=now, wall=wall) for name in gone})

    def rest(self, now: float, wall: float) -> None:
        """Stops sampling for a while, so that another recorder can; the next ``keep_time`` begins again."""
        if self._lock is None:
            return
        os.close(self._lock)
        self._lock = None
        self.note_ends(now, wall)
        going_on = {name: meter.use for name, meter in self._meters.items() if name not in self._doubtful}
        self._end(dict(self._meters))
        self._rested = going_on
        for fd in self._watched:
            self._ends.unregister(fd)
            os.close(fd)
        self._watched.clear()

    def close(self) -> None:
        """Stops. The uses that go on stay open, for the next sampler."""
        for fd in self._watched:
            os.close(fd)
        self._watched.clear()
        self._ends.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- whose turn it is to sample -----------------------------------------------------------------------------

    def _may_sample(self) -> bool:
        folder = self._recorder.folder
        if folder is None:
            return False
        if os.geteuid() != 0 and _roots_is_at_work(folder):
            return False
        if self._lock is None:
            self._lock = _take_lock(folder / f"sampler.{os.geteuid()}.lock")
            if self._lock is not None:
                # The one before may have ended just now, and left its uses open.
                self._recorder.recover()
                self._sampled_at = None
        return self._lock is not None

    # --- a sample -------------------------------------------------------------------------------------------------

    def _sample(self, machine: Machine, now: float, wall: float) -> None:
        if machine.problem is not None:
            return
        seen = sights(machine.gpus)
        unread = {gpu.uuid for gpu in machine.gpus if gpu.problem is not None}
        covered, known = self._recorded(wall) if seen or self._meters else (set[tuple[int, str]](), {})
        users: dict[str, set[int]] = {}
        for sight in seen:
            users.setdefault(sight.gpu.uuid, set()).add(sight.uid)
        mine = [sight for sight in seen if (sight.uid, sight.gpu.uuid) not in covered]
        count = Counter((sight.uid, sight.gpu.uuid) for sight in mine)
        held = self._holders({sight.gpu.uuid for sight in mine}) if mine else {}
        before, self._meters = self._meters, {}
        for name in [name for name, meter in before.items() if meter.use.gpu in unread]:
            self._meters[name] = before.pop(name)
        for sight in mine:
            uuid = sight.gpu.uuid
            part = part_of(sight.uid, users[uuid], count[sight.uid, uuid])
            is_new = sight.key not in before
            meter = before.pop(sight.key, None) or self._first(sight, known.get(sight.key), now, wall)
            look = Look.of(sight.gpu, part=part, memory_mb=sight.memory_mb)
            self._meters[sight.key] = meter.advanced(mono=now, wall=wall, look=look)
            if is_new and sight.key not in known and held.get(uuid) == user_name(sight.uid):
                self._doubtful[sight.key] = now + _DOUBT_S
            self._watch(sight)
        doubtful = {name: until for name, until in self._doubtful.items() if now < until and name in self._meters}
        # Of those that are no longer there, and have not ended: they left the GPU at some time since the last sample.
        left_at = now if self._sampled_at is None else (self._sampled_at + now) / 2
        seen_now = {sight.key for sight in seen}
        left = {
            name: meter.advanced(mono=left_at, wall=wall - (now - left_at))
            for name, meter in before.items()
            if name not in seen_now
        }
        self._end(left)
        self._doubtful, self._sampled_at = doubtful, now

    def _first(self, sight: Sight, known: tuple[int, Use] | None, now: float, wall: float) -> Meter:
        """The meter of a process that was not there at the last sample of this sampler."""
        at = now
        if self._sampled_at is not None:
            # One that had begun before the last sample has come to the GPU at some time since then.
            came = sight.began if sight.began > self._sampled_at else (self._sampled_at + now) / 2
            at = min(now, came)
        use = Use(
            # Each time that it is seen anew is a use of its own.
            id=f"{sight.key}/{at:.0f}",
            uid=sight.uid,
            gpu=sight.gpu.uuid,
            label=sight.gpu.label,
            kind=Kind.OTHER,
            command=sight.command,
            pid=sight.pid,
            since=wall,
            until=wall,
        )
        rested = self._rested.pop(sight.key, None)
        if known is None and rested is not None:
            known = os.geteuid(), rested
        if known is not None:
            # The same process on the same GPU: it was there all the time.
            writer, earlier = known
            at = max(sight.began, now - max(0.0, wall - earlier.until))
            if writer == os.geteuid():
                return Meter.resumed(replace(use, id=earlier.id), earlier, mono=at)
        return begun(use, mono=at, wall=wall - (now - at))

    def _recorded(self, wall: float) -> tuple[set[tuple[int, str]], dict[str, tuple[int, Use]]]:
        """Which users record which GPU themselves now; and what was recorded before of processes, by whom."""
        covered: set[tuple[int, str]] = set()
        known = {_key(use): (os.geteuid(), use) for use in self._recorder.recovered.values() if use.kind is Kind.OTHER}
        folder = self._recorder.folder
        for file in () if folder is None else open_files_in(folder):
            fresh = abs(wall - file.written_at) < _FRESH_S
            for record in records_of(file):
                use = record.use
                if use.kind is not Kind.OTHER:
                    if fresh and record.observer_uid == use.uid:
                        covered.add((use.uid, use.gpu))
                elif record.observer_uid in (0, os.geteuid()):
                    before = known.get(_key(use))
                    if before is None or use.until > before[1].until:
                        known[_key(use)] = (record.observer_uid, use)
        return covered, known

    def _end(self, ended: Mapping[str, Meter]) -> None:
        for name in ended:
            self._meters.pop(name, None)
        self._recorder.end(meter.use for name, meter in ended.items() if self._doubtful.pop(name, None) is None)

    def _watch(self, sight: Sight) -> None:
        key = (sight.pid, sight.start_ticks)
        if key in self._watched.values() or len(self._watched) >= _MOST_WATCHED:
            return
        with suppress(OSError):
            fd = os.pidfd_open(sight.pid)
            again = identify(sight.pid)
            if again is None or again.start_ticks != sight.start_ticks:
                os.close(fd)
                return
            self._watched[fd] = key
            self._ends.register(fd, select.EPOLLIN)


def _take_lock(path: Path) -> int | None:
    """The lock, taken; None where another process has it, or the file is not ours."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o644)
    except OSError:
        return None
    state = os.fstat(fd)
    if state.st_uid == os.geteuid() and stat.S_ISREG(state.st_mode) and lock(fd):
        return fd
    os.close(fd)
    return None


def _roots_is_at_work(folder: Path) -> bool:
    path = folder / "sampler.0.lock"
    try:
        if path.lstat().st_uid != 0:
            return False
    except OSError:
        return False
    return is_locked(path)
