"""The plan of a training on rows (their order, how many steps, what tells data apart), and the model that it leaves:
a folder that transformers reads, complete or absent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpuherd.atomic import aside, atomic_folder, settle
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.fit import TrainPlan, digest, order, save_every_for, save_model, steps_for
from gpuherd.posttrain.engine.options import OptimiserOptions, StepOptions, Watching
from gpuherd.posttrain.engine.train_engine import TrainEngine

small = st.integers(1, 40)


@given(rows=small, steps=small, batch=small, seed=st.integers(0, 3))
def test_every_row_comes_as_often_as_any_other(rows: int, steps: int, batch: int, seed: int) -> None:
    places = order(rows, steps, batch, seed)
    assert len(places) == steps * batch
    counts = Counter(places)
    assert max(counts.values()) - min(counts[row] for row in range(rows)) <= 1
    assert order(rows, steps + 1, batch, seed)[: len(places)] == places


def test_another_seed_and_another_epoch_have_another_order() -> None:
    first = order(20, 2, 20, 0)
    assert first[:20] != first[20:]
    assert order(20, 1, 20, 1) != first[:20]


@given(rows=small, epochs=small, batch=small)
def test_all_epochs_are_learnt_from(rows: int, epochs: int, batch: int) -> None:
    steps = steps_for(rows, epochs, batch)
    assert (steps - 1) * batch < rows * epochs <= steps * batch


def test_what_differs_has_another_digest() -> None:
    assert digest([{"a": [1, 2]}]) == digest([{"a": [1, 2]}])
    assert len({digest([{"a": [1, 2]}]), digest([{"a": [1]}, {"a": [2]}]), digest([])}) == 3


@pytest.mark.parametrize("words", [{"batch_size": 0}, {"total_steps": 0}, {"keep": 0}, {"save_every": 0}])
def test_bad_numbers(words: dict[str, Any]) -> None:
    watched: dict[str, Any] = {name: value for name, value in words.items() if name in ("keep", "save_every")}
    numbers: dict[str, Any] = {
        "batch_size": 8,
        "total_steps": 10,
        **{name: words[name] for name in words if name not in watched},
    }
    with pytest.raises(UsageError, match=f"DPO training: {next(iter(words))}=0; the least is 1"):
        TrainPlan(
            Path("somewhere"),
            "DPO training",
            OptimiserOptions(),
            StepOptions(),
            **numbers,
            watching=Watching(**watched),
        )


def test_checkpoints_are_not_too_many() -> None:
    assert save_every_for(10, None) == 25
    assert save_every_for(10_000, None) == 500
    assert save_every_for(10_000, 3) == 3


class Valued(nn.Module):
    """A policy with something beside it."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy, self.head = policy, nn.Linear(2, 1)


def loaded(folder: Path) -> Any:
    """The model in a folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("part", ["", "policy"])
def test_a_model_is_read_back(tmp_path: Path, policy_model: Path, part: str) -> None:
    from transformers import AutoTokenizer

    model = loaded(policy_model)
    module = Valued(model) if part else model
    trainee = TrainEngine(module, OptimiserOptions(0.1), StepOptions(), DistEnv.single(), total_steps=1)
    with torch.no_grad():
        model.lm_head.weight += 1
    save_model(trainee, tmp_path / "out" / "model", AutoTokenizer.from_pretrained(policy_model), part=part)
    again = loaded(tmp_path / "out" / "model")
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(each, again.state_dict()[name]) for name, each in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "model").eos_token_id == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="can't write the model"):
        save_model(trainee, tmp_path / "file" / "model", part=part)


def test_a_folder_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(RuntimeError), atomic_folder(folder) as temporary:
        (temporary / "half").write_text("")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    for text in ("old", "new"):
        with atomic_folder(folder) as temporary:
            (temporary / "inner").mkdir()
            (temporary / "inner" / "file").write_text(text)
            assert not folder.exists() or (folder / "inner" / "file").read_text() == "old"
    assert (folder / "inner" / "file").read_text() == "new" and list(tmp_path.iterdir()) == [folder]


def test_what_a_kill_left_is_settled(tmp_path: Path) -> None:
    folder, old = tmp_path / "model", tmp_path / ".model.old"
    # Killed between the two renames: the old one gets its name back.
    old.mkdir()
    (old / "file").write_text("old")
    aside(folder).mkdir()
    settle(folder)
    assert (folder / "file").read_text() == "old" and list(tmp_path.iterdir()) == [folder]
    # Killed behind them: the old one goes.
    old.mkdir()
    settle(folder)
    assert list(tmp_path.iterdir()) == [folder]
