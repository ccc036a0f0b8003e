"""Checkpoints: of which a training goes on exactly, complete or absent."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors import safe_open
from tests.posttrain.engine.nets import Net, held, net, trained, trainee, write_former
from torch.distributed.checkpoint.api import CheckpointException

from gpuherd.errors import CannotWrite, UsageError
from gpuherd.posttrain.engine import checkpoints
from gpuherd.posttrain.engine.checkpoints import Checkpoints, DamagedCheckpoint
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.options import OptimiserOptions

WORLD = DistEnv.single()
SHARD = "shard-00001-model-00001-of-00001.safetensors"


def test_a_training_goes_on_exactly(tmp_path: Path) -> None:
    whole = trainee(net(dropout=0.3))
    torch.manual_seed(7)
    first = trained(whole, range(3))
    Checkpoints(tmp_path, WORLD).save(3, whole, {"place": [1, 2]})
    then = trained(whole, range(3, 6))
    drawn = (random.random(), numpy.random.random())

    again = trainee(net(seed=9, dropout=0.3))
    restored = Checkpoints(tmp_path, WORLD).restore(again)
    assert restored is not None and (restored.step, restored.extra, again.steps_done) == (3, {"place": [1, 2]}, 3)
    assert trained(again, range(3, 6)) == then and len(first) == 3
    assert (random.random(), numpy.random.random()) == drawn
    for one, other in zip(whole.plain.state_dict().values(), again.plain.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_only_the_newest_ones_stay(tmp_path: Path) -> None:
    one, kept = trainee(), Checkpoints(tmp_path, WORLD, keep=2)
    assert kept.latest() is None
    for step in (1, 2, 10):
        kept.save(step, one, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000010"]
    latest = kept.latest()
    assert latest is not None and latest.step == 10


def test_what_a_kill_left_is_passed_over_and_removed(tmp_path: Path) -> None:
    one, kept = trainee(), Checkpoints(tmp_path, WORLD)
    kept.save(1, one, {})
    half = tmp_path / ".step-00000002.tmp"
    half.mkdir()
    (half / "checkpoint.json").write_text("{")
    latest = kept.latest()
    assert latest is not None and latest.step == 1
    kept.save(3, one, {})
    assert not half.exists()


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    Checkpoints(tmp_path, WORLD, identity={"model": "a", "seed": 1}).save(1, trainee(), {})
    with pytest.raises(UsageError, match="its model is 'a', here it is 'b'"):
        Checkpoints(tmp_path, WORLD, identity={"model": "b", "seed": 1}).latest()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, WORLD)
    kept.save(1, trainee(), {})
    with pytest.raises(UsageError, match=r"layers\.3\.linear\.weight is absent there and 6x6 here"):
        kept.restore(trainee(Net(blocks=4)))


def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, WORLD)
    path = kept.save(1, trainee(), {})
    part = path / SHARD
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match="shard-00001"):
        kept.latest()
    about = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**about, "format": 99}))
    with pytest.raises(UsageError, match="format 99"):
        kept.latest()


@pytest.mark.parametrize("name", [SHARD, "random-00000.json"])
def test_files_of_the_right_length_that_hold_something_else_are_told(tmp_path: Path, name: str) -> None:
    kept = Checkpoints(tmp_path, WORLD)
    path = kept.save(1, trainee(), {})
    (path / name).write_bytes(b"{" + b"\xff" * ((path / name).stat().st_size - 1))
    with pytest.raises(DamagedCheckpoint, match=r"can't be read .*; remove it"):
        kept.restore(trainee())


def test_a_kill_while_a_step_is_saved_again_loses_nothing(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, WORLD)
    kept.save(1, trainee(), {"place": 1}).rename(tmp_path / ".step-00000001.old")
    (tmp_path / ".step-00000001.tmp").mkdir()
    restored = kept.restore(trainee())
    assert restored is not None and restored.extra == {"place": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_large_ones_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is put together in memory: none is larger than is allowed, but for a tensor that is."""
    monkeypatch.setattr(checkpoints, "FILE_BYTES", 300)
    one = trainee()
    trained(one, range(2))
    path = Checkpoints(tmp_path, WORLD).save(2, one, {})
    files = list(path.glob("*.safetensors"))
    assert len(files) > 4
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert sum(opened.get_tensor(name).nbytes for name in set(opened.keys())) <= 300
    again = trainee(net(9))
    Checkpoints(tmp_path, WORLD).restore(again)
    assert held(again) == held(one)


class Killed(BaseException):
    """Stands for a SIGKILL: no handler of ours catches it."""


