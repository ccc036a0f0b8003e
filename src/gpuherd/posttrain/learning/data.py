"""What dpo and sft learn from: a file of it, or what the policy answers before the training begins."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.dataset import first_problems
from gpuherd.posttrain.learning.config import TrainConfig
from gpuherd.posttrain.learning.episodes import problems_of, roller
from gpuherd.posttrain.learning.folder import TrainDirectory
from gpuherd.posttrain.learning.foresight import check_turns
from gpuherd.posttrain.learning.translating import model_of, precision_of, problems_wanted, sampling_of
from gpuherd.posttrain.types import Collecting, Comparison, Policy, Problem, Rollout, Row, Split, Task

if TYPE_CHECKING:
    from gpuherd.posttrain.engine.world import World
    from gpuherd.posttrain.envs.interface import Environments

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
    config: TrainConfig, environments: Environments, folder: TrainDirectory, world: World, device: str
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
            lines = [json.dumps(each.to_dict()) for each in kept]
            folder.write(folder.rows, "".join(f"{line}\n" for line in lines))
    return list(kept) if config.training.algorithm == "sft" else compared(kept)


def _rolled(config: TrainConfig, environments: Environments, world: World, device: str) -> list[Rollout]:
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
