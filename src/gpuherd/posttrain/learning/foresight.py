"""Whether all that a training learns from is there: read before any GPU is taken or folder begun. No torch."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.environments.interface import Environments
from gpuherd.posttrain.learning.config import EnvBlock, TrainConfig
from gpuherd.posttrain.learning.episodes import make_environments, problems_of
from gpuherd.posttrain.learning.translating import options_of, problems_wanted
from gpuherd.posttrain.problem import Split


def check_data(config: TrainConfig) -> None:
    """Raises UsageError, naming the key, for problems that are not there, too few of them, or of a kind that the
    algorithm can't learn from, and for options that it doesn't take; and what reading files and data sets raises.

    Environments of one's own are left out: their code runs in the training's processes alone.
    """
    told = config.training
    count = told.num_rollouts_per_iteration  # enough, where they can't be counted here
    if config.policy_env is not None and config.policy_env.env_type != "custom":
        with closing(make_environments("policy_env", config.policy_env, "cpu")) as environments:
            check_turns(config, environments)
            found = problems_of(environments, "policy_env", Split.TRAIN, problems_wanted(config), told.seed)
            count = len(found)
    algorithm_options(config, count)
    if told.eval_every:
        for number, block in enumerate(config.eval_envs):
            _check_evaluation(f"eval_envs[{number}]", block, config)
    if told.data_file is not None:
        _check_file(told.data_file, config)


def algorithm_options(config: TrainConfig, problems: int) -> Any:
    """The options of the algorithm's own kind. Raises UsageError."""
    name = config.training.algorithm.upper()
    return read(algorithm_class(name).Options, options_of(config, problems), name)


def check_turns(config: TrainConfig, environments: Environments) -> None:
    """Raises UsageError for dpo on episodes of several turns."""
    if config.training.algorithm == "dpo" and environments.most_turns > 1:
        raise UsageError(
            f"policy_env: dpo compares single answers, and an episode of {environments.name} has up to "
            f"{environments.most_turns} turns; set max_attempts: 1, or learn by ppo or grpo"
        )


def _check_evaluation(where: str, block: EnvBlock, config: TrainConfig) -> None:
    if block.env_type == "custom":
        return
    with closing(make_environments(where, block, "cpu")) as environments:
        problems_of(environments, where, Split.TEST, config.training.eval_episodes, config.training.seed)


def _check_file(file: str, config: TrainConfig) -> None:
    if config.training.algorithm == "dpo":
        from gpuherd.posttrain.preference.data import read_preferences

        read_preferences(file, limit=config.training.max_problems)
        return
    from gpuherd.posttrain.tasks.options import TaskOptions
    from gpuherd.posttrain.tasks.registry import make_task

    with closing(make_task(file, TaskOptions())) as task:
        task.problems(Split.TRAIN, problems_wanted(config), config.training.seed)
