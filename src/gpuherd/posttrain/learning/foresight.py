"""Whether all that a training learns from is there: read before any GPU is taken or folder begun. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.environments.interface import Environments
from gpuherd.posttrain.learning.config import EnvBlock, TrainConfig
from gpuherd.posttrain.learning.episodes import make_environments, problems_of
from gpuherd.posttrain.learning.lengths import Texts
from gpuherd.posttrain.learning.translating import options_of, problems_wanted
from gpuherd.posttrain.problem import Problem, Split


def check_data(config: TrainConfig) -> Texts | None:
    """What is learnt from, as far as it is known before: None of environments of one's own, which are left out, since
    their code runs in the training's processes alone.

    Raises UsageError, naming the key, for problems that are not there, too few of them, or of a kind that the algorithm
    can't learn from, and for options that it doesn't take; and what reading files and data sets raises.
    """
    told = config.training
    count = told.num_rollouts_per_iteration  # enough, where they can't be counted here
    texts = None
    if config.policy_env is not None and config.policy_env.env_type != "custom":
        with closing(make_environments("policy_env", config.policy_env, "cpu")) as environments:
            check_turns(config, environments)
            found = problems_of(environments, "policy_env", Split.TRAIN, problems_wanted(config), told.seed)
            count = len(found)
            texts = Texts(_first_words(environments, found, told.seed), turns=environments.most_turns)
    algorithm_options(config, count)
    if told.eval_every:
        for number, block in enumerate(config.eval_envs):
            _check_evaluation(f"eval_envs[{number}]", block, config)
    return texts if told.data_file is None else _read_file(told.data_file, config)


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


def _first_words(environments: Environments, problems: Sequence[Problem], seed: int) -> list[str]:
    """What stands before the policy's first turn."""
    environment = environments.make()
    return ["\n\n".join(each.content for each in environment.reset(problem, seed).messages) for problem in problems]


def _read_file(file: str, config: TrainConfig) -> Texts:
    if config.training.algorithm == "dpo":
        from gpuherd.posttrain.preference.data import read_preferences

        pairs = read_preferences(file, limit=config.training.max_problems).pairs
        before = [
            each.prompt if isinstance(each.prompt, str) else "\n\n".join(said for _, said in each.prompt)
            for each in pairs
        ]
        return Texts(before, [said for each in pairs for said in (each.chosen, each.rejected)])
    from gpuherd.posttrain.tasks.options import TaskOptions
    from gpuherd.posttrain.tasks.registry import make_task

    with closing(make_task(file, TaskOptions())) as task:
        found = task.problems(Split.TRAIN, problems_wanted(config), config.training.seed)
    return Texts([each.prompt for each in found], [each.answers[0] for each in found if each.answers])
