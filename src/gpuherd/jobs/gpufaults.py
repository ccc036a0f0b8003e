"""What the driver says against a GPU on which a job of ours has failed: memory errors, Xid errors, a lost GPU.

Errors count from the moment at which our job took the GPU; for one that was taken over from an earlier dispatcher, from
the first look. Knows no jobs and no driver: it is shown GPUs as the driver described them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from gpuherd.gpus.state import Gpu
from gpuherd.gpus.xid import fault


class GpuFaults:
    """Remembers the counts of errors from which on they are new."""

    def __init__(self, gpus: Iterable[Gpu]) -> None:
        self._last: dict[str, tuple[int | None, int]] = {}
        self._before: dict[str, tuple[int | None, int]] = {}
        self.look(gpus)

    def look(self, gpus: Iterable[Gpu]) -> None:
        """The GPUs as the driver describes them now, with their errors."""
        for gpu in gpus:
            if gpu.problem is None:
                self._last[gpu.uuid] = (gpu.uncorrected_errors, gpu.xids)
                self._before.setdefault(gpu.uuid, self._last[gpu.uuid])

    def taken(self, uuids: Iterable[str]) -> None:
        """Our job takes these GPUs: what they are known to have had so far is not its doing."""
        self._before |= {uuid: self._last[uuid] for uuid in uuids if uuid in self._last}

    def problem(self, gpus: Mapping[str, Gpu], uuids: Collection[str]) -> str | None:
        """A sentence about the faults of these GPUs since they were taken, None without any. ``gpus``: as of now."""
        found = [sentence for uuid in uuids if uuid in gpus for sentence in self._sentences(gpus[uuid])]
        self.look(gpus.values())
        return "; ".join(found) or None

    def _sentences(self, gpu: Gpu) -> Iterable[str]:
        errors_before, xids_before = self._before.get(gpu.uuid, (None, 0))
        if gpu.problem is not None:
            yield f"GPU {gpu.label}: {gpu.problem}"
        said = None if gpu.last_xid is None or gpu.xids == xids_before else fault(gpu.last_xid)
        if said is not None:
            yield f"GPU {gpu.label}: {said}"
        if gpu.uncorrected_errors is not None and errors_before is not None and gpu.uncorrected_errors > errors_before:
            yield f"GPU {gpu.label}: uncorrectable memory errors: {gpu.uncorrected_errors - errors_before}"
