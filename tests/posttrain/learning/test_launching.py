"""Which processes a training takes, and the words that start them."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.gpus.machines import gpu

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.learning.config import TrainConfig
from gpuherd.posttrain.learning.launching import (
    Processes,
    Where,
    check_port,
    command,
    environment,
    placed,
    processes_of,
)


def config(**distributed: Any) -> TrainConfig:
    """A configuration that trains so."""
    found: TrainConfig = read(TrainConfig, {"policy_env": {"dataset": "a"}, "distributed": distributed})
    return found


def test_the_command_line_stands_above_the_file() -> None:
    told = config(enabled=True, num_gpus=4, gpu_ids=[0, 1, 2, 3], strategy="fsdp")
    found = processes_of(placed(told, Where(num_gpus=2)))
    assert found == Processes(2, 2, False, None)
    assert processes_of(placed(told, Where(gpu_ids=(0, 2, 3)))).gpu_ids == (0, 2, 3)
    assert processes_of(placed(told, Where(device="cpu"))) == Processes(4, 4, True, None)
    assert processes_of(placed(told, Where(nnodes=2, node_rank=1, master_port=29501))).size == 8
    # One GPU of a file that trains on four.
    assert processes_of(placed(told, Where(num_gpus=1))) == Processes(1, 1, False, None)


def test_flags_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="--num-gpus 3, and --gpu-ids names 2"):
        placed(config(), Where(num_gpus=3, gpu_ids=(0, 1)))
    with pytest.raises(UsageError, match="master_port is missing"):
        placed(config(), Where(nnodes=2))


def test_one_process_needs_no_torchrun(tmp_path: Path) -> None:
    words = command(Processes(1, 1, False, None), config(), tmp_path, on_cpu=True)
    assert words[:3] == [sys.executable, "-m", "gpuherd.posttrain.learning"]
    assert words[-2:] == ["--device", "cpu"] and str(tmp_path) in words


def test_several_are_torchrun_s(tmp_path: Path) -> None:
    told = config(num_gpus=2)
    words = command(processes_of(told), told, tmp_path, on_cpu=False)
    assert words[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    told = config(num_gpus=2, master_port=29777)
    assert "--master-port=29777" in command(processes_of(told), told, tmp_path, on_cpu=False)
    told = config(num_gpus=8, num_nodes=2, node_rank=1, master_addr="10.0.0.1", master_port=29500)
    words = command(processes_of(told), told, tmp_path, on_cpu=False)
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500"} <= set(words)


def test_processes_see_their_gpus_alone() -> None:
    two = Processes(2, 2, False, None)
    gpus = [gpu(0), gpu(1)]
    found = environment({"PATH": "/bin", "OMP_NUM_THREADS": "3"}, gpus, 77, two)
    assert found["CUDA_VISIBLE_DEVICES"] == "0,1" and found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert (found["GPUHERD_TRAIN_STARTER"], found["OMP_NUM_THREADS"], found["PATH"]) == ("77", "3", "/bin")
    assert "CUDA_VISIBLE_DEVICES" not in environment({}, None, 77, two)


def test_a_port_in_use_is_told() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"master_port={port} can't be listened at"):
            check_port(config(num_gpus=2, master_port=port))
        check_port(config(num_gpus=1, master_port=port))  # nobody listens
        check_port(config(num_gpus=2, num_nodes=2, node_rank=1, master_port=port))  # the other machine does
    check_port(config(num_gpus=2, master_port=port))


def test_a_cluster_says_where_its_machines_are(tmp_path: Path) -> None:
    """What a file says of machines that its user starts is none of a cluster's; torchrun reads it where it starts."""
    by_hand = config(gpu_ids=[4, 5], num_nodes=2, node_rank=1, master_addr="10.0.0.1", master_port=29500)
    told = placed(by_hand, Where(), "slurm")
    assert processes_of(told) == Processes(2, 4, False, None)
    words = command(processes_of(told), told, tmp_path, on_cpu=False, engine="slurm")
    assert words[:4] == [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    assert words[4:6] == ["-m", "gpuherd.posttrain.learning"]
    assert "--standalone" in command(processes_of(config(num_gpus=2)), config(num_gpus=2), tmp_path, on_cpu=False)
    assert placed(config(), Where(nnodes=2), "ray").distributed.num_nodes == 2
    one = placed(config(), Where(), "slurm")
    assert command(processes_of(one), one, tmp_path, on_cpu=True, engine="slurm")[1] == "-m"


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
        placed(config(), where, "slurm")
