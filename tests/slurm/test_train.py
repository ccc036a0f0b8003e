"""``gpuherd train`` over two nodes of a real SLURM, each in a network of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.patience import wait_until
from tests.posttrain.sums import STEPS, configuration, curves, train
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import Plan

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_two_nodes_train_as_one_machine_does(tmp_path: Path, own_cluster: Callable[[Plan], Cluster]) -> None:
    """Told that its time is nearly up it ends behind a checkpoint, and goes on in another turn; and four processes on
    two nodes learn what four on one machine do.
    """
    slurm = own_cluster(Plan(nodes=2, gpus=2, apart=True, accounting=False))
    file, output = configuration(tmp_path), tmp_path / "there"
    words = train(file, output, "--num-gpus=2", "--nnodes=2", "--engine=slurm", "--cpus-per-job=2")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        log = output / "curves.jsonl"
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= 3, within_s=300.0)
        slurm.command("scancel", "--signal=USR1", "--batch", "1")
        said, _ = child.communicate()
    assert child.returncode == 0, said
    assert "asked it to make room; it waits again" in said and "handed to SLURM as 2" in said
    assert "the same command goes on from there" in (output / "logs" / "train.1.log").read_text()
    here = tmp_path / "here"
    subprocess.run(train(file, here, "--num-gpus=4"), check=True, capture_output=True)
    assert curves(output) == curves(here)
    assert json.loads((output / "done.json").read_text())["steps"] == STEPS
