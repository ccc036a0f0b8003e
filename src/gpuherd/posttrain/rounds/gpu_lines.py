"""What a run took of its GPUs, as lines for run.log: memory by GPU, utilisation by phase. Pure.

The words are those that people look for: ``GPU Memory Summary:`` and ``GPU utilization``. What nobody measured (on a
CPU, on simulated GPUs) is N/A.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_GB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The most that jobs have taken of a GPU, in bytes; None where nobody measured it.

    Attributes:
        label: as people call it.
        allocated, reserved: by torch: for tensors, and with what its allocator keeps.
        total: the GPU's.
    """

    label: str
    allocated: int | None
    reserved: int | None
    total: int | None


def memory_summary(gpus: Sequence[GpuMemory]) -> list[str]:
    """The lines of a summary.

    >>> print("\\n".join(memory_summary([GpuMemory("0", 45 << 30, 48 << 30, 80 << 30)])))
    GPU Memory Summary:
      GPU 0: 45.00 GB allocated, 48.00 GB reserved, 80.00 GB total
    """
    lines = ["GPU Memory Summary:"]
    for gpu in gpus:
        parts = ((gpu.allocated, "allocated"), (gpu.reserved, "reserved"), (gpu.total, "total"))
        lines.append(f"  GPU {gpu.label}: " + ", ".join(f"{_gb(value)} {word}" for value, word in parts))
    return lines if gpus else [*lines, "  no GPUs: all was computed on the CPU"]


def _gb(value: int | None) -> str:
    return "N/A" if value is None else f"{value / _GB:.2f} GB"


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Of a GPU while jobs of one phase ran on it: how often the driver said something, and the mean of what it said, in
    percent; None where it said nothing."""

    label: str
    phase: str
    looks: int
    percent: float | None


def utilisation_lines(found: Sequence[Utilisation]) -> list[str]:
    """A line a GPU and phase.

    >>> utilisation_lines([Utilisation("0", "train", 12, 87.5), Utilisation("1", "train", 0, None)])
    ['GPU utilization: GPU 0, train: mean 88 % of 12 looks', 'GPU utilization: GPU 1, train: N/A']
    """
    return [
        f"GPU utilization: GPU {each.label}, {each.phase}: "
        + ("N/A" if each.percent is None else f"mean {each.percent:.0f} % of {each.looks} looks")
        for each in found
    ]


class Looks:
    """Utilisations as they are read, added up by GPU and phase."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], tuple[int, int]] = {}

    def add(self, phases: Mapping[str, str], percents: Mapping[str, int | None]) -> None:
        """One look.

        Args:
            phases: of what runs now, by the label of its GPU.
            percents: what the driver says of each GPU, by label.
        """
        for label, phase in phases.items():
            looks, total = self._sums.get((label, phase), (0, 0))
            percent = percents.get(label)
            self._sums[label, phase] = (looks, total) if percent is None else (looks + 1, total + percent)

    def found(self) -> list[Utilisation]:
        """All of it, in the order of labels and phases."""
        return [
            Utilisation(label, phase, looks, total / looks if looks else None)
            for (label, phase), (looks, total) in sorted(self._sums.items())
        ]
