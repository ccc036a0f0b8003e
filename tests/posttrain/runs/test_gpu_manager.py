"""The guide's GPU manager over ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import gpuherd.posttrain as posttrain
from gpuherd.errors import NoSuchGpu, UsageError
from gpuherd.posttrain import GPUManager, get_gpu_manager
from gpuherd.posttrain.runs.priority import JobDescription
from gpuherd.standin.machine import SimulatedMachine


def test_names_load_when_they_are_used() -> None:
    assert all(getattr(posttrain, name) is not None for name in posttrain.__all__)
    assert set(posttrain.__all__) <= set(dir(posttrain))
    assert posttrain.TrainingJob is JobDescription
    with pytest.raises(AttributeError):
        posttrain.Nothing  # noqa: B018


def test_without_gpus() -> None:
    manager = get_gpu_manager()
    assert manager is get_gpu_manager()
    assert manager.num_gpus == 0 and manager.available_gpus == []
    assert manager.distribute_work([1, 2, 3]) == [[1, 2, 3]]
    assert "no GPUs are visible" in manager.memory_summary()
    with pytest.raises(NoSuchGpu, match="no GPU 0"):
        manager.get_gpu_memory(0)


def test_with_gpus(
    standin: Callable[..., SimulatedMachine],
    monkeypatch: pytest.MonkeyPatch,
    policy_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    standin("2x80GB")
    manager = GPUManager()
    assert manager.num_gpus == 2 and manager.available_gpus == [0, 1]
    assert manager.get_gpu_memory(1) == 80 and 79 < manager.get_free_memory(1) <= 80
    assert manager.distribute_work("abcde") == [["a", "c", "e"], ["b", "d"]]
    assert manager.get_optimal_batch_size(8) == 16
    assert manager.can_fit_model(str(policy_model)) and not manager.can_fit_model("llama-3.1-70b")
    manager.print_memory_summary()
    told = capsys.readouterr().out
    assert told.startswith("GPU Memory Summary:\n  GPU 0: ") and "80.00 GB total" in told
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert GPUManager().num_gpus == 1
    with pytest.raises(UsageError, match="num_workers=0"):
        manager.distribute_work([1], 0)
    with pytest.raises(UsageError, match="base_batch_size=0"):
        manager.get_optimal_batch_size(0)


@pytest.mark.parametrize(("size", "batch"), [("80GB", 16), ("40GB", 8), ("24GB", 4)])
def test_batches_by_the_guides_rule(standin: Callable[..., SimulatedMachine], size: str, batch: int) -> None:
    standin(f"1x{size}")
    assert GPUManager().get_optimal_batch_size(8) == batch
