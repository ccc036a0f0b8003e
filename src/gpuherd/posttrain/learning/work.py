"""The training itself, in each of its processes: data, algorithm, evaluation, summary. What runs where is decided by
others (``launching``); how a policy learns, by the algorithms.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpuherd import __version__
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.engine.curves import amend, read_curves
from gpuherd.posttrain.engine.gpu_memory import memory_summary, of_world
from gpuherd.posttrain.engine.random_state import seed_all
from gpuherd.posttrain.engine.world import World
from gpuherd.posttrain.learning import data, translating
from gpuherd.posttrain.learning.config import TrainConfig
from gpuherd.posttrain.learning.episodes import Evaluation, make_environments, problems_of, roller
from gpuherd.posttrain.learning.folder import TrainDirectory
from gpuherd.posttrain.learning.foresight import algorithm_options
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.types import Policy, Problem, Row, Split, Training

if TYPE_CHECKING:
    from gpuherd.posttrain.envs.interface import Environments

logger = logging.getLogger(__name__)


def train(config: TrainConfig, folder: TrainDirectory, world: World, stopping: Callable[[], bool]) -> Mapping[str, Any]:
    """Trains to the end, or from a checkpoint on. Returns the summary that done.json holds; all processes call it.

    Args:
        stopping: asked after each step; where it says so in any process, a checkpoint is saved and the training ends by
            an error whose exit code is INTERRUPTED.

    Raises what algorithms, environments and models raise.
    """
    started = time.monotonic()
    seed_all(config.training.seed)
    if config.training.wandb_project is not None:  # TRL's trainings know of no names for it; wandb reads these itself
        os.environ["WANDB_PROJECT"] = config.training.wandb_project
        os.environ["WANDB_NAME"] = config.training.wandb_run_name or config.experiment_name
    device = world.device.partition(":")[0]
    on = device if world.size > 1 or device == "cpu" else world.device
    environments = None
    if config.policy_env is not None:
        environments = make_environments("policy_env", config.policy_env, world.device)
    evaluation = Evaluation(config, world, world.device)
    try:
        work, algorithm = _work(config, folder, world, on, environments, evaluation, stopping)
        policy = algorithm.train(work)
        if evaluation and config.training.algorithm in ("dpo", "sft"):
            _evaluated(config, folder, world, policy, evaluation)
    finally:
        evaluation.close()
        if environments is not None:
            environments.close()
    return finish(config, folder, world, policy, time.monotonic() - started)


def _work(
    config: TrainConfig,
    folder: TrainDirectory,
    world: World,
    device: str,
    environments: Environments | None,
    evaluation: Evaluation,
    stopping: Callable[[], bool],
) -> tuple[Training, Any]:
    """The training in the words of algorithms, and the algorithm."""
    online = config.training.algorithm in ("ppo", "grpo")
    seed = config.training.seed
    problems: Sequence[Problem] = ()
    if online and environments is not None:
        wanted = translating.problems_wanted(config)
        problems = problems_of(environments, "policy_env", Split.TRAIN, wanted, seed)
    kind = algorithm_class(config.training.algorithm.upper())
    algorithm = kind(algorithm_options(config, max(1, len(problems))))
    rows: list[Row] = [] if online else _rows(config, folder, world, device, environments, algorithm)
    policy = Policy(translating.model_of(config))
    hooks = _hooks(config, stopping)
    if online and environments is not None:
        told: dict[str, Any] = {"roll": roller(config, environments)}
        if evaluation:
            told |= {"evaluate": evaluation, "evaluate_every": config.training.eval_every}
        hooks = replace(hooks, **told)
    return (
        Training(
            task=None,
            problems=problems,
            rows=[rows],
            policy=policy,
            reference=policy,
            value_model=None,
            folder=folder.root,
            round=0,
            sampling=translating.sampling_of(config),
            precision=translating.precision_of(config),
            device=device,
            seed=seed,
            steps=translating.steps_of(config, world.size),
            digests=world.broadcast({"policy": policy.sha256} if world.is_main else {}),
            extra={"hooks": hooks},
        ),
        algorithm,
    )


def _rows(
    config: TrainConfig,
    folder: TrainDirectory,
    world: World,
    device: str,
    environments: Environments | None,
    algorithm: Any,
) -> list[Row]:
    """What dpo and sft learn from."""
    if environments is not None:
        return data.answered(config, environments, folder, world, device)
    if config.training.algorithm == "dpo":
        return data.preferences_of(config)
    return data.demonstrations_of(config, algorithm, device)


def _hooks(config: TrainConfig, stopping: Callable[[], bool]) -> Hooks:
    told = config.training
    reporters = (("tensorboard",) if told.use_tensorboard else ()) + (("wandb",) if told.wandb_project else ())
    return Hooks(
        save_every=told.save_every,
        keep=told.save_total_limit or 2,
        log_every=told.log_every,
        report_to=reporters,
        run_name=told.wandb_run_name or config.experiment_name,
        project=told.wandb_project,
        stopping=stopping,
    )


def _evaluated(
    config: TrainConfig, folder: TrainDirectory, world: World, policy: Policy, evaluation: Evaluation
) -> None:
    """Evaluates the trained policy at the end: TRL's trainers have no sampler while they train."""
    from gpuherd.posttrain.rollout.sampler import Sampler

    step = max((int(line["step"]) for line in read_curves(folder.root)), default=0)
    sampler = Sampler(policy, translating.precision_of(config), world.device, translating.sampling_of(config))
    found = evaluation(sampler, step)
    if world.is_main:
        amend(folder.root, step, found)


def finish(
    config: TrainConfig, folder: TrainDirectory, world: World, policy: Policy, seconds: float
) -> Mapping[str, Any]:
    """Writes what is told at the end; done.json last, and when it is there checkpoints go. Raises CannotWrite."""
    memory = memory_summary(of_world(world))
    lines = read_curves(folder.root) if world.is_main else []
    summary: dict[str, Any] = {
        "gpuherd_version": __version__,
        "experiment_name": config.experiment_name,
        "algorithm": config.training.algorithm,
        "policy": policy.to_dict(),
        "processes": world.size,
        "strategy": "single" if world.size == 1 else config.distributed.strategy,
        "steps": int(lines[-1]["step"]) if lines else 0,
        "last": {name: value for name, value in lines[-1].items() if name != "step"} if lines else {},
        "seconds": seconds,
    }
    if world.is_main:
        for line in memory:
            logger.info("%s", line)
        folder.write(folder.done, json.dumps(summary, indent=2) + "\n")
        # Not before: what is killed here would train from its beginning again.
        shutil.rmtree(folder.checkpoints, ignore_errors=True)
    world.barrier()
    return world.broadcast(summary)
