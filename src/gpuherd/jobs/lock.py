"""One dispatcher a queue, and one machine a queue.

On one machine: a kernel lock on a file next to the queue, gone with the process that held it, however it died. On a
file system that several machines see: the file ``queue.host``, kept fresh by the machine that has the queue open.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import platform
import re
import shlex
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from gpuherd.atomic import put_first, without_waiting
from gpuherd.engines.process_tree import boot_id, identify
from gpuherd.errors import CannotWrite, QueueBusy
from gpuherd.jobs import clock
from gpuherd.jobs.run_dir import RunDirectory

# A control client that carries out a request on an idle queue is done in a moment, or after a job's grace.
_PATIENCE_S = 20.0
_LOOK_S = 0.02
# A process that only checks who holds the lock has it for some microseconds, whatever the file says meanwhile.
_LOOKERS_S = 0.06
# The file is empty when the lock has just been taken, or is about to be given back.
_CHANGING_HANDS_S = 0.5


class LockRole(StrEnum):
    """What the holder does with the queue."""

    DISPATCHER = "dispatcher"
    CONTROL = "control"


class DispatcherLock:
    """Held from construction to ``close``. Raises QueueBusy, naming the holder's pid, when another process holds it,
    QueueElsewhere when another machine works on the queue next to it, and CannotWrite.

    A dispatcher waits for a control client that carries out a request on the idle queue.
    """

    def __init__(self, path: Path, role: LockRole = LockRole.DISPATCHER):
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as problem:
            raise CannotWrite(f"can't write {path}: {problem.strerror}") from problem
        try:
            self._wait(path, role)
            run = RunDirectory(path.parent)
            if path.absolute() == run.lock:
                # Where locks of one machine don't keep another out, this does. (A job's own lock, as of a training in
                # the folder of its queue, is taken on a node of a cluster, and says nothing about the queue.)
                refuse_elsewhere(run.queue)
        except BaseException:
            os.close(self._fd)
            raise
        with suppress(OSError):  # a full disk: the lock is a lock without the pid too
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()} {role} {boot_id()} {machine_name()}\n".encode(), 0)

    def _wait(self, path: Path, role: LockRole) -> None:
        before: LockRole | None = role
        since = time.monotonic()
        while not _try(self._fd, path):
            pid, held_as, there = _read(self._fd)
            if held_as is not before:
                before, since = held_as, time.monotonic()
            if time.monotonic() - since < _patience_s(role, held_as):
                time.sleep(_LOOK_S)
                continue
            if there is not None:
                raise busy_there(there, pid, path.parent)
            raise QueueBusy(
                f"another gpuherd (pid {pid or 'unknown'}) works on {path.parent}; wait for it, stop it, or use another"
                " folder"
            )

    def close(self) -> None:
        """Gives the lock back. The file stays: removing it would let two processes lock two files of one name."""
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
        os.close(self._fd)

    @staticmethod
    def holder(path: Path) -> int | None:
        """The pid of the dispatcher that holds the lock, None when none does or it is not known.

        Raises QueueElsewhere for one on another machine.
        """
        try:
            fd = without_waiting(str(path), os.O_RDONLY)
        except OSError:
            return None
        try:
            if _try(fd, path, shared=True):
                return None
            pid, role, there = _read(fd)
            if there is not None and role is LockRole.DISPATCHER:
                raise busy_there(there, pid, path.parent)
            return pid if role is LockRole.DISPATCHER else None
        finally:
            os.close(fd)


def _patience_s(role: LockRole, held_as: LockRole | None) -> float:
    """How long a process that wants the lock in a role waits for a holder in another role; None: the holder's role is
    unknown."""
    if held_as is None:
        return _CHANGING_HANDS_S
    return _PATIENCE_S if (role, held_as) == (LockRole.DISPATCHER, LockRole.CONTROL) else _LOOKERS_S


def _try(fd: int, path: Path, *, shared: bool = False) -> bool:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as problem:
        raise CannotWrite(
            f"the file system of {path} gives no locks ({problem.strerror}); use a folder"
            " on another one, or have it mounted with locks (Lustre: -o flock)"
        ) from problem
    return True


def _read(fd: int) -> tuple[int | None, LockRole | None, str | None]:
    """The holder's pid and role, and its machine's name when that is not this one."""
    words = os.pread(fd, 512, 0).decode("utf-8", "replace").split()
    pid = int(words[0]) if words and words[0].isdigit() else None
    # A lock of an older gpuherd holds a pid alone: that of a dispatcher.
    role = LockRole(words[1]) if len(words) > 1 and words[1] in set(LockRole) else LockRole.DISPATCHER
    there = words[3] if len(words) > 3 and words[2] != boot_id() else None
    return pid, role if pid is not None else None, there


# --- the file system: does another machine see it too? ------------------------------------------------------------

_TABLE = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")
# Those that only one machine has mounted. Any other may be shared, as far as we know.
_OF_ONE_MACHINE = (
    "ext2 ext3 ext4 xfs btrfs zfs f2fs bcachefs jfs reiserfs nilfs2 tmpfs ramfs rootfs devtmpfs overlay aufs squashfs"
    " erofs vfat exfat msdos ntfs ntfs3 fuseblk fuse.fuse-overlayfs"
)


def kind_of(path: str | Path) -> str:
    """The kind of file system that a path lies on or would lie on, as the kernel calls it (``nfs4``); "" if unknown."""
    wanted = os.path.realpath(path)
    best, kind = "", ""
    try:
        lines = _TABLE.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        words = before.split(" ")
        if len(words) < 5 or not after:
            continue
        point = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), words[4])
        # A later mount on the same point hides the earlier.
        if len(point) >= len(best) and (wanted == point or wanted.startswith(point.rstrip("/") + "/")):
            best, kind = point, after.split(" ")[0]
    return kind


def may_be_shared(kind: str) -> bool:
    """Whether other machines may see a file system of this kind.

    >>> may_be_shared("nfs4"), may_be_shared("fuse.sshfs"), may_be_shared("ext4")
    (True, True, False)
    """
    return kind not in _OF_ONE_MACHINE.split()


# --- one machine at a time opens a queue --------------------------------------------------------------------------
#
# SQLite's write-ahead log is coordinated in shared memory. Over a network file system each machine has its own copy of
# that memory: writers on two machines can damage the file, and a reader can get wrong data or hang on a lock.
# (SQLite's older journals work by locks alone. Those can be right over a network, and often are not; and they sync the
# file twice at every start and end of a job, tens of milliseconds each on such a file system. So the journal mode
# stays, and the rule is one machine.) For the same reason no machine reads a copy of the file: a copy made while the
# file is written may be neither the old state nor the new, and nothing would show it.
#
# A process that opens a queue for writing on such a file system makes ``queue.host`` next to it by a hard link, which
# only one can make; a dispatcher touches it every 15 seconds. On another machine it is an error while that file is
# fresh. Freshness is measured by the file system's own clock, that of a file which is touched now, because the
# machines' clocks differ. A machine is known by its boot id, not by its name: containers of one machine have several
# names and share its memory, and a machine that was restarted has left nothing at work. On a file system of this
# machine alone there is no such file and no cost.
#
# A machine that stops for over a minute (a laptop asleep) loses its hold, and notices that before it writes.

BEAT_S = 15.0
SILENT_S = 60.0
# For so long after our last touch no other machine can have taken over, and no check is needed.
_SURE_S = 40.0
_NAME = "queue.host"
_MOST_BYTES = 4096
# The process that creates this name may remove a stale file.
_RIGHT = f".{_NAME}.removing"
_TURNS = 40
_TURN_S = 0.05
_NUMBERS = itertools.count()


class QueueElsewhere(QueueBusy):
    """Another machine works on this queue."""


@dataclass(frozen=True, slots=True)
class QueueMachine:
    """A machine that has a queue open: its name and boot id, the process, and the queue's inode (a copied folder holds
    a copied file)."""

    host: str
    boot: str
    pid: int
    inode: int


@dataclass(frozen=True, slots=True)
class _Found:
    """What stands in the file now: ``machine`` None for nonsense, ``touched`` by the file system's clock."""

    machine: QueueMachine | None
    touched: float
    text: bytes


