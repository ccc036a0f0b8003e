"""The machine's policy file: its place, whether it can be trusted, and its content as plain tables.

``/etc/gpuherd/policy.toml`` binds every user, so it counts only when root alone could have written it. Where there is
none, GPUHERD_POLICY may name a file of root or of the user: for trying a policy out, and for users who share nothing
else. ``gpuherd.jobs.settings`` interprets its keys; only ``lease_dir`` is read in ``gpus``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError

PLACE = Path("/etc/gpuherd/policy.toml")
ENVIRONMENT = "GPUHERD_POLICY"
# More than a person would write; a file that is larger is something else.
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """The policy's tables, {} without a policy. ``warning``: why a file that is there does not count."""

    path: Path | None = None
    tables: Mapping[str, Any] = field(default_factory=dict)
    warning: str | None = None


NONE = PolicyFile()


def read_policy() -> PolicyFile:
    """The policy that binds this process now.

    Raises:
        UsageError: the file is trusted and is no valid TOML. A typing error must not remove the limits.
    """
    if os.path.lexists(PLACE):
        return _read(PLACE, owners={0})
    named = os.environ.get(ENVIRONMENT)
    return _read(Path(named), owners={0, os.geteuid()}) if named else NONE


def _read(path: Path, owners: set[int]) -> PolicyFile:
    try:
        # Not to wait for a writer, where it is a FIFO.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            doubt = why_not_believed(os.fstat(file.fileno()), path.parent.stat(), owners)
            if doubt is not None:
                return PolicyFile(path, warning=f"the machine's policy {path} is left out of account: {doubt}")
            return PolicyFile(path, parse(file.read(_MOST_BYTES).decode("utf-8", "replace"), path, "its administrator"))
    except OSError as problem:
        return PolicyFile(path, warning=f"the machine's policy {path} can't be read: {problem.strerror}")


def why_not_believed(file: os.stat_result, folder: os.stat_result, owners: set[int]) -> str | None:
    """Why a policy file doesn't count, as a sentence with the remedy; None when it does.

    Its folder must be as safe as itself: a user who may write there can put another file in its place.
    """
    if not stat.S_ISREG(file.st_mode):
        return "it is no plain file"
    for state, what in ((file, "it"), (folder, "its folder")):
        if state.st_uid not in owners:
            return f"{what} does not belong to root; chown root it"
        open_to_others = state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if open_to_others and not (what == "its folder" and state.st_mode & stat.S_ISVTX):
            return f"others than its owner may write {what}; chmod go-w it"
    return None


def parse(text: str, path: Path, who: str) -> dict[str, Any]:
    """The tables of a settings file. Raises UsageError that names the file, the line, and ``who`` should mend it."""
    import tomllib

    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise UsageError(f"{path} is no valid TOML: {problem}; {who} should correct it") from None
