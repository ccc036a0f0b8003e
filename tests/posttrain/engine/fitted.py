"""DPO in each of several processes, as torchrun starts them: ``python -m`` this, with a JSON of the trainings."""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tests.posttrain.preference.vowels import comparisons, training

from gpuherd.posttrain.algos.dpo import DPO
from gpuherd.posttrain.engine.dist_env import leave
from gpuherd.posttrain.engine.options import StepOptions, Stopped, Strategy
from gpuherd.posttrain.policy_gradient.algorithm import Hooks

# Shares of a step are uneven, and one process has passes that don't count.
OPTIONS: dict[str, Any] = {
    "lr": 5e-3,
    "batch_size": 5,
    "epochs": 4,
    "save_every": 2,
    "scheduler": "linear",
    "eps": 1e-3,
}


def train(model: str, folder: str, strategy: str, stop_after: int = 0) -> None:
    """DPO by a strategy; with ``stop_after`` it is asked to stop behind that step."""
    asked = iter([False] * (stop_after - 1) + [True])
    hooks = Hooks(save_every=2, stopping=asked.__next__ if stop_after else None)
    steps = StepOptions(micro_batch_size=1, strategy=Strategy(strategy))
    work = training(Path(model), comparisons(), Path(folder), steps=steps, extra={"hooks": hooks})
    with suppress(Stopped):
        DPO(DPO.Options(**OPTIONS)).train(work)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for each in json.loads(sys.argv[1]):  # each makes a group of processes of its own
        train(**each)
    leave(0)
