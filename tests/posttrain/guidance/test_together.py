"""Several processes train as one does; a killed one goes on exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.posttrain.guidance import together
from tests.posttrain.guidance.test_training import weights

from gpuherd.posttrain.engine.curves import read_curves

SCRIPT = Path(together.__file__)
ROOT = SCRIPT.parents[3]


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_as_one(strategy: str, reference: Path, small: Path, tmp_path: Path) -> None:
    together.main("single", str(reference), str(small), str(tmp_path / "one"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
    subprocess.run(
        [*command, strategy, str(reference), str(small), str(tmp_path / "two")], env=environment(), cwd=ROOT, check=True
    )
    one, two = (read_curves(tmp_path / name) for name in ("one", "two"))
    assert [each.keys() for each in one] == [each.keys() for each in two]
    for mine, theirs in zip(one, two, strict=True):
        assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-4)  # rounding adds up over the steps
    kept, other = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert kept.keys() == other.keys()
    assert all(torch.allclose(kept[name], other[name], atol=1e-3) for name in kept)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_process_goes_on_exactly(reference: Path, small: Path, tmp_path: Path) -> None:
    together.main("single", str(reference), str(small), str(tmp_path / "whole"))
    command = [sys.executable, str(SCRIPT), "single", str(reference), str(small), str(tmp_path / "killed")]
    curves = tmp_path / "killed" / "curves.jsonl"
    killed = 0
    for lines in (3, 7):
        process = subprocess.Popen(command, env=environment(), cwd=ROOT)
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and process.poll() is None:
            if curves.exists() and curves.read_bytes().count(b"\n") >= lines:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        killed += process.wait() == -signal.SIGKILL
    assert killed
    subprocess.run(command, env=environment(), cwd=ROOT, check=True)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert read_curves(tmp_path / "killed") == read_curves(tmp_path / "whole")
