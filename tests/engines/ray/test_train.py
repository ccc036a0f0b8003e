"""``gpuherd train`` over two of three hosts with Ray, each in a network of its own; one of them dies in the middle."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.engines.ray.network import Host, ThreeHosts, possible
from tests.patience import wait_until
from tests.posttrain.sums import STEPS, configuration, curves, train

from gpuherd.engines.process_tree import ATTEMPT_VARIABLE

SAVED = 5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not possible(), reason="it needs root and network namespaces"),
]


def test_a_training_goes_on_without_a_host_that_died(tmp_path: Path) -> None:
    """From the newest checkpoint, on the two hosts that are left."""
    file, output = configuration(tmp_path, save_every=SAVED), tmp_path / "there"
    with ThreeHosts(gpus=2) as hosts:
        words = train(file, output, "--num-gpus=2", "--nnodes=2", "--engine=ray", f"--ray-address={hosts.address}")
        with hosts.start(words) as following:
            log = output / "curves.jsonl"
            wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= 8, within_s=300.0)
            before = log.read_text().splitlines()[:SAVED]
            next(host for host in hosts.hosts[1:] if works(host)).die()
            said, _ = following.communicate()
    assert following.returncode == 0, said
    assert "on the CPU of each of 2 machines, 4 processes" in said and "its node was lost; it waits again" in said
    assert json.loads((output / "done.json").read_text())["steps"] == STEPS
    assert [row["step"] for row in curves(output)] == list(range(1, STEPS + 1))
    assert log.read_text().splitlines()[:SAVED] == before  # with their times: they were not done again


def works(host: Host) -> bool:
    """Whether a job runs there."""
    network = Path(f"/proc/{host.first}/ns/net").readlink()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if ATTEMPT_VARIABLE in process.environ() and Path(f"/proc/{process.pid}/ns/net").readlink() == network:
                return True
    return False
