"""How busy a run's GPUs were, by phase, and how much memory its jobs took: for run.log. Changes nothing of the run.

``GPU utilization`` are the words that people look for. A figure that is not measured (on simulated GPUs) is N/A.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuherd.gpus.state import Gpu
from gpuherd.jobs import clock
from gpuherd.jobs.records import Event, EventKind, RunSnapshot
from gpuherd.jobs.reporter import Display
from gpuherd.posttrain.engine.curves import GpuMemory, memory_summary
from gpuherd.posttrain.runs.folder import RoundsDirectory


class Looks:
    """What the driver said of GPUs while jobs ran on them, by GPU and phase of the job."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], list[int]] = {}

    def add(self, phases: Mapping[str, str], percents: Mapping[str, int | None]) -> None:
        """One look.

        Args:
            phases: of what runs now, by the label of its GPU.
            percents: what the driver says of each GPU, by label.
        """
        for label, phase in phases.items():
            seen, percent = self._seen.setdefault((label, phase), []), percents.get(label)
            seen += [] if percent is None else [percent]

    def lines(self) -> list[str]:
        """A line a GPU and phase, in this order.

        >>> looks = Looks()
        >>> looks.add({"0": "train", "1": "train"}, {"0": 87, "1": None})
        >>> looks.lines()
        ['GPU utilization: GPU 0, train: mean 87 % of 1 looks', 'GPU utilization: GPU 1, train: N/A']
        """
        return [
            f"GPU utilization: GPU {label}, {phase}: "
            + (f"mean {sum(seen) / len(seen):.0f} % of {len(seen)} looks" if seen else "N/A")
            for (label, phase), seen in sorted(self._seen.items())
        ]


logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
_MIB = 1 << 20


class GpuWatcher:
    """A display in front of another one. Hears which job runs where, and remembers what each GPU did meanwhile.

    Args:
        phases: of each job, by name.
        look: the GPUs now; () where there are none, and where they are those of a cluster.
    """

    def __init__(
        self,
        folder: RoundsDirectory,
        phases: Mapping[str, str],
        behind: Display,
        look: Callable[[], Sequence[Gpu]],
    ):
        self._folder, self._phases, self._behind, self._look = folder, phases, behind, look
        self.every_s = min(behind.every_s, LOOK_EVERY_S)
        self._shown_at = self._looked_at = clock.mono()
        self._at_work: dict[str, tuple[str, ...]] = {}
        self._used: dict[str, tuple[int, int]] = {}
        self._totals: dict[str, int] = {}
        self._seen: set[str] = set()
        self._looks = Looks()

    def event(self, event: Event) -> None:
        """Passes an event on, and notes where its job runs."""
        self._behind.event(event)
        if event.job is None:
            return
        if event.kind in (EventKind.STARTED, EventKind.ADOPTED):
            self._at_work[event.job] = event.gpus
            self._seen.update(event.gpus)
            self._looks.add(dict.fromkeys(event.gpus, self._phases.get(event.job, "?")), {})
        elif self._at_work.pop(event.job, None) is not None and event.kind is EventKind.DONE:
            self._note(event.job, event.gpus)

    def snapshot(self, snapshot: RunSnapshot) -> None:
        """Passes it on as often as the display wants it, and looks at the GPUs."""
        now = clock.mono()
        if now - self._shown_at >= self._behind.every_s or self.every_s == self._behind.every_s:
            self._shown_at = now
            self._behind.snapshot(snapshot)
        if now - self._looked_at >= LOOK_EVERY_S and self._at_work:
            self._looked_at = now
            busy = {label: self._phases.get(job, "?") for job, labels in self._at_work.items() for label in labels}
            if busy:
                self._looks.add(busy, {gpu.label: gpu.utilisation_percent for gpu in self._look()})

    def write(self) -> list[str]:
        """Writes the lines to the log. Returns those of the memory, for people."""
        here = {gpu.label: gpu.total_mb * _MIB for gpu in self._look() if gpu.label in self._seen}
        # A cluster's GPUs can't be read from here: a job's own record of the whole of its GPU counts there.
        labels = [*here, *sorted(self._seen - {*here})]
        totals = self._totals | here
        memory = []
        for each in labels:
            allocated, reserved = self._used.get(each) or (None, None)
            memory.append(GpuMemory(each, allocated, reserved, totals.get(each)))
        lines = memory_summary(memory)
        for line in (*lines, *self._looks.lines()):
            logger.info("%s", line)
        return lines

    def _note(self, job: str, labels: Sequence[str]) -> None:
        """Notes what a finished job recorded of its GPUs."""
        try:
            told: Any = json.loads(self._folder.usage_of(job).read_bytes())
            one = {"allocated": told["peak_allocated"], "reserved": told["peak_reserved"], "total": told.get("total")}
            peaks = [(each["allocated"], each["reserved"], each["total"]) for each in told.get("gpus") or [one]]
        except (OSError, ValueError, KeyError, TypeError):
            return  # it is for people; a run doesn't end for it
        if len(labels) != len(peaks):
            return
        for label, (allocated, reserved, total) in zip(labels, peaks, strict=True):
            if not isinstance(allocated, int) or not isinstance(reserved, int):
                continue
            if isinstance(total, int):
                self._totals[label] = total
            before = self._used.get(label, (0, 0))
            self._used[label] = max(before[0], allocated), max(before[1], reserved)
