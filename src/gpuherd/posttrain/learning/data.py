"""What a training learns from, and what it is evaluated on: the environments of a configuration, a file of answers or
preferences, or what the policy answers before the training begins.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import UsageError
from gpuherd.models.memory.training_job import Method
from gpuherd.posttrain.data.dataset import first_problems
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.envs.interface import EnvironmentOptions
from gpuherd.posttrain.envs.registry import SingleTurn
from gpuherd.posttrain.envs.registry import make_environments as make
from gpuherd.posttrain.learning.folder import TrainDirectory
from gpuherd.posttrain.learning.settings import BACKEND, TrainSettings
from gpuherd.posttrain.preference.proxy import ProxyOptions
from gpuherd.posttrain.types import (
    Algorithm,
    BackendName,
    Collecting,
    Comparison,
    Policy,
    Problem,
    Reward,
    Rollout,
    Row,
    Split,
    Task,
)
from gpuherd.runs.files import write_file

if TYPE_CHECKING:
    from gpuherd.posttrain.engine.dist_env import DistEnv
    from gpuherd.posttrain.envs.interface import Environments
    from gpuherd.posttrain.rollout.sampler import RolloutBackend


def make_environments(where: str, told: EnvironmentOptions, device: str) -> Environments:
    """The environments of a block. Raises UsageError, naming it, and what reading problems raises."""
    try:
        return make(replace(told, task=replace(told.task, device=device)))
    except UsageError as problem:
        raise UsageError(f"{where}: {problem}") from None


def problems_of(source: Environments | Task, where: str, split: Split, count: int | None, seed: int) -> list[Problem]:
    """The first problems of a split. Raises UsageError, naming the block, where there are not so many, or none."""
    try:
        found = list(source.problems(split, count, seed))
    except UsageError as problem:
        raise UsageError(f"{where}: {problem}") from None
    if not found:
        raise UsageError(f"{where}: there is no problem")
    return found


class EnvironmentTask:
    """Environments of one turn as a task, whose prompts are what an environment says first; a ``types.Task`` itself."""

    def __init__(self, environments: Environments):
        self.name, self.verifiable = environments.name, environments.verifiable
        self.reward_range = environments.reward_range
        self._environments = environments
        self._inner: dict[str, Problem] = {}

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """Those of the environments. Raises what they raise."""
        found = list(self._environments.problems(split, count, seed))
        self._inner |= {each.id: each for each in found}
        return [self._asked(each) for each in found]

    def _asked(self, problem: Problem) -> Problem:
        said = self._environments.make().reset(problem, 0).messages
        messages = () if len(said) == 1 else tuple((each.role, each.content) for each in said)
        return replace(problem, prompt="\n\n".join(each.content for each in said), messages=messages)

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """What each completion earns as the only turn of an episode."""
        episodes = [self._environments.make() for _ in problems]
        for episode, problem in zip(episodes, problems, strict=True):
            episode.reset(self._inner[problem.id], 0)
        ends = self._environments.step_all(episodes, completions)
        return [Reward(each.reward + (0 if each.done else each.if_cut), each.correct) for each in ends]

    def close(self) -> None:
        """Ends what scoring has started."""
        self._environments.close()


def learns_from_pairs(algorithm: Algorithm) -> bool:
    """Whether comparisons are what it learns from, or first learns from."""
    return algorithm.memory is Method.DPO or isinstance(algorithm.options, ProxyOptions)


def task_of(algorithm: Algorithm, environments: Environments) -> EnvironmentTask | None:
    """What is learnt from as a task, for an algorithm that asks in its own way or draws by itself; None for one that
    learns from episodes as they are.

    Raises UsageError where it can't learn from them: from several turns, or without right and wrong.
    """
    task = EnvironmentTask(environments)
    own = _asked(algorithm, task, "policy_env") is not task or isinstance(algorithm.options, ProxyOptions)
    if own or learns_from_pairs(algorithm):
        _refuse_turns(algorithm, environments, "policy_env")
    return task if own else None


def evaluated_on(algorithm: Algorithm, environments: Environments, where: str) -> Environments:
    """Environments as an algorithm's policies are evaluated on them: asked as they were trained. Raises UsageError,
    naming the block, for such as it can't ask."""
    task = EnvironmentTask(environments)
    asked = _asked(algorithm, task, where)
    if asked is task:
        return environments
    _refuse_turns(algorithm, environments, where)
    return SingleTurn(asked)