def machine_name() -> str:
    """This machine's name, as others may reach it."""
    return platform.node() or "unknown"


def refuse_elsewhere(queue: Path) -> None:
    """Raises QueueElsewhere while another machine works on the queue in this file. Writes nothing but, where another
    machine did, a probe that is gone at once."""
    found = _read_host(queue)
    if found is None or found.machine is None or not _is_elsewhere(found.machine, queue):
        return
    if _now(queue.parent) - found.touched < SILENT_S:
        raise QueueElsewhere(_sentence(found.machine.host, found.machine.pid, queue.parent))


def _sentence(host: str, pid: int | None, folder: Path) -> str:
    there, here = shlex.quote(host), shlex.quote(str(folder))
    return (
        f"gpuherd on {host} (pid {pid or 'unknown'}) works on {folder}, and a queue is opened on one machine at a time:"
        f" ask there (ssh {there} gpuherd status {here}), or have it end there (ssh {there} gpuherd drain {here}) to"
        f" go on here; if {host} is gone, wait {SILENT_S:.0f} seconds"
    )


def busy_there(host: str, pid: int | None, folder: Path) -> QueueElsewhere:
    """The error about a holder of the queue's lock on another machine."""
    return QueueElsewhere(_sentence(host, pid, folder))


class Hold:
    """This machine's hold on a queue: nothing on a file system of this machine alone.

    Args:
        queue: the queue's file, there already.

    Raises QueueElsewhere, and CannotWrite.
    """

    def __init__(self, queue: Path):
        refuse_elsewhere(queue)
        self._queue = queue
        self._path = queue.with_name(_NAME)
        self._me = QueueMachine(machine_name(), boot_id(), os.getpid(), queue.stat().st_ino)
        self._ours = False
        self._sure_until = float("inf")
        self._ending: threading.Event | None = None
        self._beats: threading.Thread | None = None
        self._shared = may_be_shared(kind_of(queue.parent))
        if self._shared:
            self._take(also_from_us=False)

    def keep(self) -> None:
        """From now on it is kept until ``release``, by a thread: for a dispatcher."""
        if not self._shared or self._beats is not None:
            return
        self._take(also_from_us=True)
        self._ending = threading.Event()
        self._beats = threading.Thread(target=self._beat, args=(self._ending,), name="gpuherd-hold", daemon=True)
        self._beats.start()

    def check(self) -> None:
        """Raises QueueElsewhere when another machine has taken over meanwhile. Costs nothing while we are sure."""
        if clock.mono() > self._sure_until:
            refuse_elsewhere(self._queue)
            self._touch()

    def release(self) -> None:
        """Gives it back, when it is this process that took it."""
        if self._beats is not None and self._ending is not None:
            self._ending.set()
            self._beats.join()
            self._beats = self._ending = None
        self._sure_until = float("inf")
        if self._ours:
            self._ours = False
            found = _read_host(self._queue)
            if found is not None and found.machine == self._me:
                with suppress(OSError):
                    self._path.unlink()

    def _beat(self, ending: threading.Event) -> None:
        while not ending.wait(BEAT_S):
            with suppress(OSError, QueueBusy, CannotWrite):  # the writer finds it out by ``check``
                refuse_elsewhere(self._queue)
                self._touch()

    def _touch(self) -> None:
        """Makes the file a fresh one. Only this machine's is touched: what another left while we slept, though it says
        nothing any more, would hold for that one again."""
        began, found = clock.mono(), _read_host(self._queue)
        if found is not None and self._is_enough(found.machine, also_from_us=False):
            with suppress(FileNotFoundError):
                os.utime(self._path)
                self._sure_until = began + _SURE_S
                return
        self._take(also_from_us=self._beats is not None)  # it was tidied up, or another machine took over and died

    def _take(self, *, also_from_us: bool) -> None:
        """Puts our file into its place. Another process of this machine may have it: then that is enough, unless
        ``also_from_us``. Of several machines that find a stale one at once, one wins."""
        text = json.dumps(asdict(self._me)).encode()
        probe = _probe(self._queue.parent, text)
        try:
            for _ in range(_TURNS):
                began = clock.mono()
                if put_first(probe, self._path):
                    self._ours, self._sure_until = True, began + _SURE_S
                    return
                found = _read_host(self._queue)
                if found is None:
                    continue
                if self._is_enough(found.machine, also_from_us=also_from_us):
                    self._sure_until = began + _SURE_S
                    return
                refuse_elsewhere(self._queue)
                self._remove(found)
            raise CannotWrite(
                f"can't put {self._path} into its place; look at it, and remove it, or, where {_RIGHT} lies next to it"
                f" (one that was killed while it did so), wait {SILENT_S:.0f} seconds"
            )
        except OSError as problem:
            raise CannotWrite(f"can't write {self._path}: {problem.strerror}") from problem
        finally:
            probe.unlink(missing_ok=True)

    def _is_enough(self, there: QueueMachine | None, *, also_from_us: bool) -> bool:
        """Whether the file that is there says already that this machine has the queue."""
        if there is None or (there.boot, there.inode) != (self._me.boot, self._me.inode):
            return False
        return there.pid == self._me.pid or (not also_from_us and identify(there.pid) is not None)

    def _remove(self, stale: _Found) -> None:
        """Takes a file away that means nothing any more, and no other: one does so at a time, and looks again. Else
        what is taken away could be what a faster one has just put there."""
        right = self._path.with_name(_RIGHT)
        probe = _probe(self._queue.parent, b".")
        try:
            have_it = put_first(probe, right)
        finally:
            probe.unlink(missing_ok=True)
        if not have_it:
            with suppress(FileNotFoundError):
                if _now(self._path.parent) - right.stat().st_mtime > SILENT_S:
                    right.unlink()  # of one that was killed
            time.sleep(_TURN_S)
            return
        try:
            if _read_host(self._queue) == stale:
                self._path.unlink(missing_ok=True)
        finally:
            right.unlink(missing_ok=True)


