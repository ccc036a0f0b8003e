"""The lock files of GPU leases: their folder, their names, and who holds them."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gpuherd.atomic import put_first
from gpuherd.errors import CannotWrite
from gpuherd.gpus.policy_file import read_policy

# --- lock files ------------------------------------------------------------------------------------------------------

# A GPU's locks are ``<uuid>.lock`` and, when one file is not enough (see ``gpuherd.gpus.leases``),
# ``<uuid>.1.lock``, ``<uuid>.2.lock`` and so on.

# A lock file may be found replaced or removed so often before that is an error.
TRIES = 50
# A process that only looks whether a GPU is taken holds its lock for some microseconds.
_LOOKERS = 3
_LOOK_PAUSE_S = 0.0005
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class FileId:
    """A lock file that can't be mistaken for another: also a new one that got the number of a removed one differs in
    the time of its last change, which can't be set."""

    inode: int
    owner: int
    changed_ns: int


@lru_cache(maxsize=1024)
def base_name(uuid: str) -> str:
    """A UUID as a file name: the old form of MIG UUIDs has slashes. Raises ValueError for anything but a UUID."""
    name = uuid.replace("/", "_")
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,200}", name):
        raise ValueError(f"{uuid!r} is no GPU UUID")
    return name


def first_path(folder: Path, uuid: str) -> Path:
    """The lock file that everyone tries first."""
    return folder / f"{base_name(uuid)}.lock"


def further_paths(folder: Path, uuid: str, there: Sequence[str] | None = None) -> list[Path]:
    """The further lock files that are there now, in the order of their numbers. ``there``: the names of all files in
    the folder, where they are known."""
    beginning = base_name(uuid) + "."
    found = []
    for name in os.listdir(folder) if there is None else there:  # noqa: PTH208 - for every lease
        if name.startswith(beginning) and name.endswith(".lock"):
            number = name.removeprefix(beginning).removesuffix(".lock")
            if number.isdecimal() and len(number) <= 9:
                found.append((int(number), folder / name))
    return [path for _, path in sorted(found)]


def names_in(folder: Path) -> list[str]:
    """The names of all files in the folder."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def next_path(folder: Path, uuid: str) -> Path:
    """A name for one more lock file, above all that are there."""
    there = further_paths(folder, uuid)
    number = int(there[-1].name.split(".")[-2]) + 1 if there else 1
    return folder / f"{base_name(uuid)}.{number}.lock"


def open_lock(path: Path) -> int:
    """The lock file, made if need be, open for reading, which is enough to lock it.

    Raises CannotWrite when it can't be opened or is no plain file.
    """
    for _ in range(TRIES):
        # Without O_CREAT first: fs.protected_regular forbids it on another user's file in a sticky folder.
        fd = open_existing(path)
        if fd is None:
            fd = create_lock(path)
        if fd is not None:
            return fd
    raise CannotWrite(f"GPU lock {path} can't be opened: it comes and goes; is something clearing {path.parent}?")


def open_existing(path: Path) -> int | None:
    """The lock file, open; None when it is not there. Raises CannotWrite as ``open_lock`` does."""
    try:
        fd = os.open(path, _OPEN)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        hint = "its owner should make it readable for all"
        raise CannotWrite(f"GPU lock {path} can't be opened: {error.strerror}; {hint}") from None
    except OSError as error:
        raise CannotWrite(f"GPU lock {path} can't be opened: {error.strerror}; remove it") from None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise CannotWrite(f"GPU lock {path} is not a regular file; remove it")


def open_readable(path: Path) -> int | None:
    """A lock file that is there, open; None for any other file: those of gpuherd are plain and readable for all."""
    try:
        return open_existing(path)
    except CannotWrite:
        return None


def create_lock(path: Path, *, locked: bool = False) -> int | None:
    """A new lock file, open; None if another process was faster. ``locked``: no process sees it before it is locked.

    It gets its name when all users can read it, whatever the umask is: if we are killed on the way, no lock is left
    behind that is closed to the others for good.
    """
    import tempfile  # slow to import, and most lock files are there

    try:
        fd, fresh = tempfile.mkstemp(prefix=".lock-", dir=path.parent)
    except OSError as error:
        raise CannotWrite(f"GPU lock {path} can't be made: {error.strerror}") from None
    try:
        if locked:
            fcntl.flock(fd, fcntl.LOCK_EX)
        os.fchmod(fd, 0o644)
        if not put_first(Path(fresh), path):
            os.close(fd)
            return None
    except OSError as error:
        os.close(fd)
        raise CannotWrite(f"GPU lock {path} can't be made: {error.strerror}") from None
    finally:
        with suppress(FileNotFoundError):
            Path(fresh).unlink()
    return fd


def lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Locks the file (LOCK_EX or LOCK_SH); False when another process holds it. Waits for lookers."""
    for _ in range(_LOOKERS):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_PAUSE_S)
        else:
            return True
    return False


