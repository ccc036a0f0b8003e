"""Small trainings on letters for the tests of algorithms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tests.posttrain.letters import Letters

from gpuherd.posttrain.engine.options import StepOptions
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.types import Policy, Precision, Sampling, Split, Training

SAMPLING = Sampling(max_new_tokens=6, batch_size=64, seed=1)


def work(model: Path, folder: Path, *, problems: int = 8, hooks: Hooks | None = None, **change: Any) -> Training:
    """A training on the first so many problems, everything in one micro-batch."""
    task = Letters()
    policy = Policy(str(model))
    words: dict[str, Any] = {
        "task": task,
        "problems": task.problems(Split.TRAIN, problems, 0),
        "rows": (),
        "policy": policy,
        "reference": policy,
        "value_model": None,
        "folder": folder,
        "round": 0,
        "sampling": SAMPLING,
        "precision": Precision(),
        "device": "cpu",
        "steps": StepOptions(micro_batch_size=64),
        "extra": {} if hooks is None else {"hooks": hooks},
    }
    return Training(**{**words, **change})


def curves(folder: Path) -> list[dict[str, float]]:
    """The lines of a training's curves, without times."""
    lines = [json.loads(line) for line in (folder / "curves.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a saved model or adapter."""
    from safetensors.torch import load_file

    return {name: each for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()}


def same(one: Path, other: Path) -> bool:
    """Whether two saved models have the same weights to the bit."""
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(each, second[name]) for name, each in first.items())
