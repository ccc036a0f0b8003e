"""The folder of what gpuherds of a machine share beyond a reboot: the ledger and reservations.

``/var/lib/gpuherd``, where an administrator has run ``gpuherd setup-machine`` once: of mode 1777 like ``/tmp``, so that
all users write there and no one can remove or replace the files of others. Elsewhere each user has a folder of their
own. GPUHERD_MACHINE_DIR names another one: for simulated GPUs, and for users in containers who share only that.

Nothing in a shared folder is believed for what it says of its author: the owner of a file is the user whom the kernel
names. ``read_owned`` is the one way to read others' files.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gpuherd.errors import CannotWrite

ENVIRONMENT = "GPUHERD_MACHINE_DIR"
PLACE = Path("/var/lib/gpuherd")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class MachineDir:
    """The folder, which need not exist unless it is ``shared``: then all users of the machine see the same one."""

    path: Path
    shared: bool

    def make(self, name: str) -> Path:
        """The sub-folder of this name, made if it is not there: open to all where the folder is shared.

        Raises CannotWrite when it can't be made, or is no folder that can be relied on.
        """
        place = self.path / name
        try:
            if not self.shared:
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
            elif not place.is_dir():
                place.mkdir(exist_ok=True)
                place.chmod(0o1777)
            state = place.lstat()
        except OSError as problem:
            raise CannotWrite(f"{place} can't be made: {problem.strerror}") from None
        if (doubt := why_unsafe(state)) is not None:
            raise CannotWrite(f"{place} {doubt}")
        return place


def machine_dir() -> MachineDir:
    """The folder that is in use here and now.

    One that the environment names is shared where others may write it. Raises RuntimeError for a user without a home
    folder on a machine that has not been set up.
    """
    if named := os.environ.get(ENVIRONMENT):
        path = Path(named).absolute()
        return MachineDir(path, _is_shared(path))
    if _is_shared(PLACE):
        return MachineDir(PLACE, shared=True)
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    # A home may be mounted on several machines.
    return MachineDir(base / "gpuherd" / "machines" / machine_key(), shared=False)


@lru_cache(maxsize=1)
def machine_key() -> str:
    """The host's name and a few digits of its id: the same after a reboot, another one on another machine."""
    identity = ""
    with suppress(OSError):
        identity = Path("/etc/machine-id").read_text(encoding="ascii", errors="replace").strip()
    host = socket.gethostname()
    readable = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in host)[:60].strip(".")
    return f"{readable or 'machine'}-{hashlib.sha256(f'{identity} {host}'.encode()).hexdigest()[:8]}"


def why_unsafe(state: os.stat_result) -> str | None:
    """Why files in this folder could be removed or replaced by others, as the end of a sentence; None if they can't."""
    if not stat.S_ISDIR(state.st_mode):
        return "is no folder, or a symbolic link, which could lead anywhere; remove it"
    if state.st_mode & (stat.S_IWOTH | stat.S_IWGRP) and not state.st_mode & stat.S_ISVTX:
        return "lets everyone replace the files of others; its owner should run: chmod +t on it"
    return None


def _is_shared(path: Path) -> bool:
    with suppress(OSError):
        state = path.lstat()
        others_write = bool(state.st_mode & (stat.S_IWOTH | stat.S_IWGRP))
        return others_write and why_unsafe(state) is None and os.access(path, os.W_OK | os.X_OK, effective_ids=True)
    return False


def read_owned(path: Path, most_bytes: int, offset: int = 0) -> tuple[int, bytes] | None:
    """The owner of a file and its content from ``offset`` on, at most ``most_bytes`` of it.

    None for anything but a plain file with one name that we can read: links, FIFOs and files that are gone.
    """
    try:
        fd = os.open(path, _READ)
    except OSError:
        return None
    try:
        state = os.fstat(fd)
        # A second name could be one that a stranger gave to a file of somebody else.
        if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1:
            return None
        return state.st_uid, os.pread(fd, most_bytes, offset)
    except OSError:
        return None
    finally:
        os.close(fd)
