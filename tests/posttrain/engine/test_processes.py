"""Two processes train as one does, by every strategy; and go on from each other's checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.posttrain.engine import processes
from tests.posttrain.engine.nets import held, trained, write_former

from gpuherd.posttrain.engine.checkpoints import Checkpoints
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.options import StepOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHARING = list(processes.STRATEGIES)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The same in one process: its folder and what it told."""
    folder = tmp_path_factory.mktemp("processes")
    with torch.random.fork_rng(devices=[]):
        found = processes.by(DistEnv.single(), StepOptions(2), folder / "single")
    third = processes.made(DistEnv.single(), StepOptions(2))
    trained(third, range(3), processes.BATCH)
    write_former(folder / "former", third, 3, pieces=3)
    return folder, found


@pytest.fixture(scope="module")
def told(single: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    """What two processes told, beside the single one's checkpoint."""
    return _started(2, single[0])


def _started(count: int, folder: Path, *words: str) -> dict[str, Any]:
    """What so many processes told."""
    root = Path(__file__).parents[3]
    torchrun = [sys.executable, "-W", "error::FutureWarning", "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={count}", str(root / "tests/posttrain/engine/processes.py"), folder, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return found


@pytest.mark.parametrize("name", SHARING)
def test_two_processes_are_as_one(single: tuple[Path, dict[str, Any]], told: dict[str, Any], name: str) -> None:
    one, two = single[1], told[name]
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert two["after"] == pytest.approx(one["after"], abs=1e-5)
    assert two["lonely"] == pytest.approx(one["lonely"], abs=1e-5)
    for weight, values in one["weights"].items():
        if weight != "count":  # a buffer that counts passes: each process has its own
            assert torch.allclose(torch.tensor(two["weights"][weight]), torch.tensor(values), atol=1e-5), weight


@pytest.mark.parametrize("name", SHARING)
def test_they_go_on_bit_for_bit(told: dict[str, Any], name: str) -> None:
    assert told[name]["resumed"] == told[name]["losses"][3:]


def test_four_go_on_bit_for_bit(tmp_path: Path) -> None:
    """The order of their sums, which two don't have, is that of an undisturbed training from the first step on."""
    assert _started(4, tmp_path, "resumed") == {name: [] for name in SHARING}


@pytest.mark.parametrize("name", SHARING)
def test_one_process_may_ask_the_whole_model(
    single: tuple[Path, dict[str, Any]], told: dict[str, Any], name: str
) -> None:
    assert torch.allclose(torch.tensor(told[name]["answer"]), torch.tensor(single[1]["answer"]), atol=1e-5)


def test_sharded_processes_go_on_from_a_single_one(single: tuple[Path, dict[str, Any]], told: dict[str, Any]) -> None:
    assert told["from single"]["losses"] == pytest.approx(single[1]["losses"][3:], abs=1e-5)
    assert told["from single"]["state"] == single[1]["state"]  # to the bit
    assert len(set(told["from single"]["seeds"])) == 2  # dropout of each process is its own


def test_three_of_the_version_before_are_gone_on_from_by_two(
    single: tuple[Path, dict[str, Any]], told: dict[str, Any]
) -> None:
    assert told["from former"]["state"] == single[1]["state"]
    assert told["from former"]["losses"] == pytest.approx(single[1]["losses"][3:], abs=1e-5)


@pytest.mark.parametrize("name", ["ddp", "full_shard"])
def test_another_strategy_goes_on(told: dict[str, Any], name: str) -> None:
    def but_counts(state: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in state.items() if key != "buffers/count"}

    moved = told[f"from {name}"]
    assert but_counts(moved["state"]) == but_counts(told[name]["state"])  # to the bit
    assert moved["losses"] == pytest.approx(told[name]["losses"][3:], abs=1e-5)


@pytest.mark.parametrize("name", SHARING)
def test_a_single_process_goes_on_from_theirs(
    single: tuple[Path, dict[str, Any]], told: dict[str, Any], name: str
) -> None:
    one = processes.made(DistEnv.single(), StepOptions(2), seed=7)
    Checkpoints(single[0] / name.replace(" ", "-"), DistEnv.single()).restore(one)
    assert held(one) == told[name]["state"]  # to the bit
    losses = trained(one, range(3, 6), processes.BATCH)
    assert losses == pytest.approx(told[name]["losses"][3:], abs=1e-5)


def test_mixed_precision_is_near_float32(single: tuple[Path, dict[str, Any]], told: dict[str, Any]) -> None:
    for losses in told["mixed"].values():
        assert losses != single[1]["losses"] and losses == pytest.approx(single[1]["losses"], abs=0.05)


def test_float16_that_overflows_in_one_process_is_skipped_by_all(
    single: tuple[Path, dict[str, Any]], told: dict[str, Any]
) -> None:
    for half in told["half"].values():
        assert half["losses"] == pytest.approx(single[1]["losses"], abs=0.05)
        assert half["skipped"] and half["lowered"] == [0.5, 0.5]


def test_refusals_are_told_by_all(told: dict[str, Any]) -> None:
    first, second = told["unwritable"]
    assert "2 processes with strategy single" in first and "its model is 'a', here it is 'b'" in second


def test_only_one_writes_and_all_agree(single: tuple[Path, dict[str, Any]], told: dict[str, Any]) -> None:
    assert read_curves(single[0]) == [{"step": 1, "loss": 0.5}]
    assert told["world"] == [2, [0, 1], 0, True]


def test_processes_meet_as_often_as_they_like(told: dict[str, Any]) -> None:
    assert told["meetings"] == [[[number, rank] for rank in range(2)] for number in range(20)]