def test_killed_at_any_moment_of_a_save_the_last_good_one_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dies before each write, sync and rename in turn, of a new step and of one that is there already."""
    one = trainee()
    trained(one, range(1))
    for step in (1, 2):
        for moment in range(100):
            folder = tmp_path / f"{step} {moment}"
            kept = Checkpoints(folder, WORLD)
            kept.save(1, one, {"place": 1})
            left = iter(range(moment))

            def dying(work: Callable[..., Any], left: Iterator[int] = left) -> Callable[..., Any]:
                def counted(*given: Any, **words: Any) -> Any:
                    if next(left, None) is None:
                        raise Killed
                    return work(*given, **words)

                return counted

            with monkeypatch.context() as patched:
                for name in ("rename", "write_text", "open", "mkdir"):
                    patched.setattr(Path, name, dying(getattr(Path, name)))
                patched.setattr(os, "fsync", dying(os.fsync))
                patched.setattr(shutil, "rmtree", dying(shutil.rmtree))
                done = False
                with suppress(Killed, CheckpointException):
                    kept.save(step, one, {"place": 10 + step})
                    done = True
            again = trainee(net(4))
            restored = Checkpoints(folder, WORLD).restore(again)
            assert restored is not None and restored.extra["place"] in (1, 10 + step)
            assert held(again) == held(one)
            if done:
                break
        assert done and moment > 8


def test_the_versions_before_are_read(tmp_path: Path) -> None:
    one = trainee()
    trained(one, range(3))
    write_former(tmp_path, one, 3)
    again = trainee(net(9))
    restored = Checkpoints(tmp_path, WORLD).restore(again)
    assert restored is not None and restored.extra == {"place": 3} and again.steps_done == 3
    assert held(again) == held(one)
    assert trained(again, range(3, 5)) == trained(one, range(3, 5))


@pytest.mark.parametrize("name", ["part-00000.safetensors", "part-00001.json"])
def test_damaged_ones_of_the_version_before_are_told(tmp_path: Path, name: str) -> None:
    path = write_former(tmp_path, trainee(), 1)
    (path / name).write_bytes(b"{" + b"\xff" * ((path / name).stat().st_size - 1))
    with pytest.raises(DamagedCheckpoint, match=r"can't be read .*; remove it"):
        Checkpoints(tmp_path, WORLD).restore(trainee())


def test_another_number_of_processes_draws_by_the_checkpoint_and_the_rank(tmp_path: Path) -> None:
    torch.manual_seed(3)
    Checkpoints(tmp_path, WORLD).save(1, trainee(), {})
    restored = Checkpoints(tmp_path, WORLD).latest()
    assert restored is not None
    drawn = []
    for rank in (0, 0, 1):
        torch.manual_seed(99)
        Checkpoints(tmp_path, DistEnv(rank, 3, rank, "cpu", "gloo")).load(restored, trainee())
        drawn.append((torch.rand(()).item(), random.random(), numpy.random.random()))
    assert drawn[0] == drawn[1] and not set(drawn[0]) & set(drawn[2])


def test_what_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="file"):
        Checkpoints(tmp_path / "file", WORLD).save(1, trainee(), {})
    with pytest.raises(CannotWrite, match="extra"):
        Checkpoints(tmp_path, WORLD).save(1, trainee(), {"loss": float("nan")})
    assert Checkpoints(tmp_path, WORLD).latest() is None


def test_loss_scales_and_states_without_tensors_are_kept(tmp_path: Path) -> None:
    one = trainee(amp_dtype="float16", optimiser=OptimiserOptions(0.1, optimizer="sgd"))  # type: ignore[arg-type]
    trained(one, range(1))
    one.scaler.update(new_scale=512.0)
    Checkpoints(tmp_path, WORLD).save(1, one, {})
    again = trainee(amp_dtype="float16", optimiser=OptimiserOptions(0.1, optimizer="sgd"))  # type: ignore[arg-type]
    Checkpoints(tmp_path, WORLD).restore(again)
    assert again.scaler.get_scale() == 512.0


@pytest.mark.slow
def test_eight_bit_states_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    options = OptimiserOptions(0.05, optimizer="adamw-8bit")  # type: ignore[arg-type]
    one = trainee(optimiser=options)
    trained(one, range(2))
    Checkpoints(tmp_path, WORLD).save(2, one, {})
    again = trainee(net(3), optimiser=options)
    Checkpoints(tmp_path, WORLD).restore(again)
    assert trained(again, range(2, 4)) == trained(one, range(2, 4))

    def step(large: Any) -> list[Any]:
        """Of weights that are large enough for codes, whose tables they share."""
        large.step([1], lambda _: sum(each.weight.sum() ** 2 for each in large.plain), len)
        return [each.weight.tolist() for each in large.plain]

    def large(seed: int) -> Any:
        torch.manual_seed(seed)
        return trainee(torch.nn.Sequential(*(torch.nn.Linear(128, 64) for _ in range(2))), optimiser=options)

    first, second = large(1), large(2)
    step(first)
    Checkpoints(tmp_path / "large", WORLD).save(1, first, {})
    Checkpoints(tmp_path / "large", WORLD).restore(second)
    assert any("absmax1" in name for name in held(first))
    assert step(second) == step(first)
