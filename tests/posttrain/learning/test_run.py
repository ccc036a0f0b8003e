"""Processes and machines of a training, and the command that starts them."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuherd.errors import UsageError
from gpuherd.posttrain.learning.run import check_port, command, placed
from gpuherd.posttrain.learning.settings import TrainSettings, settings_of
from gpuherd.posttrain.runs.options import Where


def distributed(**keys: Any) -> TrainSettings:
    """A training that is placed so."""
    return settings_of({"policy_env": {"dataset": "arithmetic"}, "distributed": keys})


def processes_of(told: TrainSettings) -> tuple[int, int, bool, tuple[int, ...] | None]:
    """Processes here, in all, whether they are on the CPU, and which GPUs they take."""
    return told.here, told.processes, told.on_cpu, told.gpu_ids


def test_the_command_line_stands_above_the_file() -> None:
    told = distributed(enabled=True, num_gpus=4, gpu_ids=[0, 1, 2, 3], strategy="fsdp")
    assert processes_of(placed(told, Where(num_gpus=2))) == (2, 2, False, None)
    assert placed(told, Where(gpu_ids=(0, 2, 3))).gpu_ids == (0, 2, 3)
    assert processes_of(placed(told, Where(device="cpu"))) == (4, 4, True, None)
    assert placed(told, Where(nnodes=2, node_rank=1, master_port=29501)).processes == 8
    # One GPU of a file that trains on four.
    assert processes_of(placed(told, Where(num_gpus=1))) == (1, 1, False, None)


def test_flags_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="--num-gpus 3, and --gpu-ids names 2"):
        placed(distributed(), Where(num_gpus=3, gpu_ids=(0, 1)))
    with pytest.raises(UsageError, match="master_port is missing"):
        placed(distributed(), Where(nnodes=2))


def test_one_process_needs_no_torchrun(tmp_path: Path) -> None:
    words = command(distributed(), tmp_path, on_cpu=True)
    assert words[:3] == [sys.executable, "-m", "gpuherd.posttrain.learning"]
    assert words[-2:] == ["--device", "cpu"] and str(tmp_path) in words


def test_several_are_torchrun_s(tmp_path: Path) -> None:
    told = distributed(num_gpus=2)
    words = command(told, tmp_path, on_cpu=False)
    assert words[1:5] == ["-m", "gpuherd.posttrain.runs.launch", "--nproc-per-node=2", "--standalone"]
    told = distributed(num_gpus=2, master_port=29777)
    assert "--master-port=29777" in command(told, tmp_path, on_cpu=False)
    told = distributed(num_gpus=8, num_nodes=2, node_rank=1, master_addr="10.0.0.1", master_port=29500)
    words = command(told, tmp_path, on_cpu=False)
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500"} <= set(words)


def test_a_port_in_use_is_told() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"master_port={port} can't be listened at"):
            check_port(distributed(num_gpus=2, master_port=port))
        check_port(distributed(num_gpus=1, master_port=port))  # nobody listens
        check_port(distributed(num_gpus=2, num_nodes=2, node_rank=1, master_port=port))  # the other machine does
    check_port(distributed(num_gpus=2, master_port=port))


def test_a_cluster_says_where_its_machines_are(tmp_path: Path) -> None:
    """What a file says of machines that its user starts is none of a cluster's; torchrun reads it where it starts."""
    by_hand = distributed(gpu_ids=[4, 5], num_nodes=2, node_rank=1, master_addr="10.0.0.1", master_port=29500)
    told = placed(by_hand, Where(), "slurm")
    assert processes_of(told) == (2, 4, False, None)
    words = command(told, tmp_path, on_cpu=False, engine="slurm")
    assert words[:4] == [sys.executable, "-m", "gpuherd.posttrain.runs.launch", "--nproc-per-node=2"]
    assert words[4:6] == ["-m", "gpuherd.posttrain.learning"]
    assert "--standalone" in command(distributed(num_gpus=2), tmp_path, on_cpu=False)
    assert placed(distributed(), Where(nnodes=2), "ray").machines == 2
    one = placed(distributed(), Where(), "slurm")
    assert command(one, tmp_path, on_cpu=True, engine="slurm")[1] == "-m"


@pytest.mark.parametrize(
    ("where", "flag"),
    [
        (Where(gpu_ids=(0,)), "--gpu-ids"),
        (Where(nnodes=2, node_rank=0), "--node-rank"),
        (Where(nnodes=2, master_addr="a"), "--master-addr"),
        (Where(nnodes=2, master_port=29500), "--master-port"),
    ],
)
def test_machines_started_by_hand_are_none_of_a_cluster(where: Where, flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag} is for machines that you start yourself; --engine slurm chooses"):
        placed(distributed(), where, "slurm")
