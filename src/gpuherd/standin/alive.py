"""Which processes of a simulated machine live, so that their memory counts: the rule of ``is_alive`` in state.h."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from gpuherd.standin.layout import Process


def start_of(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 when it is not there, or a zombie (which holds nothing)."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if fields[0] not in (b"Z", b"X"):
            return int(fields[19])
    return 0


def counts(entry: Process) -> bool:
    """Whether the memory of this entry is in use now."""
    if not entry.counts or (entry.until and time.monotonic_ns() >= entry.until):
        return False
    return bool(entry.phantom) or start_of(entry.pid) == entry.start
