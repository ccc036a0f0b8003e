"""What a training learns from is looked at before anything is taken or begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuherd.errors import GpuherdError, UsageError
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.learning.config import TrainConfig
from gpuherd.posttrain.learning.foresight import check_data

ENV = {"env_type": "math", "problems": [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(12)]}
FEW = {"num_rollouts_per_iteration": 4}


def config(algorithm: str, training: dict[str, Any], **blocks: Any) -> TrainConfig:
    found: TrainConfig = read(TrainConfig, {"training": {"algorithm": algorithm, **training}, **blocks})
    return found


@pytest.mark.parametrize(
    ("algorithm", "training", "blocks", "told"),
    [
        ("grpo", {"num_rollouts_per_iteration": 64}, {"policy_env": ENV}, "asks for 16 problems a step, and there are"),
        ("ppo", {"max_problems": 99}, {"policy_env": ENV}, "policy_env: .*99 problems were asked for"),
        (
            "ppo",
            {"num_rollouts_per_iteration": 4},
            {"policy_env": ENV, "eval_envs": [ENV]},
            r"eval_envs\[0\]: .*10 pro",
        ),
        ("ppo", {}, {"policy_env": {"dataset": "arithmetik"}}, "policy_env: no task .*did you mean arithmetic"),
        ("dpo", {}, {"policy_env": {**ENV, "max_attempts": 2}}, "dpo compares single answers"),
        ("sft", {"data_file": "arithmetik"}, {}, "did you mean arithmetic"),
    ],
)
def test_what_is_not_there_is_told(algorithm: str, training: Any, blocks: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check_data(config(algorithm, training, **blocks))


def test_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b"}))
    with pytest.raises(GpuherdError, match="rejected"):
        check_data(config("dpo", {"data_file": str(file)}))
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    check_data(config("dpo", {"data_file": str(file)}))
    check_data(config("sft", {"data_file": "arithmetic", "max_problems": 8}))


def test_what_is_there_is_enough() -> None:
    few = {**FEW, "eval_episodes": 1}
    check_data(config("ppo", few, policy_env=ENV, eval_envs=[ENV]))
    # Nothing is evaluated: nothing has to be there for it. Environments of one's own are the processes' business.
    check_data(config("ppo", {**few, "eval_every": 0, "eval_episodes": 99}, policy_env=ENV, eval_envs=[ENV]))
    own = {"env_type": "custom", "custom_class": "nowhere.Env", "dataset": "x"}
    check_data(config("ppo", few, policy_env=own))
