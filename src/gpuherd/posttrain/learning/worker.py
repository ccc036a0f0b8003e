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
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from gpuherd import __version__
from gpuherd.errors import GpuherdError, UsageError, printable
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.options import option
from gpuherd.posttrain.engine.checkpoints import seed_all
from gpuherd.posttrain.engine.curves import amend, memory_summary, of_world, read_curves
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.learning.data import Evaluation, make_environments, problems_of, roller, rows_of, task_of
from gpuherd.posttrain.learning.folder import TrainDirectory, look_over, prepare
from gpuherd.posttrain.learning.preflight import check_data, data_lengths, foretell
from gpuherd.posttrain.learning.settings import MODULE, TrainSettings, read_settings
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.rollout.lengths import UNKNOWN, Lengths
from gpuherd.posttrain.runs.launch import StopRequest
from gpuherd.posttrain.types import Algorithm, Policy, Problem, Split, Training
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
    settings = None
    if told.config is not None or told.device is None:
        settings = read_settings(told.config or TrainDirectory(str(told.output)).config, told.overrides)
    asked = StopRequest()
    device = told.device
    if device is None and settings is not None and settings.device != "auto":
        device = settings.device
    with ExitStack() as stack:
        world = stack.enter_context(DistEnv.from_environment(device))
        begun = world.broadcast(_begun(settings, told, stack, asked) if world.is_main else None)
        if isinstance(begun, GpuherdError):
            if not world.is_main:  # said once is enough
                raise SystemExit(begun.exit_code)
            raise begun
        assert begun is not None  # noqa: S101 - the main process has said it
        settings, folder, lengths = begun
        if folder.done.exists():
            if world.is_main:
                print(f"The training in {printable(str(folder.root))} has ended; nothing is left to do")
            return
        stack.enter_context(asked.listen(folder.stop))
        if world.is_main:
            stack.enter_context(logged_to(folder.run_log, shown=True))
            for warning in settings.warnings() if asked.alone else ():  # gpuherd train has printed them
                logger.warning("%s", warning)
            if asked.alone and world.device != "cpu":
                here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
                foretell(settings, here, world.size, lengths)  # gpuherd train has done so
        elif not os.environ.get("LOG_LEVEL"):
            _quieter()
        _train(settings, folder, world, asked)


def _begun(
    settings: TrainSettings | None, told: JobOptions, stack: ExitStack, asked: StopRequest
) -> tuple[TrainSettings, TrainDirectory, Lengths] | GpuherdError:
    """The configuration, the folder locked and prepared, and how long what is learnt from is, where that was not
    read before; or what is wrong, for all to say."""
    lengths = UNKNOWN
    try:
        if settings is None:
            settings = read_settings(TrainDirectory(str(told.output)).config, told.overrides)
        folder = TrainDirectory.of(settings, told.output)
        look_over(folder, settings, resume=told.resume)
        if asked.alone and not folder.done.exists():
            # Else whoever started us has looked.
            lengths = data_lengths(settings, check_data(settings))
        folder.create_root()
        lock = DispatcherLock(folder.train_lock)
        stack.callback(lock.close)
        prepare(folder, settings, resume=told.resume)
        if asked.alone:  # else it may be meant for us
            folder.stop.unlink(missing_ok=True)
    except GpuherdError as problem:
        return problem
    return settings, folder, lengths


def _quieter() -> None:
    """What all processes warn of, the main one says; what concerns this one alone, its trainee does."""
    logging.getLogger("gpuherd").setLevel(logging.ERROR)
    logging.getLogger("gpuherd.posttrain.engine").setLevel(logging.WARNING)


def _train(settings: TrainSettings, folder: TrainDirectory, world: DistEnv, asked: StopRequest) -> None:
    from transformers.utils import logging as of_transformers

    of_transformers.disable_progress_bar()
    if world.device == "cpu" and settings.precision.amp_dtype == "float16":
        raise UsageError("training.use_fp16 on a CPU: float16 is slow and overflows there; use_bf16, or neither")
    logger.info("process %d of %d on %s", world.rank, world.size, world.device)
    try:
        summary = train(settings, folder, world, asked.stopping)
    except GpuherdError as problem:
        logger.info("error: %s", problem)  # for run.log; who catches it says it to people
        raise
    except Exception:
        logger.info("an unexpected error", exc_info=True)  # the same
        raise
    if world.is_main:
        print(f"Trained: {summary['steps']} steps in {summary['seconds']:.0f} s; {printable(str(folder.model))}")


