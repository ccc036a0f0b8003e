"""What a training learns from, and what it is evaluated on: the environments of a configuration, a file of answers or
preferences, or what the policy answers before the training begins.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.dataset import first_problems
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.envs.interface import EnvironmentOptions
from gpuherd.posttrain.learning.config import EnvBlock, TrainConfig
from gpuherd.posttrain.learning.folder import TrainDirectory
from gpuherd.posttrain.learning.options import model_of, precision_of, problems_wanted, sampling_of
from gpuherd.posttrain.types import Collecting, Comparison, Policy, Problem, Rollout, Row, Split, Task
from gpuherd.runs.files import write_file

if TYPE_CHECKING:
    from gpuherd.posttrain.engine.dist_env import DistEnv
    from gpuherd.posttrain.envs.interface import Environments
    from gpuherd.posttrain.rollout.sampler import Sampler


def make_environments(where: str, told: EnvBlock, device: str) -> Environments:
    """The environments of a block. Raises UsageError, naming it, and what reading problems raises."""
    from gpuherd.posttrain.envs.registry import make_environments as make

    try:
        task = TaskOptions(
            reward_model=told.reward_model, reward=told.reward, reward_timeout=told.reward_timeout, device=device
        )
        options = EnvironmentOptions(
            env_type=told.env_type,
            dataset=told.dataset,
            problems=told.problems,
            timeout=told.timeout,
            max_attempts=told.max_attempts,
            custom_class=told.custom_class,
            custom_kwargs=told.custom_kwargs,
            reward_scale=told.reward_scale,
            reward_clip=told.reward_clip,
            reward_bias=told.reward_bias,
            settings=told.settings,
            task=task,
        )
        return make(options)
    except UsageError as problem:
        raise UsageError(f"{where}: {problem}") from None


def problems_of(environments: Environments, where: str, split: Split, count: int | None, seed: int) -> list[Problem]:
    """The first problems of a split. Raises UsageError, naming the block, where there are not so many, or none."""
    try:
        found = list(environments.problems(split, count, seed))
    except UsageError as problem:
        raise UsageError(f"{where}: {problem}") from None
    if not found:
        raise UsageError(f"{where}: there is no problem")
    return found


def check_turns(config: TrainConfig, environments: Environments) -> None:
    """Raises UsageError for dpo on episodes of several turns."""
    if config.training.algorithm == "dpo" and environments.most_turns > 1:
        raise UsageError(
            f"policy_env: dpo compares single answers, and an episode of {environments.name} has up to "
            f"{environments.most_turns} turns; set max_attempts: 1, or learn by ppo or grpo"
        )


def roller(config: TrainConfig, environments: Environments, *, greedy: bool = False) -> Callable[..., list[Rollout]]:
    """What rolls episodes while a policy is trained: of a sampler, problems, samples of each, and the draws' stream.

    With ``grpo.gamma`` below 1 what an episode earns is discounted by turn: sum over turns k of gamma^k r_k. What is
    evaluated (``greedy``) is not.
    """
    from gpuherd.posttrain.envs.episodes import Turns, roll

    gamma = config.grpo.gamma if config.training.algorithm == "grpo" and not greedy else 1.0

    def rolled(sampler: Sampler, problems: Sequence[Problem], samples: int, stream: str) -> list[Rollout]:
        turns = Turns(sampler.tokenizer, chat=config.model.use_chat_template)
        text_config = sampler.model.module.config.get_text_config()
        found = roll(
            environments,
            sampler,
            turns,
            problems,
            samples,
            greedy=greedy,
            stream=stream,
            seed=config.training.seed,
            most_tokens=getattr(text_config, "max_position_embeddings", None),
        )
        return [discounted(each, gamma) for each in found]

    return rolled


def discounted(rollout: Rollout, gamma: float) -> Rollout:
    """The rollout with what each turn earned times gamma to the number of turns before it. Turns are runs of tokens
    that the policy chose."""
    if gamma == 1 or len(rollout.turn_rewards) < 2:
        return rollout
    own = rollout.by_policy
    begins = [place for place, mine in enumerate(own) if mine and not (place and own[place - 1])]
    told = tuple(
        (place, reward * gamma ** max(0, sum(begin <= place for begin in begins) - 1))
        for place, reward in rollout.turn_rewards
    )
    return replace(rollout, turn_rewards=told, reward=math.fsum(reward for _, reward in told))


class Evaluation:
    """The policy's most probable answers to some problems of each of ``eval_envs``, as figures for the curves.

    All processes evaluate their share; all know the means. Nothing is evaluated where ``eval_every`` is 0.
    """

    def __init__(self, config: TrainConfig, world: DistEnv, device: str):
        """Raises UsageError, naming the block, and what reading problems raises."""
        self._world = world
        self._envs: list[tuple[str, Environments, list[Problem], Any]] = []
        blocks = config.eval_envs if config.training.eval_every else ()
        names: list[str] = []
        for number, told in enumerate(blocks):
            where = f"eval_envs[{number}]"
            environments = make_environments(where, told, device)
            split, count = Split.TEST, config.training.eval_episodes
            problems = problems_of(environments, where, split, count, config.training.seed)
            names.append(_free_name(Path(told.dataset).stem if told.dataset else environments.name, names))
            self._envs.append((names[-1], environments, problems, roller(config, environments, greedy=True)))

    def __bool__(self) -> bool:
        return bool(self._envs)

    def __call__(self, sampler: Sampler, _step: int) -> Mapping[str, float]:
        """``eval/<name>/reward``, and ``/accuracy`` where the environment knows right and wrong. Names are data sets';
        ``gsm8k-2`` is the second of that name."""
        found: dict[str, float] = {}
        for number, (name, _, problems, rolled) in enumerate(self._envs):
            mine = self._world.share(problems)
            rollouts = rolled(sampler, mine, 1, f"evaluation {number}") if mine else []
            told = [(each.reward, each.correct) for share in self._world.gather(list(rollouts)) for each in share]
            key = f"eval/{name}"
            found[f"{key}/reward"] = math.fsum(reward for reward, _ in told) / len(told)
            judged = [correct for _, correct in told if correct is not None]
            if judged:
                found[f"{key}/accuracy"] = sum(judged) / len(judged)
        return found

    def close(self) -> None:
        """Ends what scoring has started."""
        for _, environments, _, _ in self._envs:
            environments.close()


def _free_name(name: str, taken: Sequence[str]) -> str:
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(each for each in names if each not in taken)


logger = logging.getLogger(__name__)


def preferences_of(config: TrainConfig) -> list[Row]:
    """The comparisons of a file of preferences. Raises UsageError, BadQuestions and MissingQuestions."""
    from gpuherd.posttrain.preference.data import read_preferences
    from gpuherd.posttrain.preference.tokens import Writing, load_tokenizer

    read = read_preferences(_file(config), limit=config.training.max_problems)
    if (told := read.refusals()) is not None:
        logger.warning("%s", told)
    writing = Writing(load_tokenizer(config.model.model_name_or_path), chat=config.model.use_chat_template)
    return list(writing.comparisons(read.pairs))


def demonstrations_of(config: TrainConfig, algorithm: Any, device: str) -> list[Row]:
    """The answers to imitate: of all rows of a file or data set, or of a task's training problems, those that it holds
    out among them, as rollouts. Raises UsageError, and what reading raises."""
    from gpuherd.posttrain.data.options import TaskOptions
    from gpuherd.posttrain.data.registry import is_task, make_task
    from gpuherd.posttrain.preference.data import read_demonstrations
    from gpuherd.posttrain.preference.tokens import Writing, load_tokenizer

    if not is_task(_file(config)):
        read = read_demonstrations(_file(config), limit=config.training.max_problems)
        if (told := read.refusals()) is not None:
            logger.warning("%s", told)
        logger.info("learning from %s", read.sentence)
        writing = Writing(load_tokenizer(config.model.model_name_or_path), chat=config.model.use_chat_template)
        return [writing.imitation(each) for each in read.shown]
    task = make_task(_file(config), TaskOptions(device=device))
    policy = Policy(model_of(config))
    try:
        problems = all_but_test(task, problems_wanted(config), config.training.seed)
        logger.info("learning from %s: %d training problems", _file(config), len(problems))
        work = Collecting(task, problems, policy, policy, 0, sampling_of(config), precision_of(config), device)
        return list(algorithm.collect(work))
    finally:
        task.close()


def all_but_test(task: Task, count: int | None, seed: int) -> list[Problem]:
    """The first problems of a task that are not in its test: nothing is chosen by what it holds out while one policy
    is trained. Raises UsageError where there are not so many."""
    problems = [*task.problems(Split.TRAIN, None, seed)]
    with suppress(UsageError):  # a task may hold nothing out
        problems += task.problems(Split.HELDOUT, None, seed)
    return first_problems(problems, count, seed, f"{task.name}, train")


def _file(config: TrainConfig) -> str:
    assert config.training.data_file is not None  # noqa: S101 - the caller has looked
    return config.training.data_file


def answered(
    config: TrainConfig, environments: Environments, folder: TrainDirectory, world: DistEnv, device: str
) -> list[Row]:
    """What the policy, as it comes, does in the environment: sampled once and kept in ``rows.jsonl``; every process
    samples its share. For dpo the best and the worst of each problem.

    Raises UsageError for dpo on episodes of several turns, or where no problem has two unlike answers.
    """
    check_turns(config, environments)
    kept = world.broadcast(_read(folder.rows) if world.is_main else None)
    if kept is None:
        kept = _rolled(config, environments, world, device)
        if world.is_main:
            write_file(folder.rows, "".join(f"{json.dumps(each.to_dict())}\n" for each in kept).encode())
    return list(kept) if config.training.algorithm == "sft" else compared(kept)


def _rolled(config: TrainConfig, environments: Environments, world: DistEnv, device: str) -> list[Rollout]:
    from gpuherd.posttrain.rollout.sampler import Sampler

    seed = config.training.seed
    problems = problems_of(environments, "policy_env", Split.TRAIN, problems_wanted(config), seed)
    samples = config.dpo.samples_per_prompt if config.training.algorithm == "dpo" else 1
    sampler = Sampler(Policy(model_of(config)), precision_of(config), device, sampling_of(config))
    mine: Sequence[Problem] = world.share(problems)
    made = roller(config, environments)(sampler, mine, samples, "collected") if mine else []
    found = {(each.problem, each.sample): each for share in world.gather(made) for each in share}
    return [found[problem.id, sample] for problem in problems for sample in range(samples)]


def compared(rollouts: Sequence[Rollout]) -> list[Row]:
    """The best and the worst answer of each problem. Raises UsageError where all problems' answers earned the same."""
    from gpuherd.posttrain.preference.data import best_and_worst, by_problem

    groups = by_problem(rollouts)
    found: list[Comparison] = [each for group in groups if (each := best_and_worst(group)) is not None]
    logger.info("dpo: %d comparisons of %d problems; the others' answers earned the same", len(found), len(groups))
    if not found:
        raise UsageError(
            f"policy_env: all answers to each of {len(groups)} problems earned the same; there is nothing to compare"
        )
    return list(found)


def _read(path: Path) -> list[Rollout] | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return [Rollout.from_dict(json.loads(line)) for line in text.splitlines()]
