"""demo/large_model.py: a 70B model is planned on four simulated GPUs, queued with as many, and loaded as planned."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "demo" / "large_model.py"


def test_planned_queued_and_loaded_with_that_very_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported what the script needs; its batch and its jobs have their own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "new"
    code = runpy.run_path(str(SCRIPT))["main"](folder)
    told = capfd.readouterr()
    assert code == 0, told.out + told.err[-3000:]
    assert "GPU 3: layers 61-79, norm, head: " in told.out
    assert "GPUs that the jobs got: {'small': 1, 'large': 4}" in told.out
    assert "84 blocks, each where the plan says: yes" in told.out
    log = (folder / "run" / "logs" / "large.1.log").read_text()
    assert "GPU 3: layers 61-79, norm, head" in log
