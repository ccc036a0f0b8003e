"""A training goes on exactly where it was killed, stops when asked, refuses what is not its own, and leaves no half."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.posttrain.engine.fitted import train
from tests.posttrain.preference.vowels import comparisons, training

from gpuherd.engines import progress
from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.dpo import DPO
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.engine.fit import RECORD
from gpuherd.posttrain.engine.options import Optimizer, StepOptions, Stopped
from gpuherd.posttrain.engine.train_engine import NotFinite
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.types import Precision

OPTIONS: dict[str, Any] = {"lr": 1e-3, "batch_size": 2, "epochs": 2, "save_every": 2, "scheduler": "linear"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the model, or of the adapter, that a training left in a folder."""
    return weights_of(folder / "model")


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (file,) = model.glob("*.safetensors")
    found: dict[str, torch.Tensor] = load_file(file)
    return found


def assert_equal(one: Path, other: Path) -> None:
    """To the bit, curves too."""
    found = weights(other)
    assert all(torch.equal(tensor, found[name]) for name, tensor in weights(one).items())
    assert read_curves(one) == read_curves(other)


def test_stops_when_asked_and_goes_on_exactly(
    policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "progress"))
    dpo, rows = DPO(DPO.Options(**OPTIONS)), comparisons()
    dpo.train(training(policy_model, rows, tmp_path / "whole"))
    asked = iter([False, False, True])
    hooks = Hooks(save_every=2, stopping=lambda: next(asked))
    halved = tmp_path / "halved"
    with pytest.raises(Stopped, match="stopped after step 3 of 8; the same command goes on from there"):
        dpo.train(training(policy_model, rows, halved, extra={"hooks": hooks}))
    assert progress.read(tmp_path / "progress") == progress.Progress(3, 8, "DPO training")
    assert sorted(path.name for path in (halved / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    (halved / "checkpoints" / ".step-00000006.tmp").mkdir()  # as of a kill in the midst of writing
    with pytest.raises(
        UsageError, match=r"step-00000003 is a checkpoint of another training: its seed is 0, here it is 1"
    ):
        dpo.train(training(policy_model, rows, halved, seed=1))
    dpo.train(training(policy_model, rows, halved))
    assert_equal(tmp_path / "whole", halved)
    assert not (halved / "checkpoints").exists()


def test_what_is_done_is_not_done_again(policy_model: Path, tmp_path: Path) -> None:
    dpo, rows = DPO(DPO.Options(**{**OPTIONS, "max_steps": 1})), comparisons()
    policy = dpo.train(training(policy_model, rows, tmp_path))
    made = (tmp_path / "model" / RECORD).stat().st_mtime_ns
    assert (
        dpo.train(training(policy_model, rows, tmp_path)) == policy == dpo.policy(training(policy_model, [], tmp_path))
    )
    assert (tmp_path / "model" / RECORD).stat().st_mtime_ns == made
    assert not (tmp_path / "model" / "training_args.bin").exists()
    with pytest.raises(UsageError, match="is of another training: its data is"):
        dpo.train(training(policy_model, rows[:4], tmp_path))
    with pytest.raises(UsageError, match=r'its precision is \[null, null\], and here it is \["float32", "bfloat16"\]'):
        dpo.train(training(policy_model, rows, tmp_path, precision=Precision("float32", "bfloat16")))


def test_checkpoints_of_an_earlier_version_are_refused(policy_model: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "checkpoint-2").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"begun by an earlier version; remove .*checkpoints and start again"):
        DPO(DPO.Options(**OPTIONS)).train(training(policy_model, comparisons(), tmp_path))


def test_processes_that_prepare_rows_change_nothing(policy_model: Path, tmp_path: Path) -> None:
    for name, workers in (("none", 0), ("one", 1)):
        options = DPO.Options(**{**OPTIONS, "max_steps": 2}, num_workers=workers)
        DPO(options).train(training(policy_model, comparisons(), tmp_path / name))
    assert_equal(tmp_path / "none", tmp_path / "one")


@pytest.mark.slow
def test_a_loss_that_is_no_number(policy_model: Path, tmp_path: Path) -> None:
    """Stops before anything is saved of it."""
    dpo = DPO(DPO.Options(lr=1e30, batch_size=8, epochs=4, optimizer=Optimizer.SGD, grad_clip=None, save_every=1))
    with pytest.raises(NotFinite, match=r"DPO training: step \d: the (loss is|gradient's norm is) (nan|inf)"):
        dpo.train(training(policy_model, comparisons(), tmp_path))
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_smaller_micro_batches_where_memory_runs_out(
    policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step stays what it was; halved until it fits. (What stands in for memory here is how many rows torch embeds
    at once.)"""
    rows = comparisons()
    dpo = DPO(DPO.Options(lr=1e-2, batch_size=8, epochs=3, save_every=1))
    dpo.train(training(policy_model, rows, tmp_path / "roomy", steps=StepOptions(micro_batch_size=8)))
    embed = torch.nn.Embedding.forward

    def scarce(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        if ids.shape[0] > 4:  # a pair has two rows
            raise torch.OutOfMemoryError("CUDA out of memory")
        return embed(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        dpo.train(training(policy_model, rows, tmp_path / "failing", steps=StepOptions(micro_batch_size=8)))
    steps = StepOptions(micro_batch_size=8, dynamic_batch_size=True)
    with caplog.at_level(logging.WARNING):
        dpo.train(training(policy_model, rows, tmp_path / "scarce", steps=steps))
    assert "memory ran out with 8 items at once; going on with 4" in caplog.text
    assert "memory ran out with 4 items at once; going on with 2" in caplog.text
    one, other = ([line["loss"] for line in read_curves(tmp_path / name)] for name in ("roomy", "scarce"))
    assert one == pytest.approx(other, rel=1e-4)
    assert len(other) == 3


SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.posttrain.engine.fitted import train
from tests.posttrain.preference.vowels import comparisons, training
from gpuherd.posttrain.algos.dpo import DPO
from gpuherd.posttrain.engine.options import Optimizer, StepOptions
model, folder, options, steps = sys.argv[1:5]
work = training(Path(model), comparisons(), Path(folder), steps=StepOptions(**json.loads(steps)))
DPO(DPO.Options(**json.loads(options))).train(work)
"""

ALL = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.posttrain.preference.vowels import comparisons, episodes, training
from gpuherd.posttrain.algos.dpo import DPO
from gpuherd.posttrain.algos.sft import SFT
from gpuherd.posttrain.preference.reward_model import RewardTraining, train_reward_model
from gpuherd.posttrain.engine.options import Lora, StepOptions
from gpuherd.posttrain.engine.dist_env import DistEnv
model, folder, strategy = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
steps = StepOptions(micro_batch_size=3, strategy=strategy)
words = {"batch_size": 4, "epochs": 3, "lr": 1e-2}
with DistEnv.from_environment("cpu"):
    DPO(DPO.Options(**words, rpo_weight=1.0)).train(training(model, comparisons(), folder / "rpo", steps=steps))
    for mode in ("behavioral_cloning", "combined"):
        SFT(SFT.Options(**words, mode=mode)).train(training(model, episodes(), folder / mode, steps=steps))
    train_reward_model(
        comparisons(), str(model), folder / "reward", RewardTraining(epochs=2, batch_size=4, lr=1e-3), steps=steps
    )
    adapter = Lora(r=4, target_modules=("q_proj", "up_proj"))
    DPO(DPO.Options(**words, lora=adapter)).train(training(model, comparisons(), folder / "adapter", steps=steps))
    one = DPO.Options(**{**words, "batch_size": 1, "max_steps": 3}, rpo_weight=1.0)  # nothing for the second process
    DPO(one).train(training(model, comparisons(), folder / "lonely", steps=steps))
    DPO(DPO.Options(**{**words, "batch_size": 5})).train(training(model, comparisons(), folder / "uneven", steps=steps))
"""


def command(model: Path, folder: Path, options: dict[str, Any], **steps: Any) -> list[str]:
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    told = [str(script), str(model), str(folder), json.dumps(options), json.dumps(steps)]
    return [sys.executable, *told]


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["src", "."])}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_wherever_it_is_it_ends_as_if_undisturbed(policy_model: Path, tmp_path: Path) -> None:
    """Killed at five moments of its work, by files that come and go; the last start ends."""
    options = {**OPTIONS, "epochs": 12, "save_every": 1}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(policy_model, whole, options), check=True, env={**os.environ, **ENVIRONMENT})
    for wanted in (1, 7, 13, 20, 30):
        child = subprocess.Popen(command(policy_model, killed, options), env={**os.environ, **ENVIRONMENT})
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and child.poll() is None:
            if list((killed / "checkpoints").glob(f"step-{wanted:08d}")):
                break
            time.sleep(0.002)
        assert child.poll() is None, "it ended before it could be killed"
        child.send_signal(signal.SIGKILL)
        child.wait()
    subprocess.run(command(policy_model, killed, options), check=True, env={**os.environ, **ENVIRONMENT})
    assert_equal(whole, killed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_are_one(policy_model: Path, tmp_path: Path) -> None:
    """DDP and FSDP by gloo, all trainings in one life of the processes: the same losses as one process, and the same
    model, up to the order of additions."""
    script = tmp_path / "all.py"
    script.write_text(ALL)
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    for strategy, several in (("single", []), ("ddp", torchrun), ("fsdp", torchrun)):
        told = [str(script), str(policy_model), str(tmp_path / strategy), strategy]
        subprocess.run([sys.executable, *several, *told], check=True, env={**os.environ, **ENVIRONMENT})
    steps = {"rpo": 6, "behavioral_cloning": 5, "combined": 5, "reward": 4, "adapter": 6, "lonely": 3, "uneven": 5}
    for part, many in steps.items():
        one = read_curves(tmp_path / "single" / part)
        assert len(one) == many
        for strategy in ("ddp", "fsdp"):
            two = read_curves(tmp_path / strategy / part)
            for figure in one[0]:
                assert [line[figure] for line in one] == pytest.approx(
                    [line[figure] for line in two], rel=1e-4, abs=1e-5
                ), (part, strategy, figure)
            kept = weights(tmp_path / strategy / part)
            for name, tensor in weights(tmp_path / "single" / part).items():
                torch.testing.assert_close(tensor, kept[name], rtol=1e-3, atol=1e-4)


def in_two_processes(trainings: list[dict[str, Any]]) -> None:
    """All of these one after the other."""
    root = Path(__file__).parents[3]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.posttrain.engine.fitted", json.dumps(trainings)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'src'}:{root}"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_several_processes_go_on_exactly_and_others_go_on_from_theirs(policy_model: Path, tmp_path: Path) -> None:
    """To the bit by as many processes; by one instead of two, or two instead of one, but for the order of additions."""

    def told(name: str, strategy: str, stop_after: int = 0) -> dict[str, Any]:
        return {"model": str(policy_model), "folder": str(tmp_path / name), "strategy": strategy,
                "stop_after": stop_after}  # fmt: skip

    names = ("ddp", "fsdp")
    train(**told("one", "single"))
    for name in names:
        train(**told(f"{name} widened", "single", stop_after=3))
    halted = [told(f"{name} {way}", name, stop_after=3) for name in names for way in ("resumed", "narrowed")]
    in_two_processes([*(told(f"{name} straight", name) for name in names), *halted])
    for each in halted:
        assert not (Path(each["folder"]) / "model").exists()
    in_two_processes([told(f"{name} {way}", name) for name in names for way in ("resumed", "widened")])
    one = weights(tmp_path / "one")
    begun = weights_of(policy_model)
    moved = max(float((each - begun[name]).abs().max()) for name, each in one.items())
    for name in names:
        assert_equal(tmp_path / f"{name} straight", tmp_path / f"{name} resumed")
        train(**told(f"{name} narrowed", "single"))
        for way in ("straight", "narrowed", "widened"):
            found = weights(tmp_path / f"{name} {way}")
            apart = max(float((each - found[weight]).abs().max()) for weight, each in one.items())
            assert apart < 1e-4 * moved, (name, way, apart, moved)
            lines = zip(read_curves(tmp_path / "one"), read_curves(tmp_path / f"{name} {way}"), strict=True)
            for mine, theirs in lines:
                assert theirs == pytest.approx(mine, rel=1e-4, abs=1e-6), (name, way)
