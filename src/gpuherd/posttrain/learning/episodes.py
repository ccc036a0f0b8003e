"""The environments of a configuration: made, rolled in training, evaluated on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.envs.interface import EnvironmentOptions
from gpuherd.posttrain.learning.config import EnvBlock, TrainConfig
from gpuherd.posttrain.types import Problem, Rollout, Split

if TYPE_CHECKING:
    from gpuherd.posttrain.engine.world import World
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

    def __init__(self, config: TrainConfig, world: World, device: str):
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