def _asked(algorithm: Algorithm, task: Task, where: str) -> Task:
    try:
        return algorithm.evaluated(task)
    except UsageError as problem:
        raise UsageError(f"{where}: {problem}") from None


def _refuse_turns(algorithm: Algorithm, environments: Environments, where: str) -> None:
    if environments.most_turns > 1:
        raise UsageError(
            f"{where}: {algorithm.name.lower()} compares single answers, and an episode of {environments.name} has up "
            f"to {environments.most_turns} turns; set max_attempts: 1, or learn by ppo or grpo"
        )


def roller(
    settings: TrainSettings, environments: Environments, *, greedy: bool = False
) -> Callable[..., list[Rollout]]:
    """What rolls episodes while a policy is trained: of a sampler, problems, samples of each, and the draws' stream.

    With ``grpo.gamma`` below 1 what an episode earns is discounted by turn: sum over turns k of gamma^k r_k. What is
    evaluated (``greedy``) is not.
    """
    from gpuherd.posttrain.envs.episodes import Turns, roll

    gamma = 1.0 if greedy else settings.discount
    most_probable = greedy or getattr(settings.algorithm.options, "greedy", False)

    def rolled(sampler: RolloutBackend, problems: Sequence[Problem], samples: int, stream: str) -> list[Rollout]:
        turns = Turns(sampler.tokenizer, chat=settings.sampling.use_chat_template)
        found = roll(
            environments,
            sampler,
            turns,
            problems,
            samples,
            greedy=most_probable,
            stream=stream,
            seed=settings.sampling.seed,
            most_tokens=sampler.places,
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

    def __init__(self, settings: TrainSettings, algorithm: Algorithm, world: DistEnv):
        """Raises UsageError, naming the block, and what reading problems raises."""
        self._world = world
        self._envs: list[tuple[str, Environments, list[Problem], Any]] = []
        blocks = settings.eval_envs if settings.eval_every else ()
        names: list[str] = []
        for number, told in enumerate(blocks):
            where = f"eval_envs[{number}]"
            environments = make_environments(where, told, world.device)
            names.append(_free_name(Path(told.dataset).stem if told.dataset else environments.name, names))
            environments = evaluated_on(algorithm, environments, where)
            problems = problems_of(environments, where, Split.TEST, settings.eval_episodes, settings.sampling.seed)
            self._envs.append((names[-1], environments, problems, roller(settings, environments, greedy=True)))

    def __bool__(self) -> bool:
        return bool(self._envs)

    def __call__(self, sampler: RolloutBackend, _step: int) -> Mapping[str, float]:
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


def rows_of(
    settings: TrainSettings,
    algorithm: Algorithm,
    environments: Environments | None,
    folder: TrainDirectory,
    world: DistEnv,
    device: str,
) -> list[Row]:
    """What an algorithm learns from that is there before it begins; [] of one that collects nothing.

    Raises UsageError, and what reading files raises.
    """
    if not algorithm.collects:
        return []
    if environments is not None:
        return _answered(settings, algorithm, environments, folder, world, device)
    return _preferences(settings) if learns_from_pairs(algorithm) else _demonstrations(settings, algorithm, device)


def _preferences(settings: TrainSettings) -> list[Row]:
    """The comparisons of a file of preferences. Raises UsageError, BadQuestions and MissingQuestions."""
    from gpuherd.posttrain.preference.data import read_preferences
    from gpuherd.posttrain.preference.tokens import Writing, load_tokenizer

    read = read_preferences(file_of(settings), limit=settings.problems)
    if (told := read.refusals()) is not None:
        logger.warning("%s", told)
    writing = Writing(load_tokenizer(settings.base), chat=settings.sampling.use_chat_template)
    return list(writing.comparisons(read.pairs))


def _demonstrations(settings: TrainSettings, algorithm: Algorithm, device: str) -> list[Row]:
    """The answers to imitate: of all rows of a file or data set, or of a task's training problems, those that it holds
    out among them, as rollouts. Raises UsageError, and what reading raises."""
    from gpuherd.posttrain.data.registry import is_task, make_task
    from gpuherd.posttrain.preference.data import read_demonstrations
    from gpuherd.posttrain.preference.tokens import Writing, load_tokenizer

    file = file_of(settings)
    if not is_task(file):
        read = read_demonstrations(file, limit=settings.problems)
        if (told := read.refusals()) is not None:
            logger.warning("%s", told)
        logger.info("learning from %s", read.sentence)
        writing = Writing(load_tokenizer(settings.base), chat=settings.sampling.use_chat_template)
        return [writing.imitation(each) for each in read.shown]
    task = make_task(file, TaskOptions(device=device))
    policy = Policy(settings.model)
    try:
        problems = all_but_test(task, settings.problems, settings.sampling.seed)
        logger.info("learning from %s: %d training problems", file, len(problems))
        work = Collecting(task, problems, policy, policy, 0, settings.sampling, settings.precision, device)
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


def file_of(settings: TrainSettings) -> str:
    """``training.data_file``, of a training that learns from one."""
    assert settings.data_file is not None  # noqa: S101 - the caller has looked
    return settings.data_file


def _answered(
    settings: TrainSettings,
    algorithm: Algorithm,
    environments: Environments,
    folder: TrainDirectory,
    world: DistEnv,
    device: str,
) -> list[Row]:
    """What the policy, as it comes (or a teacher), does in the environment: sampled once and kept in ``rows.jsonl``;
    every process samples its share. Of comparisons the best and the worst of each problem.

    Raises UsageError where it can't learn from episodes of several turns, or no problem has two unlike answers.
    """
    task_of(algorithm, environments)
    kept = world.broadcast(_read(folder.rows) if world.is_main else None)
    if kept is None:
        kept = _rolled(settings, algorithm, environments, world, device)
        if world.is_main:
            write_file(folder.rows, "".join(f"{json.dumps(each.to_dict())}\n" for each in kept).encode())
    return compared(kept) if learns_from_pairs(algorithm) else list(kept)


def _rolled(
    settings: TrainSettings, algorithm: Algorithm, environments: Environments, world: DistEnv, device: str
) -> list[Rollout]:
    problems = problems_of(environments, "policy_env", Split.TRAIN, settings.problems, settings.sampling.seed)
    options = algorithm.options
    samples = options.samples_per_example if hasattr(options, "samples_per_example") else options.samples_per_prompt
    policy = Policy(algorithm.collected_from or settings.model)
    mine: Sequence[Problem] = world.share(problems)
    made: list[Rollout] = []
    if mine:
        with _answering(settings, policy, world, device) as sampler:
            made = roller(settings, environments)(sampler, mine, samples, "collected")
    found = {(each.problem, each.sample): each for share in world.gather(made) for each in share}
    return [found[problem.id, sample] for problem in problems for sample in range(samples)]


@contextmanager
def _answering(settings: TrainSettings, policy: Policy, world: DistEnv, device: str) -> Iterator[RolloutBackend]:
    """A policy in memory, or in vLLM's; that ends with the block."""
    if settings.backend is BackendName.VLLM:
        from gpuherd.posttrain.rollout.vllm import VllmSampler

        by_vllm = VllmSampler(policy, settings.precision, world.device, settings.sampling, key=BACKEND)
        try:
            yield by_vllm
        finally:
            by_vllm.release()
    else:
        from gpuherd.posttrain.rollout.sampler import Sampler

        yield Sampler(policy, settings.precision, device, settings.sampling)


def compared(rollouts: Sequence[Rollout]) -> list[Row]:
    """The best and the worst answer of each problem. Raises UsageError where all problems' answers earned the same."""
    from gpuherd.posttrain.preference.data import best_and_worst, by_problem

    groups = by_problem(rollouts)
    found: list[Comparison] = [each for group in groups if (each := best_and_worst(group)) is not None]
    logger.info("%d comparisons of %d problems; the others' answers earned the same", len(found), len(groups))
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
