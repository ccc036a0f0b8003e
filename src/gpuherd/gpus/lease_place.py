"""Where the machine's GPU leases are, and whether that folder can be trusted. Knows nothing of what is in it."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from gpuherd.errors import CannotWrite
from gpuherd.gpus.policy_file import read_policy

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
        # Under another name first: nobody may meet it before it has its mode.
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
