"""Before a training begins: all that it learns from is there, it fits into its GPUs by the model's headers, and its
folder is free for it, or holds it already. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from importlib.util import find_spec

from gpuherd import __version__
from gpuherd.batch.options import RunOptions
from gpuherd.errors import (
    GpuherdError,
    JobCannotFit,
    MissingExtra,
    UsageError,
    printable,
    usage_named,
)
from gpuherd.jobs.gpu.watch import GpuWatch
from gpuherd.models.memory.kv_cache import MIB, Workload
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.inventory import idle_gpus
from gpuherd.models.place.resources import read_with_precision, resources_of
from gpuherd.posttrain.engine.callbacks import check_callbacks
from gpuherd.posttrain.envs.interface import EnvironmentOptions, Environments
from gpuherd.posttrain.learning.data import (
    evaluated_on,
    make_environments,
    of_file,
    problems_of,
    task_of,
    training_problems,
)
from gpuherd.posttrain.learning.settings import BACKEND, TrainSettings, read_settings
from gpuherd.posttrain.preference.proxy import ProxyOptions
from gpuherd.posttrain.rewards.function import FunctionRewards, digest_of
from gpuherd.posttrain.rollout.lengths import UNKNOWN, Lengths, Texts, check_lengths, lengths_of
from gpuherd.posttrain.rollout.vllm import require_vllm
from gpuherd.posttrain.runs.blocks import ModelPair
from gpuherd.posttrain.runs.folder import BadRun, TrainDirectory
from gpuherd.posttrain.runs.memory import Scorer, TrainingTask, vllm_memory
from gpuherd.posttrain.runs.plan import StepRequest
from gpuherd.posttrain.runs.prepare import refuse_frozen, refuse_proxy
from gpuherd.posttrain.types import BackendName, Problem, Split
from gpuherd.runs.files import write_file
from gpuherd.units import gib

logger = logging.getLogger(__name__)

# The key by which figures go to a tracker.
_ASKS_FOR = {
    "tensorboard": "training.use_tensorboard",
    "wandb": "training.wandb_project",
    "trackio": "training.trackio_project",
}


def check_data(settings: TrainSettings) -> Texts | None:
    """What is learnt from, as far as it is known before: None of environments of one's own, which are left out, since
    their code runs in the training's processes alone.

    Raises UsageError, naming the key, for problems that are not there, too few of them, or of a kind that the algorithm
    can't learn from, and for models whose tokens it can't learn by; and what reading files and data sets raises.
    """
    check_callbacks(settings.watching.callbacks)
    for tracker in settings.watching.report_to:
        if find_spec(tracker) is None:
            raise MissingExtra(f"{_ASKS_FOR[tracker]}: {tracker} is not installed; pip install {tracker}")
    settings.warnings()
    algorithm, seed = settings.algorithm.make(), settings.sampling.seed
    texts = None
    if settings.policy_env is not None and settings.policy_env.env_type != "custom":
        with closing(make_environments("policy_env", settings.policy_env, "cpu")) as environments:
            task = task_of(algorithm, environments)
            found = training_problems(settings, environments)
            settings.with_problems(len(found))
            _check_reward("policy_env", settings.policy_env, found)
            if task is None:
                words = _first_words(environments, found, seed)
            else:
                words = [each.prompt for each in training_problems(settings, algorithm.evaluated(task))]
            source = f"{len(found)} training problems of {environments.name}{_left_out(environments, seed)}"
            texts = Texts(words, turns=environments.most_turns, source=source)
    if settings.eval_every:
        for number, block in enumerate(settings.eval_envs):
            if block.env_type == "custom":
                continue
            where = f"eval_envs[{number}]"
            with closing(make_environments(where, block, "cpu")) as environments:
                evaluated_on(algorithm, environments, where)
                _check_reward(where, block, problems_of(environments, where, Split.TEST, settings.eval_episodes, seed))
    _check_models(settings)
    return texts if settings.data_file is None else of_file(settings, algorithm).texts


def check_model(settings: TrainSettings) -> None:
    """Raises MissingModel, BadModel where the model is not there: on a CPU no plan reads it before it is trained."""
    from gpuherd.models.load.identity import model_files

    model_files(settings.base)


def data_lengths(settings: TrainSettings, texts: Texts | None) -> Lengths:
    """How long it is what is learnt from. Raises MissingModel, BadModel, MissingExtra."""
    return lengths_of(texts, settings.model, chat=settings.sampling.use_chat_template)


def too_short(settings: TrainSettings, texts: Texts | None) -> str | None:
    """A warning of answers that the model has no places for. Raises UsageError for prompts or rows that are longer."""
    if texts is None:
        return None
    sampling = settings.sampling
    return check_lengths(texts, settings.model, sampling.max_new_tokens, chat=sampling.use_chat_template)


def _check_models(settings: TrainSettings) -> None:
    """Raises UsageError, BadModel for a teacher or a proxy that reads other tokens than the policy; MissingExtra where
    vLLM is to decode and isn't installed."""
    algorithm, name = settings.algorithm.make(), settings.algorithm.name
    if settings.backend is BackendName.VLLM:
        require_vllm(settings.model, settings.precision, BACKEND)
    for model in algorithm.frozen_models:
        refuse_frozen(name, settings.base, model)
    if isinstance(algorithm.options, ProxyOptions):
        refuse_proxy(name, settings.base, algorithm.options.proxy_base(None, settings.base))
        if algorithm.options.preferences is not None:
            from gpuherd.posttrain.preference.data import read_preferences

            read_preferences(algorithm.options.preferences)


