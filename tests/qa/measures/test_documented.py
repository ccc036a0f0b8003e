"""docs/uncertainty.md names every measure, weighting and reason as the code has them, and its example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from gpuherd.qa.measures import given
from gpuherd.qa.measures.registry import NOT_FINITE, measures
from gpuherd.qa.measures.weighting import WEIGHTINGS

PAGE = (Path(__file__).parents[3] / "docs" / "uncertainty.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| ")
]


def test_every_measure_has_a_row_with_its_other_names() -> None:
    listed = {tuple(re.findall(r"`([^`]+)`", row[0])) for row in ROWS if len(row) in (3, 4)}
    known = {(each.name, *each.aliases) for each in measures() if not each.name.startswith("weighted-nll:")}
    assert listed - {()} == known


def test_every_weighting_has_its_formula() -> None:
    listed = {row[0].strip("`"): row[1] for row in ROWS if len(row) == 2 and row[0].startswith("`")}
    assert listed.pop("weighted-nll:") == "weight of token i"
    assert listed == {name: each.formula for name, each in WEIGHTINGS.items()}


def test_every_reason_is_told() -> None:
    reasons = {value for name, value in vars(given).items() if name.isupper() and isinstance(value, str)}
    told = {row[0] for row in ROWS if len(row) == 2 and not row[0].startswith("`")} - {"reason"}
    assert told == reasons | {NOT_FINITE}


def test_the_example_runs_and_says_what_is_missing() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == f"(2.3, None) {{'{given.NO_GREEDY}': 1}}\n"
