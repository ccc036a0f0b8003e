"""A reference in shares: each process holds its part of the bytes, and all compute what a whole one computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def told(policy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each of two processes found, by the type that passes compute in and what FSDP keeps whole."""
    path = tmp_path_factory.mktemp("reference") / "told.json"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words += ["-m", "tests.posttrain.policy_gradient.divided_reference", str(policy_model), str(path)]
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
    done = subprocess.run(words, env=here, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("sharding", ["full_shard", "shard_grad_op"])
def test_each_process_holds_half_and_log_probs_are_those_of_a_whole_one(
    told: dict[str, list[dict[str, Any]]], sharding: str
) -> None:
    for each in told[f"None {sharding}"]:
        assert each["bytes"] == pytest.approx(each["whole"] / 2, rel=0.02)  # rows are rounded up
        assert not any(each["differ"])  # to the bit
    assert told[f"None {sharding}"][0]["differ"] and told[f"None {sharding}"][1]["differ"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("sharding", ["full_shard", "shard_grad_op"])
def test_under_autocast_it_lies_in_what_passes_compute_in(told: dict[str, list[dict[str, Any]]], sharding: str) -> None:
    for each in told[f"bfloat16 {sharding}"]:
        assert each["bytes"] == pytest.approx(each["whole"] / 4, rel=0.02)  # half of the rows' bytes in float32
        assert each["as wide"]  # to the bit
        assert 0 < max(each["differ"]) < 0.1  # FSDP computes in bfloat16 between the layers too
