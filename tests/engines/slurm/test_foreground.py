"""srun's words for a command in the foreground."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from gpuherd.engines.base import Placement
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.slurm.foreground import environment, srun
from gpuherd.errors import UsageError

ARGV = ("python", "train.py", "--name", "two words; $HOME")


def words(
    asked: Placement | None = None, *, terminal: bool = False, wait_s: float | None = None, **more: Any
) -> list[str]:
    options = EngineOptions(engine="slurm", **more)
    return srun(ARGV, asked or Placement(gpus=1), options, name="mine", wait_s=wait_s, terminal=terminal)


def test_it_asks_for_what_is_asked() -> None:
    asked = Placement(gpus=2, nodes=3, cpus=8, memory_mb=4096, time_s=5400)
    found = words(asked, partition="gpu", account="lab", gpu_type="a100", slurm_args=("--exclude=n3",))
    ours = found[: found.index("/bin/sh")]
    assert ours == [
        "srun", "--job-name=mine", "--export=ALL", "--gres=gpu:a100:2", "--nodes=3", "--ntasks-per-node=1",
        "--cpus-per-task=8", "--mem=4096M", "--time=90", "--partition=gpu", "--account=lab", "--quit-on-interrupt",
        "--exclude=n3", "--mpi=none", "--wait=0",
    ]  # fmt: skip


def test_of_several_processes_the_first_starts_all_as_a_batch_does() -> None:
    found = words(Placement(gpus=2, nodes=3, tasks=4, cpus=8), mpi="pmix")
    assert "--ntasks-per-node=4" in found and "--cpus-per-task=2" in found
    inner = found[found.index("srun", 1) :]
    assert inner[: inner.index("/bin/sh")] == [
        "srun", "--nodes=3", "--ntasks=12", "--ntasks-per-node=4", "--kill-on-bad-exit=1", "--overlap", "--mem=0",
        "--quit-on-interrupt", "--export=ALL", "--mpi=pmix", "--cpus-per-task=2",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="7 CPU cores on each node can't be shared out among 4 processes"):
        words(Placement(gpus=0, tasks=4, cpus=7))


def test_the_command_stays_a_list_of_words() -> None:
    found = words()
    assert tuple(found[-len(ARGV) :]) == ARGV and found[found.index("/bin/sh") + 1] == "-c"
    assert not any("two words" in word for word in found[: -len(ARGV)])


def test_waiting_and_the_terminal() -> None:
    assert not any(word.startswith("--immediate") for word in words())
    assert "--immediate=1" in words(wait_s=0) and "--immediate=61" in words(wait_s=60.2)
    assert "--pty" in words(terminal=True) and "--quit-on-interrupt" not in words(terminal=True)


def test_words_that_are_ours_to_say_are_refused() -> None:
    with pytest.raises(UsageError, match="--nodes can't be given"):
        words(slurm_args=("--nodes=2",))
    with pytest.raises(UsageError, match="is no option of srun"):
        words(slurm_args=("sleep",))


def run_there(found: list[str], **own: str) -> str:
    """What the node's part of the words does, here."""
    shell = "/bin/bash" if "/bin/bash" in found else "/bin/sh"
    there = [*found[found.index(shell) : -len(ARGV)], "/bin/sh", "-c", 'env; echo "[$0|$1]"', "a  b", "c"]
    return subprocess.run(
        there, env={"PATH": "/usr/bin:/bin", **own}, capture_output=True, text=True, check=True
    ).stdout


def test_on_the_node_a_shell_becomes_the_command() -> None:
    told = run_there(
        words(Placement(gpus=1)), SLURM_EXIT_ERROR="75", SLURM_EXIT_IMMEDIATE="75", CUDA_VISIBLE_DEVICES="3"
    )
    assert "[a  b|c]" in told and "SLURM_EXIT" not in told and "CUDA_VISIBLE_DEVICES=3" in told
    assert "CUDA_VISIBLE_DEVICES=\n" in run_there(words(Placement(gpus=0)), CUDA_VISIBLE_DEVICES="NoDevFiles")
    set_up = run_there(words(setup=("export A=1  # a comment", "export B=$A$A")))
    assert "A=1\n" in set_up and "B=11\n" in set_up


def test_what_srun_inherits() -> None:
    own = {"HOME": "/h", "SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/s", "CUDA_VISIBLE_DEVICES": "5", "SRUN_X": "1"}
    found = environment(own, Placement(gpus=1, cpus=4))
    assert found == {
        "HOME": "/h", "SLURM_CONF": "/etc/s", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "SRUN_CPUS_PER_TASK": "4",
        "SLURM_EXIT_IMMEDIATE": "75", "SLURM_EXIT_ERROR": "75",
    }  # fmt: skip
    assert environment(own, Placement(gpus=0))["CUDA_VISIBLE_DEVICES"] == ""
