"""demo/large_model.py: a 70B model is planned on four simulated GPUs, queued with as many, and loaded as planned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "demo" / "large_model.py"


def test_planned_queued_and_loaded_with_that_very_map(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    run = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "GPU 3: layers 61-79, norm, head: " in done.stdout
    assert "GPUs that the jobs got: {'small': 1, 'large': 4}" in done.stdout
    assert "84 blocks, each where the plan says: yes" in done.stdout
    log = (folder / "run" / "logs" / "large.1.log").read_text()
    assert "GPU 3: layers 61-79, norm, head" in log
