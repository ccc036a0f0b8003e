"""Sums in the units that people read, by name, and as CSV. Pure. docs/usage.md describes the names."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, fields
from typing import Any

from gpuherd.ledger.usage import Total, Usage

# A spreadsheet takes what begins like this for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True, slots=True)
class Figures:
    """The sums in the units that people read. None for what was not measured."""

    gpu_hours: float
    computing_gpu_hours: float | None
    idle_gpu_hours: float | None
    computing_share: float | None
    energy_kwh: float | None
    mean_mb: float | None
    peak_mb: int | None
    uses: int
    going_on: int
    reported_only_gpu_hours: float

    @staticmethod
    def of(total: Total) -> Figures:
        measured = total.measured_s > 0
        return Figures(
            gpu_hours=round(total.held_s / 3600, 4),
            computing_gpu_hours=round(total.computing_s / 3600, 4) if measured else None,
            idle_gpu_hours=round(max(0.0, total.measured_s - total.computing_s) / 3600, 4) if measured else None,
            computing_share=None if total.computing is None else round(total.computing, 4),
            energy_kwh=None if total.energy_j is None else round(total.energy_j / 3.6e6, 4),
            mean_mb=None if total.mean_mb is None else round(total.mean_mb, 1),
            peak_mb=total.peak_mb,
            uses=total.uses,
            going_on=total.going_on,
            reported_only_gpu_hours=round(total.reported_only_s / 3600, 4),
        )

    def values(self) -> dict[str, Any]:
        """By name."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(each.name for each in fields(Figures))


def csv_of(found: Usage, by: str) -> str:
    """The rows as CSV with a heading: the key, the share, and the figures; empty for what was not measured."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([by, "share", *_NAMES])
    for row in found.rows:
        key = f"'{row.key}" if row.key.startswith(_FORMULA) else row.key
        values = Figures.of(row.total).values().values()
        writer.writerow([key, round(row.share, 6), *("" if value is None else value for value in values)])
    return out.getvalue()
