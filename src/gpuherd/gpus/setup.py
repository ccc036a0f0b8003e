"""What an administrator sets up once: the folder that all users of the machine share, and a policy to fill in.

``plan`` looks and says what is to be done, ``carry_out`` does it. What is there and could not be relied on is refused,
never mended silently: somebody else may have put it there.
"""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuherd.atomic import replacing
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.gpus.machine_dir import PLACE as SHARED
from gpuherd.gpus.policy_file import PLACE as POLICY

# Made in advance: the owner of a folder may remove what others put there.
_SUB_FOLDERS = ("ledger", "reservations")
# Sticky: no one removes or replaces files of others. For a group also: files and folders in it belong to the group.
_FOR_ALL, _FOR_GROUP = 0o1777, 0o3770

TEMPLATE = """\
# The policy of this machine for gpuherd: it binds all users. Remove the # before what you want; a wrong line is refused
# with its place, and nothing is started until it is mended. All settings: docs/sharing-politely.md

# exclude_gpus = ["0"]          # GPUs that gpuherd leaves alone: indices, 3:1 for a MIG instance, or UUIDs
# idle_lease = "4h"             # a GPU that is held and not used for so long may be taken by others

# [limits]
# max_gpus_per_user = 4         # that one user may hold at a time
# quiet_hours = ["Mon-Fri 09:00-18:00"]
# quiet_max_gpus = 2            # for all of a user's runs in quiet hours

# [turns]                       # users who wait take turns by what each has used of late; this is how it is anyway
# enabled = true
# half_life = "7d"

# [reservations]                # gpuherd reserve
# max_gpus = 4                  # of one user at once
# max_hours = 48

# [idle]
# after = "30m"                 # a GPU that is held and not used for so long is named with its user

# [users.alice]
# max_gpus = 8
# weight = 2                    # twice the share of the others, where several wait
# gpu_hours_per_week = 500
"""


@dataclass(frozen=True, slots=True)
class Step:
    """A file or folder as it should be.

    Attributes:
        done: what there is to say of it: ``made``, ``mode 1777 in place of 0755``, ``is as it should be``.
        is_needed: something has to be changed.
        text: the content of a file; None for a folder.
    """

    path: Path
    mode: int
    gid: int | None
    done: str
    is_needed: bool
    text: str | None = None


def plan(group: str | None = None, root: Path = Path("/")) -> tuple[Step, ...]:
    """What has to be done; () never: what is as it should be is a step that is not needed.

    Args:
        group: only members of this group share the folder; None for all users.
        root: where the machine's ``/`` lies, for an image that is being built.

    Raises:
        UsageError: there is no such group.
        CannotWrite: something is in the way that can't be relied on.
    """
    gid = None
    if group is not None:
        try:
            gid = grp.getgrnam(group).gr_gid
        except KeyError:
            raise UsageError(f"there is no group {group!r}; make it with: groupadd {group}") from None
    shared, policy = _below(root, SHARED), _below(root, POLICY)
    mode = _FOR_ALL if gid is None else _FOR_GROUP
    steps = [_folder(shared, mode, gid)]
    steps += [_folder(shared / name, mode, gid) for name in _SUB_FOLDERS]
    steps.append(_folder(policy.parent, 0o755, None))
    steps.append(_file(policy, TEMPLATE))
    return tuple(steps)


def carry_out(steps: Sequence[Step]) -> None:
    """Does what is needed. Raises CannotWrite, which names what could not be done: the same command goes on there."""
    for step in steps:
        if not step.is_needed:
            continue
        try:
            if step.text is not None:
                with replacing(step.path, step.mode) as file:
                    file.write(step.text.encode())
                continue
            if not os.path.lexists(step.path):
                step.path.parent.mkdir(parents=True, exist_ok=True)
                step.path.mkdir(mode=0o700)
            # Through a descriptor: nothing may take the folder's place between the two.
            fd = os.open(step.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchown(fd, 0, 0 if step.gid is None else step.gid)
                os.fchmod(fd, step.mode)
            finally:
                os.close(fd)
        except OSError as problem:
            raise CannotWrite(f"{step.path} can't be set up: {problem.strerror}") from None


def _below(root: Path, place: Path) -> Path:
    return root / place.relative_to("/")


def _folder(path: Path, mode: int, gid: int | None) -> Step:
    _refuse_open_parents(path)
    try:
        state = path.lstat()
    except FileNotFoundError:
        return Step(path, mode, gid, f"made, mode {mode:04o}", is_needed=True)
    except OSError as problem:
        raise CannotWrite(f"{path} can't be looked at: {problem.strerror}") from None
    if not stat.S_ISDIR(state.st_mode):
        raise CannotWrite(f"{path} is no folder, or a symbolic link, which could lead anywhere; look at it, remove it")
    if state.st_uid != 0:
        raise CannotWrite(
            f"{path} belongs to uid {state.st_uid}, who may remove what others put there; look at it, then run:"
            f" chown root {path}"
        )
    now = stat.S_IMODE(state.st_mode)
    changes = []
    if now != mode:
        changes.append(f"mode {mode:04o} in place of {now:04o}")
    if gid is not None and state.st_gid != gid:
        changes.append(f"group {gid} in place of {state.st_gid}")
    return Step(path, mode, gid, ", ".join(changes) or "is as it should be", is_needed=bool(changes))


def _file(path: Path, text: str) -> Step:
    try:
        state = path.lstat()
    except OSError:
        return Step(path, 0o644, None, "made: a policy to fill in, which limits nothing yet", is_needed=True, text=text)
    if not stat.S_ISREG(state.st_mode):
        raise CannotWrite(f"{path} is no plain file; look at it, remove it")
    return Step(path, 0o644, None, "is there, and is left as it is", is_needed=False, text=text)


def _refuse_open_parents(path: Path) -> None:
    """Raises CannotWrite where others could put something else in the folder's place."""
    parent = path.parent
    while not os.path.lexists(parent):
        parent = parent.parent
    state = parent.stat()
    if state.st_mode & (stat.S_IWOTH | stat.S_IWGRP) and not state.st_mode & stat.S_ISVTX:
        raise CannotWrite(f"others may write {parent} and replace what is in it; run: chmod go-w {parent}")
