"""The most GPU memory that an attempt was seen to use on one GPU, looked at every few seconds while it runs.

Its processes are told by their pids, on whatever GPU of the node they are: within an engine's walls the numbers of GPUs
need not be the driver's. Where the driver does not tell who uses how much, or has other pids, nothing is known. The
looks have a thread of their own, since a driver that hangs must not keep anybody from ending the job.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gpuherd.engines.processes import everyone
from gpuherd.engines.tree import Traces, members

if TYPE_CHECKING:
    from gpuherd.gpus.state import Gpu

# Short jobs aren't worth the driver's start.
_FIRST_S, _EVERY_S = 2.0, 5.0
_PATIENCE_S = 1.0


class Peak:
    """Looks while the block lasts. ``mb`` is what was seen so far, in MB (2^20 bytes), None for nothing.

    Args:
        wanted: False for an attempt without GPUs: nobody looks.
        first_s, every_s: seconds from the start to the first look, and between two.
    """

    def __init__(self, traces: Traces, wanted: bool = True, first_s: float = _FIRST_S, every_s: float = _EVERY_S):
        self.mb: int | None = None
        self._wanted = wanted
        self._traces = traces
        self._first_s, self._every_s = first_s, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="gpuherd-peak", daemon=True)

    def _look(self) -> None:
        if self._over.wait(self._first_s):
            return
        from gpuherd.gpus.nvml import Nvml  # here: the job runs by now, and need not wait for this

        driver = Nvml()
        while gpus := driver.snapshot().gpus:
            self.mb = most(gpus, self._pids(), self.mb)
            if self._over.wait(self._every_s):
                break
        driver.close()

    def _pids(self) -> frozenset[int]:
        found = members(everyone(self._traces.leader.start_ticks), self._traces.tag.__eq__, (self._traces,))
        return frozenset(each.process.pid for each in found)

    def __enter__(self) -> Self:
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self._wanted:
            self._thread.join(_PATIENCE_S)


def most(gpus: Iterable[Gpu], pids: frozenset[int], before: int | None) -> int | None:
    """The most memory in MB that these processes use together on one of the GPUs, or what was known before."""
    for gpu in gpus:
        known = [each.memory_mb for each in gpu.processes if each.pid in pids and each.memory_mb is not None]
        if known:
            before = max(before or 0, sum(known))
    return before