def train(
    settings: TrainSettings, folder: TrainDirectory, world: DistEnv, stopping: Callable[[], bool]
) -> Mapping[str, Any]:
    """Trains to the end, or from a checkpoint on. Returns the summary that done.json holds; all processes call it.

    Args:
        stopping: asked after each step; where it says so in any process, a checkpoint is saved and the training ends by
            an error whose exit code is INTERRUPTED.

    Raises what algorithms, environments and models raise.
    """
    started = time.monotonic()
    seed_all(settings.sampling.seed)
    if settings.watching.project is not None:  # wandb reads these itself, of every training in this process
        os.environ["WANDB_PROJECT"] = settings.watching.project
        os.environ["WANDB_NAME"] = str(settings.watching.run_name)
    algorithm = settings.algorithm.make()
    environments = None
    if settings.policy_env is not None:
        environments = make_environments("policy_env", settings.policy_env, world.device)
    evaluation = Evaluation(settings, algorithm, world)
    try:
        policy = _learnt(settings, folder, world, environments, evaluation, stopping)
        if evaluation and not settings.samples:
            _evaluated(settings, folder, world, policy, evaluation)
    finally:
        evaluation.close()
        if environments is not None:
            environments.close()
    return finish(settings, folder, world, policy, time.monotonic() - started)


def _learnt(
    settings: TrainSettings,
    folder: TrainDirectory,
    world: DistEnv,
    environments: Environments | None,
    evaluation: Evaluation,
    stopping: Callable[[], bool],
) -> Policy:
    """The trained policy: the training in the words of algorithms, and its algorithm on it."""
    seed, policy = settings.sampling.seed, Policy(settings.model)
    watching = {each.name: getattr(settings.watching, each.name) for each in fields(settings.watching)}
    hooks = Hooks(**{**watching, "stopping": stopping})
    algorithm: Algorithm = settings.algorithm.make()
    problems: Sequence[Problem] = ()
    task = None
    if settings.samples and environments is not None:
        task = task_of(algorithm, environments)
        problems = problems_of(task or environments, "policy_env", Split.TRAIN, settings.problems, seed)
        algorithm = settings.with_problems(len(problems)).make()
        if task is None:
            hooks = replace(hooks, roll=roller(settings, environments), turns=environments.most_turns)
        if evaluation:
            hooks = replace(hooks, evaluate=evaluation, evaluate_every=settings.eval_every)
    kind = world.device.partition(":")[0]
    device = kind if world.size > 1 or kind == "cpu" else world.device
    models = {"policy": policy, **{each: Policy(each) for each in algorithm.frozen_models}}
    return algorithm.train(
        Training(
            task=task,
            problems=problems,
            rows=[rows_of(settings, algorithm, environments, folder, world, device)],
            policy=policy,
            reference=policy,
            value_model=None,
            folder=folder.root,
            round=0,
            sampling=settings.sampling,
            precision=settings.precision,
            device=device,
            seed=seed,
            steps=settings.steps(world.size),
            backend=settings.backend,
            digests=world.broadcast({name: each.sha256 for name, each in models.items()} if world.is_main else {}),
            extra={"hooks": hooks},
        )
    )


def _evaluated(
    settings: TrainSettings, folder: TrainDirectory, world: DistEnv, policy: Policy, evaluation: Evaluation
) -> None:
    """Evaluates the trained policy at the end: what learns from rows has no sampler while it trains."""
    from gpuherd.posttrain.rollout.sampler import Sampler

    step = max((int(line["step"]) for line in read_curves(folder.root)), default=0)
    sampler = Sampler(policy, settings.precision, world.device, settings.sampling)
    found = evaluation(sampler, step)
    if world.is_main:
        amend(folder.root, step, found)


def finish(
    settings: TrainSettings, folder: TrainDirectory, world: DistEnv, policy: Policy, seconds: float
) -> Mapping[str, Any]:
    """Writes the summary; done.json last, and when it is there checkpoints go. Raises CannotWrite."""
    memory = memory_summary(of_world(world))
    lines = read_curves(folder.root) if world.is_main else []
    summary: dict[str, Any] = {
        "gpuherd_version": __version__,
        "experiment_name": settings.experiment_name,
        "algorithm": settings.algorithm.name,
        "policy": policy.to_dict(),
        "processes": world.size,
        "strategy": str(settings.steps(world.size).strategy),
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
