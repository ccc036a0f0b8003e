"""One machine at a time opens a queue, also on a file system that several machines see."""

from __future__ import annotations

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
from pathlib import Path

from gpuherd.atomic import put_first
from gpuherd.engines.process_tree import boot_id, identify
from gpuherd.errors import CannotWrite, QueueBusy
from gpuherd.jobs import clock

# On what kind of file system a folder lies: one that other machines may see too, or one of this machine alone.

_TABLE = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")
# Those that only one machine has mounted. Any other may be shared, as far as we know.
_OF_ONE_MACHINE = frozenset(
    [
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "f2fs",
        "bcachefs",
        "jfs",
        "reiserfs",
        "nilfs2",
        "tmpfs",
        "ramfs",
        "rootfs",
        "devtmpfs",
        "overlay",
        "aufs",
        "squashfs",
        "erofs",
        "vfat",
        "exfat",
        "msdos",
        "ntfs",
        "ntfs3",
        "fuseblk",
        "fuse.fuse-overlayfs",
    ]
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
    return kind not in _OF_ONE_MACHINE


# One machine at a time opens a queue: how it says so on a file system that others see, and how they keep away.
#
# SQLite's write-ahead log is agreed on in shared memory. Over a network file system each machine has its own copy of
# that memory; who writes there beside another machine can damage the file, and who only reads can be told nonsense or
# hang on a lock. (SQLite's older journals work by locks alone. Those can be right over a network, and often are not;
# and they sync the file twice at every start and end of a job, tens of milliseconds each on such a file system. So
# the journal stays what it is, and the rule is one machine.) For the same reason nobody reads a copy from elsewhere:
# what is copied while it is written may be neither the old state nor the new, and nothing would tell.
#
# Whoever opens a queue for writing on such a file system leaves ``queue.host`` beside it, which can be made only
# once, by a hard link, and a dispatcher touches it every 15 seconds. On another machine it is an error while that
# file is fresh. How fresh is told by the file system's own clock, that of a file which is touched now: the machines'
# clocks differ. What is a machine is told by its boot, not by its name: containers of one machine have several names
# and share its memory; and a machine that was started anew has left nothing at work. On a file system of this machine
# alone there is no such file, and nothing to pay.
#
# A machine that stops in the middle (a laptop asleep) for over a minute loses its hold, and notices before it writes.

BEAT_S = 15.0
SILENT_S = 60.0
# Of our own silence: so long we need not look whether somebody else has taken over.
_SURE_S = 40.0
_NAME = "queue.host"
_MOST_BYTES = 4096
# Who has this name may take a stale file away.
_RIGHT = f".{_NAME}.removing"
_TURNS = 40
_TURN_S = 0.05
_NUMBERS = itertools.count()


class QueueElsewhere(QueueBusy):
    """Another machine works on this queue."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Who has a queue open: the machine's name and its boot, the process, and the queue's inode (a copied folder holds
    a copied file)."""

    host: str
    boot: str
    pid: int
    inode: int


@dataclass(frozen=True, slots=True)
class _Found:
    """What stands in the file now: ``machine`` None for nonsense, ``touched`` by the file system's clock."""

    machine: Machine | None
    touched: float
    text: bytes


def machine_name() -> str:
    """This machine's name, as others may reach it."""
    return platform.node() or "unknown"


def refuse_elsewhere(queue: Path) -> None:
    """Raises QueueElsewhere while another machine works on the queue in this file. Writes nothing but, where another
    machine did, a probe that is gone at once."""
    found = _read(queue)
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
        self._me = Machine(machine_name(), boot_id(), os.getpid(), queue.stat().st_ino)
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
            found = _read(self._queue)
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
        began, found = clock.mono(), _read(self._queue)
        if found is not None and self._is_enough(found.machine, also_from_us=False):
            with suppress(FileNotFoundError):
                os.utime(self._path)
                self._sure_until = began + _SURE_S
                return
        self._take(also_from_us=self._beats is not None)  # somebody has tidied up, or taken over and died

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
                found = _read(self._queue)
                if found is None:
                    continue
                if self._is_enough(found.machine, also_from_us=also_from_us):
                    self._sure_until = began + _SURE_S
                    return
                refuse_elsewhere(self._queue)
                self._remove(found)
            raise CannotWrite(
                f"can't put {self._path} into its place; look at it, and remove it, or, where {_RIGHT} lies beside it"
                f" (one that was killed while it did so), wait {SILENT_S:.0f} seconds"
            )
        except OSError as problem:
            raise CannotWrite(f"can't write {self._path}: {problem.strerror}") from problem
        finally:
            probe.unlink(missing_ok=True)

    def _is_enough(self, there: Machine | None, *, also_from_us: bool) -> bool:
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
            if _read(self._queue) == stale:
                self._path.unlink(missing_ok=True)
        finally:
            right.unlink(missing_ok=True)


def _is_elsewhere(machine: Machine, queue: Path) -> bool:
    try:
        inode = queue.stat().st_ino
    except OSError:
        return False
    return machine.boot != boot_id() and machine.inode == inode


def _read(queue: Path) -> _Found | None:
    # Over NFS what was looked up before is believed for up to a minute; opening the folder asks the server.
    with suppress(OSError):
        os.close(os.open(queue.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        with queue.with_name(_NAME).open("rb") as file:
            text = file.read(_MOST_BYTES)
            touched = os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
    try:
        told = json.loads(text)
        machine = Machine(str(told["host"]), str(told["boot"]), int(told["pid"]), int(told["inode"]))
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
