"""Reads a coverage table back, line by line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpuherd.esd.selection import TensorCoverage
from gpuherd.esd.views import read_table

COUNTS = ("params", "matrices", "params_analysed")


def read_coverage(path: Path) -> list[TensorCoverage]:
    lines = []
    for cells in read_table(path):
        values: dict[str, Any] = cells | {name: int(cells[name]) for name in COUNTS}
        lines.append(TensorCoverage(**values | {"reason": cells["reason"] or None}))
    return lines