def is_locked(path: Path, kind: int = fcntl.LOCK_SH) -> bool:
    """Whether a lock of this kind can't be had now; False too when there is no such file, or it can't be read.

    With LOCK_SH: a process holds it exclusively. With LOCK_EX: a process holds it at all, or looks at this moment.
    """
    try:
        fd = os.open(path, _OPEN)
    except OSError:
        return False
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def is_file_at(path: Path, fd: int) -> bool:
    """Whether the open file is still the one of this name; no other process sees a lock on any other."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def is_safe_from_others(fd: int) -> bool:
    """Whether only we or root can remove the file: in a sticky folder, its owner decides."""
    return os.fstat(fd).st_uid in (0, os.geteuid())


def file_id(path: Path) -> FileId | None:
    """The file's identity; None when it is not there."""
    try:
        state = path.lstat()
    except OSError:
        return None
    return FileId(state.st_ino, state.st_uid, state.st_ctime_ns)


# --- who holds a lock, for people ------------------------------------------------------------------------------------

# Sources: the kernel's own table of locks, and a note that the taker leaves next to the lock. A note,
# ``<uuid>.<uid>.note``, names the user, time and job; never a command line. It counts only as far as the system
# confirms it: the file must belong to the user whom it names, and the kernel must report its pid. Nothing is decided by
# a note: only the lock decides whether a GPU is taken.

# Notes are padded with blanks to this size, so that a new one covers the whole of an old one; more is not read.
_NOTE_BYTES = 4096
_MOST_JOB_CHARACTERS = 300
NOTE_ENDING = ".note"


@dataclass(frozen=True, slots=True)
class Note:
    """The taker of a lock, by its own account; ``since`` is in seconds since 1970."""

    pid: int
    uid: int
    since: float
    job: str | None


def write_note(folder: Path, name: str, note: Note) -> None:
    """Leaves the note for the lock of this name. A lock is a lock without it too: failing fails nothing.

    Only the holder of the lock may call it: two at a time would overwrite each other.
    """
    text = json.dumps({"pid": note.pid, "uid": note.uid, "since": note.since, "job": note.job}).encode()
    file_name = _file_name(name, note.uid)
    with suppress(OSError):
        if _overwrite(f"{folder}/{file_name}", text):
            return
        path, fresh = folder / file_name, folder / f".{file_name}"
        fresh.unlink(missing_ok=True)  # from a taker that was killed here
        # No fsync: like the lock that it describes, the note means nothing after a power cut.
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(text.ljust(_NOTE_BYTES))
                os.fchmod(fd, 0o644)
            fresh.replace(path)
        except OSError:
            fresh.unlink()


