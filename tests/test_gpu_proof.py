"""``make gpu``: what it does where there is no GPU, what counts as skipped or failed, and its table."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gpu
from benchmarks._peers import Absent
from benchmarks.gpu import _table, driver

from gpuherd.standin.machine import SimulatedMachine


def test_without_a_gpu_it_lists_what_it_skips_and_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "gpu", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=gpu.ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "no NVIDIA GPU" in done.stdout
    assert all(part in done.stdout for part in gpu.PARTS)
    assert not list(tmp_path.iterdir()), "older results stay"


def test_a_measurement_that_fails_or_is_skipped_harms_no_other() -> None:
    def absent() -> dict[str, Any]:
        raise Absent("trl: not installed")

    def wrong() -> dict[str, Any]:
        raise ValueError("31 MB more than planned")

    measurements = [
        gpu.Measurement("one", absent), gpu.Measurement("two", wrong), gpu.Measurement("three", lambda: {"it": 1})
    ]  # fmt: skip
    found: dict[str, Any] = {}
    for each in gpu.report(measurements):
        found |= each
    assert found == {
        "one": {"skipped": "trl: not installed"},
        "two": {"failed": "ValueError: 31 MB more than planned"},
        "three": {"it": 1},
    }
    assert gpu.summary({"part": {"seconds": 1, "measured": found}}) == {
        "skipped": ["part, one: trl: not installed"],
        "failed": ["part, two: ValueError: 31 MB more than planned"],
    }


def test_a_part_that_cannot_be_prepared_is_skipped_as_a_whole() -> None:
    def measure() -> Iterator[gpu.Measurement]:
        yield gpu.Measurement("one", dict)
        gpu.needs("json", "no_such_package")
        yield gpu.Measurement("two", dict)

    assert list(gpu.report(measure())) == [{"one": {}}, {"all of it": {"skipped": "no_such_package: not installed"}}]


def test_a_part_that_takes_too_long_is_ended_and_counts_as_failed() -> None:
    found = gpu.run_part("driver", 0.01, quick=True)
    assert "ended after its" in found["problem"]
    assert gpu.summary({"driver": found})["failed"]


def write_nvidia_smi(folder: Path, rows: list[list[str]]) -> None:
    """An nvidia-smi that answers with these rows whatever it is asked."""
    table = folder / "table.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat '{table}'\n")
    program.chmod(0o755)


@pytest.mark.parametrize(("field", "shown", "problem"), [
    (None, "", None),
    ("total_mb", "40960", None),
    ("total_mb", "40000", "GPU 1: total_mb is 40000 by nvidia-smi and 40960 by gpuherd"),
    ("name", "Another GPU", "name is Another GPU"),
    ("uuid", "GPU-other", "nvidia-smi shows"),
    ("power_w", "[N/A]", "power_w"),
])  # fmt: skip
def test_the_table_of_gpus_is_compared_with_nvidia_smi(
    standin: Callable[..., SimulatedMachine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    field: str | None, shown: str, problem: str | None,
) -> None:  # fmt: skip
    standin("2x40GB", attribute=True)
    ours = json.loads(gpu.gpuherd("gpus", "--json").stdout)["gpus"]
    rows = [[str(each[name]) for name in driver.FIELDS] for each in ours]
    if field is not None:
        rows[1][list(driver.FIELDS).index(field)] = shown
    write_nvidia_smi(tmp_path, rows)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if problem is None:
        assert driver.beside_nvidia_smi()["gpus"] == 2
    else:
        with pytest.raises(ValueError, match=problem):
            driver.beside_nvidia_smi()


def test_the_documents_have_the_table_of_the_results() -> None:
    text = (gpu.ROOT / "docs/measured.md").read_text()
    shown = text.partition(_table.BEGIN)[2].partition(_table.END)[0].strip()
    assert shown == _table.table(_table.read_result(gpu.RESULTS))


def test_a_row_says_what_is_not_there(tmp_path: Path) -> None:
    measured = {
        "grpo": {"failed": "ValueError: x"},
        "sft": {"skipped": "trl: not installed"},
        "ppo": {"loss": 0.5, "last_step_s": 0.25, "reserved_mb": 2000.0, "planned_mb": 3000},
    }
    result = {
        "quick": False, "date": "2026-11-23T00:00:00", "versions": {"torch": "2.11.0"},
        "figures": {"gpus": ["H200"], "parts": {"training": {"measured": measured}}},
    }  # fmt: skip
    (tmp_path / "gpu.json").write_text(json.dumps(result))
    document = tmp_path / "measured.md"
    document.write_text(f"before\n{_table.BEGIN}\nold\n{_table.END}\nafter\n")
    _table.write_table(tmp_path / "gpu.json", document)
    lines = document.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
    assert "| PPO, 6 steps in bf16 | loss 0.5, last step 0.25 s; 2,000 of 3,000 MB planned |" in lines
    assert "| GRPO, 6 steps in bf16 | **failed** |" in lines
    assert f"| SFT, 6 steps in bf16 | {_table.NOT_YET} (trl: not installed) |" in lines
    assert "On H200, 2026-11-23: torch 2.11.0." in lines
    (tmp_path / "bare.md").write_text("no marks\n")
    with pytest.raises(ValueError, match="no lines"):
        _table.write_table(tmp_path / "gpu.json", tmp_path / "bare.md")
