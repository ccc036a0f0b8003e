"""Will this training fit into its GPUs: from the model's headers, before anything is started."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from gpuherd.batch.options import RunOptions
from gpuherd.errors import JobCannotFit
from gpuherd.jobs.gpu.watch import GpuWatch
from gpuherd.models.describe.reading import read_for_training
from gpuherd.models.memory.kv_cache import MIB, Workload
from gpuherd.models.memory.training_job import Method, TrainingJob
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.inventory import idle_gpus
from gpuherd.models.place.resources import read_with_precision, resources_of
from gpuherd.models.place.training import TrainingRefusal, make_training_plan
from gpuherd.posttrain.learning.config import TrainConfig
from gpuherd.posttrain.learning.options import (
    algorithm_options,
    model_of,
    on_policy,
    precision_of,
    rows_of_a_step,
    sampling_of,
    steps_of,
)
from gpuherd.posttrain.rollout.lengths import UNKNOWN, Lengths
from gpuherd.posttrain.runs.memory import PLAIN_HEADS, host_words, training_job
from gpuherd.posttrain.runs.plan import StepRequest
from gpuherd.units import gib

logger = logging.getLogger(__name__)

# Of GPUs that are not known there is no end of room.
_BOUNDLESS = 1 << 60


def need_of(config: TrainConfig, cards: Sequence[GpuSpec], world_size: int, lengths: Lengths = UNKNOWN) -> StepRequest:
    """What each of so many processes takes of its GPU.

    Args:
        cards: as idle as the training will find them; () where none are known.
        lengths: of what it learns from.

    Raises JobCannotFit where it fits on none of them, with what would fit; MissingModel, BadModel.
    """
    loaded = precision_of(config)
    architecture, precision = read_with_precision(model_of(config), loaded.dtype, read_for_training)
    frozen = read_with_precision(model_of(config), loaded.frozen.dtype)[1]
    chunked = architecture.model_type in PLAIN_HEADS
    job = job_of(config, precision, world_size, lengths, frozen, chunked=chunked)
    here = min(config.distributed.gpu_count, world_size)
    known = cards if len(cards) >= here else [GpuSpec(str(n), "", total=0, free=_BOUNDLESS) for n in range(here)]
    found = make_training_plan(architecture, known, job, count=here)
    said = (
        f"{job.method.upper()} of {architecture.model} by {job.strategy} in {job.precision}, {job.batch} at once, "
        f"{lengths.said}"
    )
    if isinstance(found, TrainingRefusal):
        told = [each.sentence for each in found.alternatives[:3]]
        fits = f"what would fit: {'; '.join(told)}" if told else "choose a smaller model"
        raise JobCannotFit(f"{said}: {found.reason}; {fits}")
    memory = found.memory_mb
    if _answers_apart(config):  # a model of its own, before or behind the training
        load = Workload(config.model.generation_batch_size, job.prompt_tokens, sampling_of(config).max_new_tokens)
        alone = resources_of(architecture, precision, load, known, parallel="replica", most=1).memory_mb
        if alone > memory:
            memory, said = alone, f"{load.batch} answers at once of {architecture.model}, beside {said}"
    host = host_words(architecture, job, steps_of(config, world_size), here, world_size)
    return StepRequest(here, memory, f"{said}{host}: {gib(memory * MIB)} on each GPU")


def foretell(config: TrainConfig, here: int, world_size: int, lengths: Lengths = UNKNOWN) -> None:
    """Logs what a training takes of GPUs that are the user's own: he has started the processes, ``here`` of them on
    this machine. Nothing is refused: they are his, and a plan is a plan. Nor is a driver waited for: CUDA runs in the
    processes already, and the others would wait for this one. Raises MissingModel, BadModel."""
    watch = GpuWatch(RunOptions(num_gpus=here).gpu_options(), "plan")
    cards = () if watch.problem is not None else idle_gpus(watch.gpus)
    told = replace(config.distributed, num_gpus=here, gpu_ids=None)
    try:
        logger.info("%s", need_of(replace(config, distributed=told), cards, world_size, lengths).sentence)
    except JobCannotFit as problem:
        logger.warning("memory may run out: %s", problem)


def job_of(
    config: TrainConfig,
    precision: Precision,
    world_size: int,
    lengths: Lengths = UNKNOWN,
    frozen: Precision | None = None,
    *,
    chunked: bool = False,
) -> TrainingJob:
    """The training in the planner's words.

    Args:
        precision: how trained weights lie in memory.
        frozen: the same of those that no step changes, under an adapter or of the reference; None: as trained ones.
        chunked: as in ``training_job``.
    """
    told, model = config.training, config.model
    options = algorithm_options(config, told.num_rollouts_per_iteration)  # as if there were enough problems
    return training_job(
        Method(told.algorithm),
        options,
        steps_of(config, world_size),
        processes=world_size,
        sequences=rows_of_a_step(config),
        precision=precision,
        frozen=precision if frozen is None else frozen,
        loaded=precision_of(config),
        prompt_tokens=lengths.prompt,
        new_tokens=lengths.answer or lengths.turns * min(model.max_new_tokens, told.max_episode_length),
        sampled=_sampled(config, world_size),
        weighs=on_policy(config) and (options.kl_coef > 0 or _updates_often(config)),
        chunked=chunked,
    )


def _sampled(config: TrainConfig, world_size: int) -> int:
    """Answers that a process of ppo or grpo draws at once."""
    rollouts = -(-config.training.num_rollouts_per_iteration // world_size) + config.grpo.group_size
    return min(config.model.generation_batch_size, max(rollouts, config.training.eval_episodes))


def _updates_often(config: TrainConfig) -> bool:
    """Whether log-probs are asked before a step's first update, because it is not its last; ppo asks for values too."""
    return config.training.algorithm == "ppo" or rows_of_a_step(config) < config.training.num_rollouts_per_iteration


def _answers_apart(config: TrainConfig) -> bool:
    """Whether dpo or sft load the model once more to answer: what is learnt from, or evaluations at the end."""
    told = config.training
    if told.algorithm not in ("dpo", "sft"):
        return False
    return told.data_file is None or bool(told.eval_every and config.eval_envs)
