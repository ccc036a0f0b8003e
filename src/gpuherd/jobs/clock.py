"""The two clocks, in one place.

``wall`` is for people and for times that must outlive a reboot; it can be set. ``mono`` is the machine's own time since
boot (CLOCK_BOOTTIME): it can't be set, it goes on while the machine sleeps, and it is the same in every process, so
that two users' runs can be compared by it.
"""

from __future__ import annotations

import time


def wall() -> float:
    """Seconds since 1970."""
    return time.time()


def mono() -> float:
    """Seconds since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