def _check_reward(where: str, block: EnvironmentOptions, problems: Sequence[Problem]) -> None:
    """Raises UsageError for a reward function that can't score these problems."""
    if block.task.reward is not None:
        with usage_named(f"{where}: "), FunctionRewards(block.task.reward, block.task.reward_timeout) as scoring:
            scoring.check(problems)


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


def training_task(
    settings: TrainSettings, cards: Sequence[GpuSpec], processes: int, lengths: Lengths = UNKNOWN
) -> TrainingTask:
    """The training as it is planned, for so many processes.

    Args:
        cards: as idle as the training will find them; () where none are known.
        lengths: of what it learns from.
    """
    here, sampling = min(settings.here, processes), settings.sampling
    choice = replace(settings.algorithm, gpus=processes)
    group = getattr(choice.options, "samples_per_prompt", 1)
    rollouts = -(-settings.keys["training.num_rollouts_per_iteration"] // processes) + group
    steps = settings.steps(processes)
    return TrainingTask(
        name=f"{choice.algorithm} of {settings.model}, {lengths.said}",
        choice=choice,
        family=ModelPair(settings.model),
        loaded=settings.precision,
        steps=steps,
        cards=cards if len(cards) >= here else (),
        gpus=here,
        prompt_tokens=lengths.prompt,
        new_tokens=lengths.answer or lengths.turns * sampling.max_new_tokens,
        sampled=min(sampling.batch_size, max(rollouts, settings.eval_episodes)),
        pairs=steps.micro_batch_size,
        helps="choose a smaller model",
    )


def need_of(
    settings: TrainSettings, cards: Sequence[GpuSpec], processes: int, lengths: Lengths = UNKNOWN
) -> StepRequest:
    """What each of so many processes takes of its GPU. The arguments are those of ``training_task``.

    Raises JobCannotFit where it fits on none of them, with what would fit; MissingModel, BadModel.
    """
    sampling = settings.sampling
    scorers = _scorers(settings, lengths.prompt + sampling.max_new_tokens)
    task = replace(training_task(settings, cards, processes, lengths), scorers=scorers)
    answers = Workload(sampling.batch_size, lengths.prompt, lengths.turns * sampling.max_new_tokens)
    by_vllm = settings.backend is BackendName.VLLM and bool(settings.algorithm.make().samples)
    need = task.memory(
        (lambda: vllm_memory(settings.model, settings.precision, answers, task.cards)) if by_vllm else None
    )
    memory, said = need.memory_mb, f"{need.said}, {lengths.said}"
    for model in _answers_apart(settings):  # a model of its own, before or behind the training
        architecture, precision = read_with_precision(model, settings.precision.dtype)
        load = Workload(sampling.batch_size, lengths.prompt, sampling.max_new_tokens)
        known = task.cards or [GpuSpec("0", "", total=0, free=1 << 60)]  # not known: without an end of room
        alone = resources_of(architecture, precision, load, known, parallel="replica", most=1).memory_mb
        alone += sum(each.memory(known) for each in scorers)
        scored = "".join(f", scored by {each.model}" for each in scorers)
        if alone > memory:
            memory, said = alone, f"{load.batch} answers at once of {architecture.model}{scored}, beside {said}"
    return StepRequest(task.gpus, memory, f"{said}: {gib(memory * MIB)} on each GPU")


def _scorers(settings: TrainSettings, tokens: int) -> tuple[Scorer, ...]:
    """The reward models that lie in memory: of the environment that is learnt from, and of each that is evaluated."""
    blocks = [*filter(None, [settings.policy_env]), *(settings.eval_envs if settings.eval_every else ())]
    models = [(_reward_model(each), each.task) for each in blocks]
    return tuple(Scorer(model, tokens, task.dtype, task.reward_batch_size) for model, task in models if model)


def _reward_model(block: EnvironmentOptions) -> str | None:
    """The model that scores in an environment: the named one, or a task's own. Reads no problem."""
    from gpuherd.posttrain.data.registry import is_task, make_task

    told = block.task
    named = told.reward_model is not None or told.reward is not None or block.env_type != "task"
    if named or block.dataset is None or not is_task(block.dataset):
        return told.reward_model
    with closing(make_task(block.dataset, replace(told, settings=block.settings, device="cpu"))) as task:
        found: str | None = getattr(task, "reward_model", None)
    return found


def _answers_apart(settings: TrainSettings) -> list[str]:
    """Models that are loaded once more to answer: what is learnt from, or evaluations at the end."""
    algorithm = settings.algorithm.make()
    if algorithm.collects and algorithm.collected_from is not None:
        return [algorithm.collected_from]
    evaluated = bool(settings.eval_every and settings.eval_envs)
    return [settings.model] if not settings.samples and (settings.data_file is None or evaluated) else []


def foretell(settings: TrainSettings, here: int, processes: int, lengths: Lengths = UNKNOWN) -> None:
    """Logs what a training takes of GPUs that are the user's own: he has started the processes, ``here`` of them on
    this machine. Nothing is refused: they are his, and a plan is a plan. Nor is a driver waited for: CUDA runs in the
    processes already, and the others would wait for this one. Raises MissingModel, BadModel."""
    watch = GpuWatch(RunOptions(num_gpus=here).gpu_options(), "plan")
    cards = () if watch.problem is not None else idle_gpus(watch.gpus)
    told = replace(settings, where=replace(settings.where, num_gpus=here, gpu_ids=None))
    try:
        logger.info("%s", need_of(told, cards, processes, lengths).sentence)
    except JobCannotFit as problem:
        logger.warning("memory may run out: %s", problem)


# ---- the folder


def look_over(folder: TrainDirectory, settings: TrainSettings, *, resume: bool) -> None:
    """Checks that the folder is free for this training, or holds it already. Writes nothing.

    Raises UsageError: the folder holds another training, or this one without ``resume``, or something else.
    """
    if folder.config.exists():
        if not resume:
            state = "has ended" if folder.done.exists() else "was begun"
            raise UsageError(
                f"{folder.root}: a training {state} here; add --resume to go on, or choose another --output"
            )
        refuse_another(folder, settings)
        if not folder.done.exists():
            _refuse_other_rewards(folder, settings)
    elif folder.root.is_dir() and any(path.name not in _OURS for path in folder.root.iterdir()):
        raise UsageError(f"{folder.root}: there are files of something else; choose another --output")


def begin(folder: TrainDirectory, settings: TrainSettings, *, resume: bool, simulate: bool = False) -> None:
    """Begins the folder, or resumes it. Raises as ``look_over``, and CannotWrite.

    Args:
        simulate: its GPUs are simulated, which is recorded.
    """
    look_over(folder, settings, resume=resume)
    if not folder.config.exists():
        folder.create_root()
        about = {"gpuherd_version": __version__, "name": settings.experiment_name, "simulated": simulate}
        folder.write_record({**about, "rewards": _rewards(settings)})
    write_file(folder.config, settings.as_yaml().encode())


# What a start leaves that was killed before it wrote config.yaml; the second line is the queue's of a cluster's engine.
_OURS = (
    "run.json", "run.log", "train.lock",
    "attempts", "control.fifo", "failures.jsonl", "gpu_metrics.json", "handover", "logs", "queue.lock", "queue.sqlite",
    "queue.sqlite-shm", "queue.sqlite-wal", "standing.json",
)  # fmt: skip


def refuse_another(folder: TrainDirectory, settings: TrainSettings) -> None:
    """Raises UsageError where the folder's training differs from this one in what changes results, by key."""
    kept, wanted = (each.deciding() for each in (read_settings(folder.config), settings))
    for key in sorted({*kept, *wanted}):
        if kept.get(key) != wanted.get(key):
            raise UsageError(
                f"{folder.root} holds another training: its {key} is {printable(repr(kept.get(key)))}, and here it is "
                f"{printable(repr(wanted.get(key)))}; choose another --output, or the old value"
            )


def _refuse_other_rewards(folder: TrainDirectory, settings: TrainSettings) -> None:
    """Raises UsageError where a reward function has changed since the training began."""
    try:
        begun = folder.record()["rewards"]
    except (BadRun, KeyError):  # of a training that an earlier version began
        return
    for where, digest in _rewards(settings).items():
        if begun.get(where, digest) != digest:
            raise UsageError(
                f"{folder.root} was begun with another {where}.reward, whose file has changed since; put the old one "
                "back, or choose another --output"
            )


def _rewards(settings: TrainSettings) -> dict[str, str]:
    """The digests of reward functions, by the block that names each."""
    blocks = {
        "policy_env": settings.policy_env,
        **{f"eval_envs[{number}]": each for number, each in enumerate(settings.eval_envs)},
    }
    named = {where: each.task.reward for where, each in blocks.items() if each is not None}
    return {where: digest_of(reward) for where, reward in named.items() if reward is not None}
