"""How busy a run's GPUs were, by phase, as lines for run.log. Pure.

``GPU utilization`` are the words that people look for. What nobody measured (on simulated GPUs) is N/A.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
