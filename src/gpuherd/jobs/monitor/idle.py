"""GPUs that are held without being used, for ``gpuherd gpus``, ``top`` and the page: what is read for the rule in
``gpuherd.gpus.idle_held``.

One look says only whether a GPU is used now. For how long it has not been is known to the ledger, and to a process that
looks again and again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.gpus.idle_held import IdleGpu, Looks, idle_gpus, is_idle, observe
from gpuherd.gpus.state import Gpu
from gpuherd.jobs import clock

if TYPE_CHECKING:
    from gpuherd.ledger import Recorded, Use

_USER_TICKS, _SYSTEM_TICKS = 11, 12  # positions in /proc/<pid>/stat after the command's name


class IdleGpus:
    """The idle GPUs of this machine, look by look.

    Args:
        after_s: from so many seconds on a GPU counts as idle; None for what the settings say, and the default where
            they are wrong.
        threshold_mb: memory in use from which a GPU is held.
    """

    def __init__(self, after_s: float | None = None, threshold_mb: int = 500):
        self._after_s = _after_s() if after_s is None else after_s
        self._threshold_mb = threshold_mb
        self._looks: Looks = {}

    def look(self, gpus: Iterable[Gpu]) -> dict[str, IdleGpu]:
        """Which of these GPUs, as the driver has just described them, are idle: by UUID."""
        gpus, now = tuple(gpus), clock.mono()
        held = [gpu for gpu in gpus if is_idle(gpu, self._threshold_mb)]
        cpu_s = cpu_seconds(process.pid for gpu in held for process in gpu.processes)
        self._looks = observe(self._looks, gpus, self._threshold_mb, now=now, cpu_s=cpu_s)
        known = known_to_ledger(clock.wall(), now) if held else {}
        return idle_gpus(self._looks, held, after_s=self._after_s, now=now, known=known)


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """By pid, the CPU seconds that the process has used so far; without those that can't be seen."""
    found, tick_s = {}, 1 / os.sysconf("SC_CLK_TCK")
    for pid in set(pids):
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            found[pid] = (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) * tick_s
    return found


def known_to_ledger(wall: float, mono: float) -> Mapping[str, float]:
    """By GPU's UUID, for how many seconds the ledger has found it idle; {} without a ledger.

    Args:
        wall, mono: now, by both clocks.
    """
    from gpuherd.ledger import Ledger

    ledger = Ledger.existing()
    if ledger is None:
        return {}
    return idle_seconds(ledger.open_uses(), os.geteuid(), wall, mono)


def idle_seconds(records: Iterable[Recorded], reader_uid: int, wall: float, mono: float) -> dict[str, float]:
    """By GPU's UUID, for how many seconds all of its uses that go on have been idle, by those records that are
    believed. Of one use the last of its records counts. Never longer than the machine is up.

    Args:
        reader_uid: who asks; ``wall``, ``mono``: now, by both clocks.
    """
    latest: dict[str, Use] = {}
    for record in records:
        use = record.use
        is_news = use.id not in latest or use.until >= latest[use.id].until
        if is_news and record.is_open and record.is_believed_by(reader_uid):
            latest[use.id] = use
    found: dict[str, float] = {}
    for use in latest.values():
        idle_s = 0.0 if use.idle_since is None else min(mono, max(0.0, wall - use.idle_since))
        found[use.gpu] = min(idle_s, found.get(use.gpu, idle_s))
    return found


def _after_s() -> float:
    from gpuherd.errors import UsageError
    from gpuherd.jobs.settings import NO_SETTINGS, load

    try:
        return load().idle_after_s
    except UsageError:  # a wrong file prevents starting jobs, but not looking at GPUs
        return NO_SETTINGS.idle_after_s
