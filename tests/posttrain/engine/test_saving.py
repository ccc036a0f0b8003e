"""A trained model is a folder that transformers reads, complete or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpuherd.atomic import aside, atomic_folder, settle
from gpuherd.errors import CannotWrite
from gpuherd.posttrain.engine.fit import save_model
from gpuherd.posttrain.engine.options import OptimiserOptions, StepOptions
from gpuherd.posttrain.engine.trainee import Trainee
from gpuherd.posttrain.engine.world import World


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
    trainee = Trainee(module, OptimiserOptions(0.1), StepOptions(), World.single(), total_steps=1)
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
