"""Processes of this machine, known by their pid and when they began."""

from __future__ import annotations

from pathlib import Path

# Before a command: it is killed when the process that has started it ends.
LEASH = ("setpriv", "--pdeathsig", "KILL")
# Before a command: it is the first process of namespaces of its own, with which all others there end.
SPACES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts")


def born(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None for one that is gone or only waits to be buried."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def children(pid: int) -> dict[int, str]:
    """The processes that a process has started, and when each began."""
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {int(word): began for word in words if (began := born(int(word))) is not None}
