"""Whether all that a training learns from is there: read before any GPU is taken or folder begun. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress

from gpuherd.errors import BadModel, GpuherdError, MissingModel, UsageError
from gpuherd.posttrain.data.chat import refuse_without_template
from gpuherd.posttrain.data.preference_rows import Conversation, Messages
from gpuherd.posttrain.engine.callbacks import check_callbacks
from gpuherd.posttrain.envs.interface import Environments
from gpuherd.posttrain.learning.config import EnvBlock, TrainConfig
from gpuherd.posttrain.learning.data import all_but_test, check_turns, make_environments, problems_of
from gpuherd.posttrain.learning.options import algorithm_options, problems_wanted
from gpuherd.posttrain.rewards.function import FunctionRewards
from gpuherd.posttrain.rollout.lengths import Texts
from gpuherd.posttrain.types import Problem, Split


def check_data(config: TrainConfig) -> Texts | None:
    """What is learnt from, as far as it is known before: None of environments of one's own, which are left out, since
    their code runs in the training's processes alone.

    Raises UsageError, naming the key, for problems that are not there, too few of them, or of a kind that the algorithm
    can't learn from, and for options that it doesn't take; and what reading files and data sets raises.
    """
    told = config.training
    check_callbacks(config.callbacks)
    count = told.num_rollouts_per_iteration  # enough, where they can't be counted here
    texts = None
    if config.policy_env is not None and config.policy_env.env_type != "custom":
        with closing(make_environments("policy_env", config.policy_env, "cpu")) as environments:
            check_turns(config, environments)
            found = problems_of(environments, "policy_env", Split.TRAIN, problems_wanted(config), told.seed)
            count = len(found)
            _check_reward("policy_env", config.policy_env, found)
            words = _first_words(environments, found, told.seed)
            source = f"{len(found)} training problems of {environments.name}{_left_out(environments, told.seed)}"
            texts = Texts(words, turns=environments.most_turns, source=source)
    algorithm_options(config, count)
    if told.eval_every:
        for number, block in enumerate(config.eval_envs):
            _check_evaluation(f"eval_envs[{number}]", block, config)
    return texts if told.data_file is None else _read_file(told.data_file, config)


def _check_evaluation(where: str, block: EnvBlock, config: TrainConfig) -> None:
    if block.env_type == "custom":
        return
    with closing(make_environments(where, block, "cpu")) as environments:
        found = problems_of(environments, where, Split.TEST, config.training.eval_episodes, config.training.seed)
        _check_reward(where, block, found)


def _check_reward(where: str, block: EnvBlock, problems: Sequence[Problem]) -> None:
    """Raises UsageError for a reward function that can't score these problems."""
    if block.reward is not None:
        try:
            with FunctionRewards(block.reward, block.reward_timeout) as scoring:
                scoring.check(problems)
        except UsageError as problem:
            raise UsageError(f"{where}: {problem}") from None


def _first_words(environments: Environments, problems: Sequence[Problem], seed: int) -> list[str]:
    """What stands before the policy's first turn."""
    environment = environments.make()
    return ["\n\n".join(each.content for each in environment.reset(problem, seed).messages) for problem in problems]


def _left_out(environments: Environments, seed: int) -> str:
    """How many problems are in the other splits, for people."""
    counts = {}
    for split in (Split.HELDOUT, Split.TEST):
        with suppress(GpuherdError):  # a split that is not there
            counts[split] = len(environments.problems(split, None, seed))
    words = [
        f"{count} more are {'held out' if split is Split.HELDOUT else 'its test'}" for split, count in counts.items()
    ]
    return "".join(f"; {each}" for each in words)


def _read_file(file: str, config: TrainConfig) -> Texts:
    if config.training.algorithm == "dpo":
        from gpuherd.posttrain.preference.data import read_preferences

        told = read_preferences(file, limit=config.training.max_problems)
        answers = [said for each in told.pairs for said in (each.chosen, each.rejected)]
        source = "; ".join(filter(None, (f"{len(told.pairs)} preferences of {file}", told.refusals())))
        return Texts([_text_of(each.prompt) for each in told.pairs], answers, 1, source)
    return _demonstrations(file, config)


def _demonstrations(file: str, config: TrainConfig) -> Texts:
    from gpuherd.posttrain.data.options import TaskOptions
    from gpuherd.posttrain.data.registry import is_task, make_task

    count, seed = config.training.max_problems, config.training.seed
    if is_task(file):
        with closing(make_task(file, TaskOptions())) as task:
            found = all_but_test(task, count, seed)
            source = f"{len(found)} training problems of {task.name}; its test is left out"
        return Texts([each.prompt for each in found], [each.answers[0] for each in found if each.answers], 1, source)
    from gpuherd.posttrain.preference.data import read_demonstrations

    if config.sft.filter_low_reward:
        raise UsageError(
            f"sft.filter_low_reward: the rows of {file} are scored by nothing; leave it out, or name a task by "
            "training.data_file"
        )
    read = read_demonstrations(file, limit=count)
    if any(isinstance(each.example, Conversation) for each in read.shown):
        _check_template(config.model.model_name_or_path, file)
    said = "; ".join(filter(None, (read.sentence, read.refusals())))
    pairs = [pair for each in read.shown for pair in each.pairs]
    return Texts([prompt for prompt, _ in pairs], [answer for _, answer in pairs], 1, said)


def _check_template(model: str, file: str) -> None:
    """Raises UsageError for conversations and a model without a chat template, where its files can be read."""
    from gpuherd.models.load.identity import model_files

    try:
        folder = model_files(model).tokenizer_folder
    except (MissingModel, BadModel):
        return  # planning or loading the model reports it
    try:
        refuse_without_template(folder, model)
    except UsageError as problem:
        raise UsageError(f"training.data_file: {file} holds conversations: {problem}") from None


def _text_of(prompt: str | Messages) -> str:
    return prompt if isinstance(prompt, str) else "\n\n".join(said for _, said in prompt)
