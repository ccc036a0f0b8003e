"""The program that trains: words in, an exit code out. Joins the others where torchrun has started it.

Data, algorithm, evaluation and summary are the same in each process. What runs where is decided by others
(``runs.launch``); how a policy learns, by the algorithms.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpuherd import __version__
from gpuherd.errors import GpuherdError, UsageError, printable
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.options import option
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.engine.checkpoints import seed_all
from gpuherd.posttrain.engine.curves import amend, memory_summary, of_world, read_curves
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.learning import data, options
from gpuherd.posttrain.learning.config import TrainConfig
from gpuherd.posttrain.learning.config_file import read_config
from gpuherd.posttrain.learning.data import Evaluation, make_environments, problems_of, roller
from gpuherd.posttrain.learning.folder import TrainDirectory, look_over, prepare
from gpuherd.posttrain.learning.options import MODULE
from gpuherd.posttrain.learning.preflight import check_data
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.rollout.lengths import UNKNOWN, Lengths, lengths_of
from gpuherd.posttrain.runs.launch import StopRequest
from gpuherd.posttrain.types import Policy, Problem, Row, Split, Training
from gpuherd.runs.console import logged_to
from gpuherd.runs.files import write_values
from gpuherd.runs.worker import run_worker

if TYPE_CHECKING:
    from gpuherd.posttrain.envs.interface import Environments


DESCRIPTION = """\
One process of a training; gpuherd train starts it. By hand, over four GPUs:
  torchrun --nproc-per-node=4 -m gpuherd.posttrain.learning --config config.yaml --output outputs/first
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a process of a training is told."""

    config: str | None = option(None, help="the configuration (default: that of the output folder)", metavar="FILE")
    output: str | None = option(None, help="the output folder (default: output_dir)", metavar="DIR")
    device: str | None = option(
        None, choices=("cpu", "cuda"), help="where to train (default: on GPUs, where there are some)"
    )
    resume: bool = option(False, help="go on with the training that lies there")
    overrides: tuple[str, ...] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Trains. Returns the exit code; what went wrong is on standard error."""
    return run_worker(MODULE, DESCRIPTION, JobOptions, work, argv, overrides="what to set in the configuration")


def work(told: JobOptions, _words: Sequence[str]) -> None:
    """Joins the others, and trains. Raises what is wrong, and ``Stopped``."""
    if told.config is None and told.output is None:
        raise UsageError("--config FILE is missing (or --output DIR --resume, to go on)")
    # On another machine than the first the folder may not have been begun yet: the main process's counts for all.
    config = None
    if told.config is not None or told.device is None:
        config = read_config(told.config or TrainDirectory(str(told.output)).config, told.overrides)
    asked = StopRequest()
    device = told.device if told.device is not None or config is None or config.device == "auto" else config.device
    with ExitStack() as stack:
        world = stack.enter_context(DistEnv.from_environment(device))
        begun = world.broadcast(_begun(config, told, stack, asked) if world.is_main else None)
        if isinstance(begun, GpuherdError):
            if not world.is_main:  # said once is enough
                raise SystemExit(begun.exit_code)
            raise begun
        assert begun is not None  # noqa: S101 - the main process has said it
        config, folder, lengths = begun
        if folder.done.exists():
            if world.is_main:
                print(f"The training in {printable(str(folder.root))} has ended; nothing is left to do")
            return
        stack.enter_context(asked.listen(folder.stop))
        if world.is_main:
            stack.enter_context(logged_to(folder.run_log, shown=True))
            if asked.alone and (warning := options.cut(config)) is not None:  # gpuherd train has printed it
                logger.warning("%s", warning)
            if asked.alone and world.device != "cpu":
                from gpuherd.posttrain.learning.memory import foretell

                here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
                foretell(config, here, world.size, lengths)  # gpuherd train has done so
        elif not os.environ.get("LOG_LEVEL"):
            _quieter()
        _train(config, folder, world, asked)


def _begun(
    config: TrainConfig | None, told: JobOptions, stack: ExitStack, asked: StopRequest
) -> tuple[TrainConfig, TrainDirectory, Lengths] | GpuherdError:
    """The configuration, the folder locked and prepared, and how long what is learnt from is, where that was not
    read before; or what is wrong, for all to say."""
    lengths = UNKNOWN
    try:
        if config is None:
            config = read_config(TrainDirectory(str(told.output)).config, told.overrides)
        folder = TrainDirectory.of(config, told.output)
        look_over(folder, config, resume=told.resume)
        if asked.alone and not folder.done.exists():
            # Else whoever started us has looked.
            lengths = lengths_of(check_data(config), options.model_of(config), chat=config.model.use_chat_template)
        folder.create_root()
        lock = DispatcherLock(folder.train_lock)
        stack.callback(lock.close)
        prepare(folder, config, resume=told.resume)
        if asked.alone:  # else it may be meant for us
            folder.stop.unlink(missing_ok=True)
    except GpuherdError as problem:
        return problem
    return config, folder, lengths


