"""A small training by ``gpuherd train``, as tests give it to several nodes: GRPO on sums."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.posttrain import tiny

from gpuherd.posttrain.engine.curves import read_curves

STEPS = 60


def configuration(folder: Path, save_every: int = 1000) -> Path:
    """Its file; a checkpoint so often, at the end, and where it is stopped."""
    config: dict[str, Any] = {
        "experiment_name": "sums",
        "training": {
            "algorithm": "grpo",
            "num_iterations": STEPS,
            "num_rollouts_per_iteration": 8,
            "batch_size": 8,
            "learning_rate": 1e-3,
            "save_every": save_every,
        },
        "model": {"model_name_or_path": str(tiny.tiny_llama(folder / "model")), "max_new_tokens": 4},
        "policy_env": {
            "env_type": "math",
            "problems": [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(12)],
        },
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return path


def train(file: Path, output: Path, *words: str) -> list[str]:
    """The command's words."""
    told = [sys.executable, "-m", "gpuherd", "train", "--config", str(file), "--output", str(output)]
    return [*told, "--device=cpu", *words]


def curves(output: Path) -> list[dict[str, Any]]:
    """Without what differs from run to run."""
    return [{name: value for name, value in row.items() if "second" not in name} for row in read_curves(output)]
