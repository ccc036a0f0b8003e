"""A training in each of several processes, as torchrun starts them: ``python -m`` this, with a JSON of what to do."""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tests.posttrain.algos.training_work import work
from tests.posttrain.letters import Letters

from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.engine.dist_env import leave
from gpuherd.posttrain.engine.options import StepOptions, Stopped
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.types import BackendName


def train(told: dict[str, Any]) -> None:
    """Trains as is told: algorithm, options, model, folder, strategy, after which step to stop, if at all, and what
    decodes."""
    kind = algorithm_class(told["algorithm"])
    steps = StepOptions(micro_batch_size=8, strategy=told["strategy"])
    left = iter([False] * (told["stop_after"] - 1) + [True]) if told["stop_after"] else None
    hooks = Hooks(stopping=None if left is None else left.__next__)
    task = Letters(dull=told.get("dull", False))
    kind(kind.Options(**told["options"])).train(
        work(
            Path(told["model"]),
            Path(told["folder"]),
            hooks=hooks,
            steps=steps,
            task=task,
            backend=BackendName(told.get("backend", BackendName.HF)),
        )
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for each in json.loads(sys.argv[1]):  # each makes a group of processes of its own
        with suppress(Stopped):
            train(each)
    leave(0)
