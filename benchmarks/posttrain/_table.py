"""The table of docs/policy-gradient.md from the results of ``python -m benchmarks.posttrain grpo``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- benchmark of GRPO: begin -->", "<!-- benchmark of GRPO: end -->"
ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "posttrain.json", ROOT / "docs" / "policy-gradient.md"
Figures = Mapping[str, Any]


def table(results: Figures) -> str:
    """A row for each vocabulary, without a reference and with one; and on what machine they were measured."""
    found = results["figures"]["grpo"]
    lines = ["| CPU seconds a step | ours | TRL 1.16 | ours / TRL |", "|---|---|---|---|"]
    for size in (4096, 45):
        for kind in ("without_reference", "with_reference"):
            row = found[f"vocabulary_{size}"][kind]
            label = f"{size:,} tokens, {kind.replace('_', ' a ')}"
            lines.append(f"| {label} | {_ours(row['ours'])} | {_trl(row['trl'])} | {_short(row['ours_over_trl'])} |")
    return "\n".join([*lines, "", _when(found, results)])


def _ours(told: Figures) -> str:
    reference = f"reference {_short(told['reference'])}, " if told["reference"] else ""
    stages = f"sampling {_short(told['sampling'])}, {reference}update {_short(told['update'])}"
    return f"{told['step']:.2f} ({stages})"


def _trl(told: Figures) -> str:
    first = f"sampling and reference {_short(told['sampling_and_reference'])}"
    return f"{told['step']:.2f} ({first}, update {_short(told['update'])})"


def _short(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")


def _when(found: Figures, results: Figures) -> str:
    told = found.get("measured", results)
    where = f"{told['machine']['cpu']}, one thread, load {told['machine']['load_at_start']} when it began"
    note = f"; {found['note']}" if "note" in found else ""
    return f"({told['date'][:10]}, {where}{note}.)"


def write_table() -> None:
    """Puts the table of the results into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    made = table(json.loads(RESULTS.read_text(encoding="utf-8")))
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
