"""Trains a classifier in as many processes as torchrun has started: ``together.py STRATEGY REFERENCE VALUE FOLDER``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from tests.posttrain.guidance.letters import training
from tests.posttrain.guidance.test_training import OPTIONS, rollouts

from gpuherd.posttrain.engine.dist_env import leave
from gpuherd.posttrain.engine.options import StepOptions, Strategy
from gpuherd.posttrain.guidance.data import of_rollouts
from gpuherd.posttrain.guidance.training import train_guide


def main(strategy: str, reference: str, small: str, folder: str) -> None:
    """Writes the folder."""
    import torch

    torch.set_num_threads(1)
    work = training(reference, small, Path(folder), [])
    steps = StepOptions(micro_batch_size=2, strategy=Strategy(strategy))
    train_guide(of_rollouts([rollouts()], OPTIONS), replace(work, steps=steps), OPTIONS)


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