def _overwrite(path: str, text: bytes) -> bool:
    """Writes a new note over our own older one, in one write; False when there is none that can be written over.

    A rename for every short job would cost ten times as much. A reader that sees a part of both finds no note.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        state = os.fstat(fd)
        # Only a file that no other user can have put there: a second name of another file of ours would change that.
        ours = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and state.st_nlink == 1
        if not ours or state.st_size != _NOTE_BYTES or len(text) > _NOTE_BYTES:
            return False
        return os.pwrite(fd, text.ljust(_NOTE_BYTES), 0) == _NOTE_BYTES
    finally:
        os.close(fd)


def read_notes(folder: Path, name: str, uid: int | None = None) -> Iterator[Note]:
    """All believable notes for the lock of this name, old ones too; or that of one user, which costs less."""
    for path in folder.glob(f"{name}.*.note") if uid is None else (folder / _file_name(name, uid),):
        note = _read_note(path)
        if note is not None and path.name == _file_name(name, note.uid):
            yield note


def noted_names(folder: Path, uid: int) -> list[str]:
    """The names of the locks for which there is a note of this user, old ones too."""
    ending = _file_name("", uid)
    return [name.removesuffix(ending) for name in names_in(folder) if name.endswith(ending) and name[0] != "."]


def _file_name(name: str, uid: int) -> str:
    return f"{name}.{uid}{NOTE_ENDING}"


def _read_note(path: Path) -> Note | None:
    """The note in this file, or None unless it is one and belongs to the user whom it names."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            return None
        read = json.loads(os.read(fd, _NOTE_BYTES))
        note = Note(int(read["pid"]), int(read["uid"]), float(read["since"]), read["job"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    finally:
        os.close(fd)
    return note if note.uid == state.st_uid and _fit_to_show(note.job) else None


def _fit_to_show(job: object) -> bool:
    """The job's name goes to terminals: only printable text of sane length."""
    return job is None or (isinstance(job, str) and job.isprintable() and len(job) <= _MOST_JOB_CHARACTERS)


def lock_takers() -> dict[str, int]:
    """Which pid took which lock of its own (LOCK_EX), by ``lock_key``: the kernel's table, empty where it is hidden."""
    takers: dict[str, int] = {}
    with suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            # "1: FLOCK ADVISORY WRITE 4711 fe:00:2146451 0 EOF"; one that waits has "->" in the second place, and a
            # taker that this container doesn't show the pid 0 or -1.
            words = line.split()
            if len(words) >= 6 and words[1] == "FLOCK" and words[3] == "WRITE" and int(words[4]) > 0:
                takers[words[5]] = int(words[4])
    return takers


def lock_key(path: Path) -> str:
    """The name of this file in the kernel's table of locks. Raises OSError when it is not there."""
    file = path.lstat()
    return f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"


def owner_of_process(pid: int) -> int | None:
    """The uid that the process with this pid runs as, None if it is gone or hidden."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


# --- the folder of leases --------------------------------------------------------------------------------------------

ENVIRONMENT = "GPUHERD_LEASE_DIR"
# /run/lock is emptied at boot and, on Debian, writable for all; other systems have /var/lock; /tmp is everywhere.
PLACES = (
    Path("/run/lock/gpuherd"),
    Path("/var/lock/gpuherd"),
    Path("/tmp/gpuherd-leases"),  # noqa: S108 - refuse_unsafe looks at it before use
)
_REMEDY = f"set {ENVIRONMENT} to a folder of mode 1777 that all users share"


def existing_place() -> Path | None:
    """The folder that GPUHERD_LEASE_DIR or the machine's policy names, else the first of ``PLACES``, if there is one;
    not yet checked.
    """
    chosen = _chosen()
    places = (Path(chosen),) if chosen else PLACES
    return next((place for place in places if os.path.lexists(place)), None)


def make_place() -> Path:
    """Makes the folder that GPUHERD_LEASE_DIR or the policy names, else the first of ``PLACES`` that can be made.

    Raises:
        CannotWrite: none can be made.
    """
    chosen = _chosen()
    if chosen:
        make_folder(Path(chosen))
        return Path(chosen)
    for place in PLACES:
        if place.parent.is_dir():
            try:
                make_folder(place)
            except CannotWrite:
                continue
            return place
    raise CannotWrite(f"no folder for GPU leases can be made ({', '.join(map(str, PLACES))}); {_REMEDY}")


def _chosen() -> str | None:
    """The folder that our environment names (simulated GPUs have leases of their own), or else the machine's policy."""
    named = os.environ.get(ENVIRONMENT) or read_policy().tables.get("lease_dir")
    return named if isinstance(named, str) else None


def make_folder(path: Path) -> None:
    """Makes the folder, open to all users but with each one's files safe from the others (mode 1777), unless it is.

    Raises:
        CannotWrite: it can't be made.
    """
    import tempfile  # slow to import, and seldom needed

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first: no process may see it before it has its mode.
        fresh = Path(tempfile.mkdtemp(prefix=".gpuherd-", dir=path.parent))
        fresh.chmod(0o1777)
        try:
            fresh.rename(path)
        except OSError:
            fresh.rmdir()
            if not os.path.lexists(path):
                raise
    except OSError as error:
        raise CannotWrite(f"the folder for GPU leases {path} can't be made: {error.strerror}; {_REMEDY}") from None


def refuse_unsafe(path: Path) -> None:
    """Checks that the locks in this folder can be relied on.

    Raises:
        CannotWrite: it is a symbolic link, no folder, not writable for this user, or anyone may replace others' files.
    """
    try:
        state = path.lstat()
    except OSError as error:
        raise CannotWrite(f"the folder for GPU leases {path} can't be used: {error.strerror}; {_REMEDY}") from None
    mode = stat.S_IMODE(state.st_mode)
    if stat.S_ISLNK(state.st_mode):
        raise CannotWrite(f"the folder for GPU leases {path} is a symbolic link, which could lead anywhere; {_REMEDY}")
    if not stat.S_ISDIR(state.st_mode):
        raise CannotWrite(f"{path} should be the folder for GPU leases but is a file; {_REMEDY}")
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise CannotWrite(
            f"in the folder for GPU leases {path} (mode {mode:o}) everyone can replace the locks of others; "
            f"run: chmod +t {path}"
        )
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        raise CannotWrite(
            f"the folder for GPU leases {path} (mode {mode:o}, owner {user_name(state.st_uid)}) is closed to you; "
            f"its owner should run: chmod 1777 {path}; or {_REMEDY}"
        )


def user_name(uid: int) -> str:
    """The user's name, ``uid 1234`` for one that the system does not know."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