def _is_elsewhere(machine: QueueMachine, queue: Path) -> bool:
    try:
        inode = queue.stat().st_ino
    except OSError:
        return False
    return machine.boot != boot_id() and machine.inode == inode


def _read_host(queue: Path) -> _Found | None:
    # Over NFS what was looked up before is believed for up to a minute; opening the folder asks the server.
    with suppress(OSError):
        os.close(os.open(queue.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        with open(queue.with_name(_NAME), "rb", opener=without_waiting) as file:
            text = file.read(_MOST_BYTES) or b""
            touched = os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
    try:
        raw = json.loads(text)
        machine = QueueMachine(str(raw["host"]), str(raw["boot"]), int(raw["pid"]), int(raw["inode"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return _Found(None, touched, text)
    return _Found(machine, touched, text)


def _now(folder: Path) -> float:
    """The file system's own time; this machine's in a folder that we can't write."""
    try:
        probe = _probe(folder, b".")
    except CannotWrite:
        return time.time()
    try:
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with suppress(OSError):
            probe.unlink()


def _own_name(folder: Path) -> Path:
    """A name that no other process on any machine uses."""
    return folder / f".{_NAME}.{boot_id()}.{os.getpid()}.{next(_NUMBERS)}"


def _probe(folder: Path, text: bytes) -> Path:
    """A new file with this text. Raises CannotWrite."""
    path = _own_name(folder)
    try:
        with path.open("xb") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)  # for all who may read the queue, whatever the umask
    except OSError as problem:
        raise CannotWrite(f"can't write in {folder}: {problem.strerror}") from problem
    return path
