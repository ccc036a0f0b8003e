"""What a training learns from, and what it is evaluated on: the environments of a configuration, a file of answers or
preferences, or what the policy answers before the training begins.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import BadModel, MissingModel, UsageError, usage_named
from gpuherd.models.memory.training_job import Method
from gpuherd.posttrain.data.chat import refuse_without_template
from gpuherd.posttrain.data.dataset import first_problems
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.preference_rows import Conversation
from gpuherd.posttrain.data.registry import is_task, make_task
from gpuherd.posttrain.envs.interface import EnvironmentOptions
from gpuherd.posttrain.envs.registry import SingleTurn
from gpuherd.posttrain.envs.registry import make_environments as make
from gpuherd.posttrain.learning.settings import BACKEND, TrainSettings
from gpuherd.posttrain.preference.proxy import ProxyOptions
from gpuherd.posttrain.rollout.lengths import Texts
from gpuherd.posttrain.runs.folder import TrainDirectory
from gpuherd.posttrain.runs.rows import collect_rows, read_round
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
from gpuherd.runs.shards import in_batches

if TYPE_CHECKING:
    from gpuherd.posttrain.engine.dist_env import DistEnv
    from gpuherd.posttrain.envs.interface import Environments
    from gpuherd.posttrain.preference.tokens import Writing
    from gpuherd.posttrain.rollout.sampler import RolloutBackend

logger = logging.getLogger(__name__)


def make_environments(where: str, told: EnvironmentOptions, device: str) -> Environments:
    """The environments of a block. Raises UsageError, naming it, and what reading problems raises."""
    with usage_named(f"{where}: "):
        return make(replace(told, task=replace(told.task, device=device)))


def problems_of(source: Environments | Task, where: str, split: Split, count: int | None, seed: int) -> list[Problem]:
    """The first problems of a split. Raises UsageError, naming the block, where there are not so many, or none."""
    with usage_named(f"{where}: "):
        found = list(source.problems(split, count, seed))
    if not found:
        raise UsageError(f"{where}: there is no problem")
    return found


def training_problems(settings: TrainSettings, source: Environments | Task) -> list[Problem]:
    """Those that are trained on. Raises as ``problems_of``."""
    return problems_of(source, "policy_env", Split.TRAIN, settings.problems, settings.sampling.seed)


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
    with usage_named(f"{where}: "):
        return algorithm.evaluated(task)


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


def rows_of(
    settings: TrainSettings,
    algorithm: Algorithm,
    environments: Environments | None,
    folder: TrainDirectory,
    world: DistEnv,
    stopping: Callable[[], bool] | None = None,
) -> list[Row]:
    """What an algorithm learns from that is there before it begins; [] of one that collects nothing.

    Raises UsageError, and what reading files raises; Stopped, as ``collect_rows``.
    """
    if not algorithm.collects:
        return []
    if environments is not None:
        return _answered(settings, algorithm, environments, folder, world, stopping)
    found = of_file(settings, algorithm, world.device)
    logger.info("learning from %s", found.texts.source)
    return found.rows()


@dataclass(frozen=True, slots=True)
class FileData:
    """What ``training.data_file`` holds.

    Attributes:
        texts: of all that is learnt from.
        rows: makes of it what algorithms learn from.
    """

    texts: Texts
    rows: Callable[[], list[Row]]


def of_file(settings: TrainSettings, algorithm: Algorithm, device: str = "cpu") -> FileData:
    """What is learnt from of a file: preferences, or answers to imitate, of all rows of a file or data set, or of a
    task's training problems, those that it holds out among them.

    Raises UsageError, BadQuestions and MissingQuestions, and what reading tasks raises.
    """
    from gpuherd.posttrain.preference.data import read_demonstrations, read_preferences

    file = settings.data_file
    assert file is not None  # noqa: S101 - what has no environment has a file

    def writing() -> Writing:
        from gpuherd.posttrain.preference.tokens import Writing, load_tokenizer

        return Writing(load_tokenizer(settings.base), chat=settings.sampling.use_chat_template)

    if learns_from_pairs(algorithm):
        preferred = read_preferences(file, limit=settings.problems)
        said = _joined(f"{len(preferred.pairs)} preferences of {file}", preferred.refusals())
        prompts = [
            each.prompt if isinstance(each.prompt, str) else "\n\n".join(text for _, text in each.prompt)
            for each in preferred.pairs
        ]
        answers = [text for each in preferred.pairs for text in (each.chosen, each.rejected)]
        return FileData(Texts(prompts, answers, 1, said), lambda: list(writing().comparisons(preferred.pairs)))
    if is_task(file):
        return _of_task(settings, algorithm, file, device)
    if getattr(algorithm.options, "filter_low_reward", False):
        raise UsageError(
            f"sft.filter_low_reward: the rows of {file} are scored by nothing; leave it out, or name a task by "
            "training.data_file"
        )
    read = read_demonstrations(file, limit=settings.problems)
    if any(isinstance(each.example, Conversation) for each in read.shown):
        _check_template(settings.base, file)
    pairs = [pair for each in read.shown for pair in each.pairs]
    texts = Texts(
        [prompt for prompt, _ in pairs], [answer for _, answer in pairs], 1, _joined(read.sentence, read.refusals())
    )
    return FileData(texts, lambda: list(map(writing().imitation, read.shown)))


def _joined(*said: str | None) -> str:
    return "; ".join(filter(None, said))


def _of_task(settings: TrainSettings, algorithm: Algorithm, name: str, device: str) -> FileData:
    with closing(make_task(name, TaskOptions(device=device))) as task:
        problems = [*task.problems(Split.TRAIN, None, settings.sampling.seed)]
        # Nothing is chosen by what it holds out while one policy is trained; and a task may hold nothing out.
        with suppress(UsageError):
            problems += task.problems(Split.HELDOUT, None, settings.sampling.seed)
        problems = first_problems(problems, settings.problems, settings.sampling.seed, f"{task.name}, train")
        said = f"{len(problems)} training problems of {task.name}; its test is left out"

    def rows() -> list[Row]:
        policy = Policy(settings.model)
        with closing(make_task(name, TaskOptions(device=device))) as task:
            work = Collecting(task, problems, policy, policy, 0, settings.sampling, settings.precision, device)
            return list(algorithm.collect(work))

    answers = [each.answers[0] for each in problems if each.answers]
    return FileData(Texts([each.prompt for each in problems], answers, 1, said), rows)


def _check_template(model: str, file: str) -> None:
    """Raises UsageError for conversations and a model without a chat template, where its files can be read."""
    from gpuherd.models.load.identity import model_files

    # Of a model that is not there planning or loading tells.
    with suppress(MissingModel, BadModel), usage_named(f"training.data_file: {file} holds conversations: "):
        refuse_without_template(model_files(model).tokenizer_folder, model)


def _answered(
    settings: TrainSettings,
    algorithm: Algorithm,
    environments: Environments,
    folder: TrainDirectory,
    world: DistEnv,
    stopping: Callable[[], bool] | None,
) -> list[Row]:
    """What the policy, as it comes (or a teacher), does in the environment: sampled once and kept in ``rows.jsonl``;
    every process samples its share of each batch. Of comparisons the best and the worst of each problem.

    Raises UsageError where it can't learn from episodes of several turns, no problem has two unlike answers, or other
    problems were answered before.
    """
    task_of(algorithm, environments)
    answers = world.from_main(lambda: _of_an_earlier_version(folder.rows))
    if answers is None:
        problems = training_problems(settings, environments)
        ids = [each.id for each in problems]
        if len(set(ids)) < len(ids):
            raise UsageError("policy_env: two problems have one id")
        shard = in_batches(len(problems), settings.sampling.batch_size * world.size)
        with _asking(settings, algorithm, environments, world.device) as ask:
            collect_rows(folder.rows, shard, problems, ask, world=world, stopping=stopping)
        rows = world.from_main(lambda: read_round([(folder.rows, shard)]))
        answers = [each for each in rows if isinstance(each, Rollout)]
        if list(dict.fromkeys(each.problem for each in answers)) != ids:
            raise UsageError(
                f"{folder.rows} has the answers to other problems than policy_env has now; put these back, or choose "
                "another --output"
            )
    return compared(answers) if learns_from_pairs(algorithm) else list(answers)


@contextmanager
def _asking(
    settings: TrainSettings, algorithm: Algorithm, environments: Environments, device: str
) -> Iterator[Callable[[Sequence[Problem]], list[Rollout]]]:
    """What answers some problems. Its model is loaded when it is first asked; a vLLM ends with the block."""
    options = algorithm.options
    samples = options.samples_per_example if hasattr(options, "samples_per_example") else options.samples_per_prompt
    policy, rolled = Policy(algorithm.collected_from or settings.model), roller(settings, environments)
    with ExitStack() as stack:

        @cache
        def sampler() -> RolloutBackend:
            if settings.backend is BackendName.VLLM:
                from gpuherd.posttrain.rollout.vllm import VllmSampler

                vllm = VllmSampler(policy, settings.precision, device, settings.sampling, key=BACKEND)
                stack.callback(vllm.release)
                return vllm
            from gpuherd.posttrain.rollout.sampler import Sampler

            return Sampler(policy, settings.precision, device, settings.sampling)

        yield lambda problems: rolled(sampler(), problems, samples, "collected")


def _of_an_earlier_version(path: Path) -> list[Rollout] | None:
    """The rollouts of a file with a line each, which earlier versions wrote as a whole; None of a file with a line a
    problem, and where there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    if not text.startswith('{"problem": '):  # as ``line_of`` has it there is no blank
        return None
    return [Rollout.from_dict(json.loads(line)) for line in text.splitlines()]


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
