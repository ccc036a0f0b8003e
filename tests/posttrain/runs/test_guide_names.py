"""The guide's names: experiments from Python, and its GPU manager over ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

import gpuherd.posttrain as posttrain
from gpuherd.errors import ExitCode, NoSuchGpu, UsageError
from gpuherd.jobs.queue.store import Queue
from gpuherd.posttrain import GPUManager, ParallelDataGenerator, ParallelJobExecutor, get_gpu_manager
from gpuherd.posttrain.runs.folder import BadRun
from gpuherd.posttrain.runs.options import RoundsOptions
from gpuherd.posttrain.runs.plan import JobDescription
from gpuherd.posttrain.types import Rollout
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


def words(models: tuple[Path, Path], output: Path, shards: int) -> list[str]:
    return [
        "experiment.name=python",
        f"output_dir={output}",
        "algos=[QSharp]",
        "algos.QSharp={samples_per_example:2,epochs:1}",
        "models=[]",
        f"models.tiny={{reference:{models[0]},value:{models[1]}}}",
        "datasets=[arithmetic]",
        "datasets.arithmetic.settings={digits:1,train:16,test:4}",
        "system.dtype=fp32",
        "training.gradient_checkpointing=false",
        "generation={max_new_tokens:3,batch_size:4,temperature:1,top_p:1}",
        "evaluation={num_samples:2,etas:[],base:false}",
        "rounds_of_training=1",
        f"data_collection.shards={shards}",
    ]


def test_an_executor_plans(policy_model: Path, value_model: Path, tmp_path: Path) -> None:
    executor = ParallelJobExecutor(
        words((policy_model, value_model), tmp_path / "out", 2),
        options=RoundsOptions(dry_run=True),
        console=Console(quiet=True),
    )
    assert executor.run().exit_code is ExitCode.OK
    assert [each.step.phase for each in executor.experiment.plan] == ["collect", "collect", "train", "evaluate"]


def test_options_are_those_of_the_command(policy_model: Path, value_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("rounds_of_training: 3")
    told = words((policy_model, value_model), tmp_path / "out", 1)
    told.remove("rounds_of_training=1")
    executor = ParallelJobExecutor(told, options=RoundsOptions(config=str(file)))
    assert executor.experiment.settings.rounds_of_training == 3
    for more, options in (([], RoundsOptions(resume=str(tmp_path))), ([f"resume_from={tmp_path}"], RoundsOptions())):
        with pytest.raises(BadRun):
            ParallelJobExecutor(more, options=options)
    with pytest.raises(UsageError, match="leave --config out"):
        ParallelJobExecutor([f"resume_from={tmp_path}"], options=RoundsOptions(config=str(file)))
    with pytest.raises(UsageError, match="with dry_run nothing is started"):
        ParallelDataGenerator(told, options=RoundsOptions(dry_run=True)).generate()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rows_are_the_same_from_any_number_of_workers_and_a_run_goes_on_with_them(
    adder: Path, classifier_base: Path, tmp_path: Path, standin: Callable[..., SimulatedMachine]
) -> None:
    standin("2x40GB")
    options = RoundsOptions(max_checks=1, check_interval=0.02)
    found = {}
    for shards in (1, 2):
        output = tmp_path / str(shards)
        generator = ParallelDataGenerator(
            words((adder, classifier_base), output, shards), options=options, console=Console(quiet=True), simulate=True
        )
        collected = generator.generate()
        assert len(collected.figures) == shards
        (rows,) = collected.rows.values()
        found[shards] = [(row.problem, row.sample, row.ids, row.text) for row in rows if isinstance(row, Rollout)]
        assert not generator.experiment.folder.done.exists()
    assert found[1] == found[2] and len(found[1]) == 32
    executor = ParallelJobExecutor(
        words((adder, classifier_base), tmp_path / "2", 2), options=options, console=Console(quiet=True), simulate=True
    )
    outcome = executor.run()
    assert outcome.complete and executor.experiment.folder.root == generator.experiment.folder.root
    queue = Queue(executor.experiment.folder.queue)
    try:
        assert sum("collect" in each.job for each in queue.attempts()) == 2  # those of the generator
    finally:
        queue.close()