def _quieter() -> None:
    """What all processes warn of, the main one says; what concerns this one alone, its trainee does."""
    logging.getLogger("gpuherd").setLevel(logging.ERROR)
    logging.getLogger("gpuherd.posttrain.engine").setLevel(logging.WARNING)


def _train(config: TrainConfig, folder: TrainDirectory, world: DistEnv, asked: StopRequest) -> None:
    from transformers.utils import logging as of_transformers

    of_transformers.disable_progress_bar()
    if world.device == "cpu" and config.training.use_fp16:
        raise UsageError("training.use_fp16 on a CPU: float16 is slow and overflows there; use_bf16, or neither")
    logger.info("process %d of %d on %s", world.rank, world.size, world.device)
    try:
        summary = train(config, folder, world, asked.stopping)
    except GpuherdError as problem:
        logger.info("error: %s", problem)  # for run.log; who catches it says it to people
        raise
    if world.is_main:
        print(f"Trained: {summary['steps']} steps in {summary['seconds']:.0f} s; {printable(str(folder.model))}")


def train(
    config: TrainConfig, folder: TrainDirectory, world: DistEnv, stopping: Callable[[], bool]
) -> Mapping[str, Any]:
    """Trains to the end, or from a checkpoint on. Returns the summary that done.json holds; all processes call it.

    Args:
        stopping: asked after each step; where it says so in any process, a checkpoint is saved and the training ends by
            an error whose exit code is INTERRUPTED.

    Raises what algorithms, environments and models raise.
    """
    started = time.monotonic()
    seed_all(config.training.seed)
    if config.training.wandb_project is not None:  # wandb reads these itself, of every training in this process
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
    world: DistEnv,
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
        wanted = options.problems_wanted(config)
        problems = problems_of(environments, "policy_env", Split.TRAIN, wanted, seed)
    kind = algorithm_class(config.training.algorithm.upper())
    algorithm = kind(options.algorithm_options(config, max(1, len(problems))))
    rows: list[Row] = [] if online else _rows(config, folder, world, device, environments, algorithm)
    policy = Policy(options.model_of(config))
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
            sampling=options.sampling_of(config),
            precision=options.precision_of(config),
            device=device,
            seed=seed,
            steps=options.steps_of(config, world.size),
            digests=world.broadcast({"policy": policy.sha256} if world.is_main else {}),
            extra={"hooks": hooks},
        ),
        algorithm,
    )


def _rows(
    config: TrainConfig,
    folder: TrainDirectory,
    world: DistEnv,
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
    reporters = {"tensorboard": told.use_tensorboard, "wandb": told.wandb_project, "trackio": told.trackio_project}
    return Hooks(
        save_every=told.save_every,
        keep=told.save_total_limit or 2,
        log_every=told.log_every,
        report_to=tuple(name for name, wanted in reporters.items() if wanted),
        run_name=told.wandb_run_name or config.experiment_name,
        project=told.wandb_project or told.trackio_project,
        stopping=stopping,
    )


def _evaluated(
    config: TrainConfig, folder: TrainDirectory, world: DistEnv, policy: Policy, evaluation: Evaluation
) -> None:
    """Evaluates the trained policy at the end: what learns from rows has no sampler while it trains."""
    from gpuherd.posttrain.rollout.sampler import Sampler

    step = max((int(line["step"]) for line in read_curves(folder.root)), default=0)
    sampler = Sampler(policy, options.precision_of(config), world.device, options.sampling_of(config))
    found = evaluation(sampler, step)
    if world.is_main:
        amend(folder.root, step, found)


def finish(
    config: TrainConfig, folder: TrainDirectory, world: DistEnv, policy: Policy, seconds: float
) -> Mapping[str, Any]:
    """Writes the summary; done.json last, and when it is there checkpoints go. Raises CannotWrite."""
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
        write_values(folder.done, summary)
        # Not before: what is killed here would train from its beginning again.
        shutil.rmtree(folder.checkpoints, ignore_errors=True)
    world.barrier()
    return world.broadcast(summary)
