"""Processes as the kernel shows them in /proc: who is who, who belongs to which attempt.

A pid alone names nobody for long, since pids are used again. ``ProcessId`` therefore carries the start time and the
boot id as well. Linux only. Knows nothing of jobs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ATTEMPT_VARIABLE = "GPUHERD_ATTEMPT"

_PROC = Path("/proc")
_STATE, _START_TIME = 0, 19  # positions in /proc/<pid>/stat after the command's name


@cache
def boot_id() -> str:
    """The kernel's name for this boot: a record with another one is from before a restart of the machine."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that can't be mistaken for another: pid, start time in clock ticks since boot, and the boot."""

    pid: int
    start_ticks: int
    boot: str

    def is_alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        if self.boot != boot_id():
            return False
        fields = _stat(self.pid)
        return fields is not None and int(fields[_START_TIME]) == self.start_ticks and fields[_STATE] not in "ZX"


def identify(pid: int) -> ProcessId | None:
    """The full identity of the process that has this pid now, or None when there is none."""
    fields = _stat(pid)
    return None if fields is None else ProcessId(pid, int(fields[_START_TIME]), boot_id())


@dataclass(frozen=True, slots=True)
class Tagged:
    """A live process that carries an attempt's tag in its environment."""

    process: ProcessId
    attempt: str


def tagged(prefix: str) -> Iterator[Tagged]:
    """Every live process of ours whose GPUHERD_ATTEMPT begins with ``prefix``.

    The environment is inherited by everything that a job starts, also by what forks twice or opens a session of its
    own; a process group or session would miss those. What hides on purpose (an emptied environment) is not found.
    Other users' processes can't be read and are passed over.
    """
    wanted = f"{ATTEMPT_VARIABLE}={prefix}".encode()
    for entry in os.scandir(_PROC):
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            environment = Path(entry.path, "environ").read_bytes()
            if wanted not in environment:
                continue
            process = identify(int(entry.name))
            for variable in environment.split(b"\0"):
                if process is not None and process.is_alive() and variable.startswith(wanted):
                    yield Tagged(process, variable.split(b"=", 1)[1].decode("utf-8", "replace"))
                    break


def send(process: ProcessId, number: int) -> None:
    """Sends a signal to exactly this process: through a pidfd, so that a pid used again meanwhile is not hit."""
    with suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(process.pid)
        try:
            if process.is_alive():
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the command's name, which may itself hold spaces and brackets."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    return text[text.rindex(b")") + 2 :].decode("ascii").split()
