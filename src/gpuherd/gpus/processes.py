"""Whose process is this pid, and what is it called: the one place of this room that asks the operating system.

Knows psutil and nothing of GPUs. It gives the program's short name, never its arguments, which may hold secrets.
A pid that can't be looked up (another container's, or already gone) has neither user nor name: both are None.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Identity:
    """Owner and short program name of a process; None for what the system does not tell."""

    user: str | None
    command: str | None


UNKNOWN = Identity(None, None)


class ProcessTable:
    """Remembers who a pid is, so that looking at the same GPUs ten times a second stays cheap.

    An entry is used only while the process is the one that was looked up: a pid that was given to another process
    meanwhile (other start time) is looked up anew.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[psutil.Process, Identity]] = {}

    def identify(self, pid: int) -> Identity:
        """Owner and name of the process with this pid, both None when it is not (or no longer) visible to us."""
        known = self._known.get(pid)
        if known is not None and known[0].is_running():
            return known[1]
        self._known.pop(pid, None)
        try:
            process = psutil.Process(pid)
            identity = Identity(process.username(), _printable(process.name()))
        except (psutil.Error, ValueError, OverflowError):
            return UNKNOWN
        self._known[pid] = (process, identity)
        return identity

    def keep_only(self, pids: set[int]) -> None:
        """Forgets all other pids, so that the table does not grow for as long as we run."""
        for pid in self._known.keys() - pids:
            del self._known[pid]


def _printable(name: str) -> str:
    """A process may call itself anything, also what moves a terminal's cursor."""
    return "".join(character if character.isprintable() else "?" for character in name)
