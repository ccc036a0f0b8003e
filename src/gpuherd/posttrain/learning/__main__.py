"""The program that trains: ``torchrun --nproc-per-node=4 -m gpuherd.posttrain.learning --config c.yaml``.

One process of a training. ``gpuherd train`` starts it; it runs by hand, alone or under torchrun, in the same way. Data,
algorithm, evaluation and summary are the same in each process. What runs where is decided by others (``runs.launch``);
how a training begins and ends in its processes, by ``runs.work``; how a policy learns, by the algorithms.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from gpuherd import __version__
from gpuherd.errors import GpuherdError, UsageError, printable
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.options import option
from gpuherd.posttrain.engine.checkpoints import seed_all
from gpuherd.posttrain.engine.curves import amend, memory_summary, of_world, read_curves
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.learning.data import Evaluation, make_environments, roller, rows_of, task_of, training_problems
from gpuherd.posttrain.learning.prepare import begin, check_data, data_lengths, foretell, look_over
from gpuherd.posttrain.learning.settings import MODULE, TrainSettings, read_settings
from gpuherd.posttrain.rollout.lengths import UNKNOWN, Lengths
from gpuherd.posttrain.runs.folder import TrainDirectory
from gpuherd.posttrain.runs.launch import StopRequest, run_process
from gpuherd.posttrain.runs.work import run_training
from gpuherd.posttrain.types import Policy, Problem, Training
from gpuherd.runs.console import logged_to
from gpuherd.runs.files import write_values
from gpuherd.runs.worker import run_worker

DESCRIPTION = """\
One process of a training; gpuherd train starts it. By hand, over four GPUs:
  torchrun --nproc-per-node=4 -m gpuherd.posttrain.learning --config config.yaml --output outputs/first
"""

logger = logging.getLogger("gpuherd.posttrain.learning")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of a process of a training."""

    config: str | None = option(None, help="the configuration (default: that of the output folder)", metavar="FILE")
    output: str | None = option(None, help="the output folder (default: output_dir)", metavar="DIR")
    device: str | None = option(
        None, choices=("cpu", "cuda"), help="where to train (default: on GPUs, where there are some)"
    )
    resume: bool = option(False, help="go on with the training that lies there")
    overrides: tuple[str, ...] = ()

    def settings(self) -> TrainSettings:
        """The configuration that is named, or that of the folder. Raises UsageError."""
        return read_settings(self.config or TrainDirectory(str(self.output)).config, self.overrides)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains. Returns the exit code; what went wrong is on standard error."""
    return run_worker(MODULE, DESCRIPTION, JobOptions, work, argv, overrides="what to set in the configuration")


def work(options: JobOptions, _words: Sequence[str]) -> None:
    """Joins the others, and trains. Raises what is wrong, and ``Stopped``."""
    if options.config is None and options.output is None:
        raise UsageError("--config FILE is missing (or --output DIR --resume, to go on)")
    # On another machine than the first the folder may not have been begun yet: the main process's counts for all.
    own = options.settings() if options.config is not None or options.device is None else None
    request = StopRequest()
    device = options.device
    if device is None and own is not None and own.device != "auto":
        device = own.device
    with ExitStack() as stack:
        world = stack.enter_context(DistEnv.from_environment(device))
        settings, folder, lengths = world.from_main(
            lambda: _begun(options.settings() if own is None else own, options, stack, alone=request.alone)
        )
        if folder.done.exists():
            if world.is_main:
                print(f"The training in {printable(str(folder.root))} has ended; nothing is left to do")
            return
        stack.enter_context(request.listen(folder.stop))
        if world.is_main:
            stack.enter_context(logged_to(folder.run_log, shown=True))
            if request.alone:  # else gpuherd train has done so
                for warning in settings.warnings():
                    logger.warning("%s", warning)
                if world.device != "cpu":
                    foretell(settings, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), world.size, lengths)
        elif not os.environ.get("LOG_LEVEL"):
            # What all processes warn of, the main one says; what concerns this one alone, its engine does.
            logging.getLogger("gpuherd").setLevel(logging.ERROR)
            logging.getLogger("gpuherd.posttrain.engine").setLevel(logging.WARNING)
        from transformers.utils import logging as of_transformers

        of_transformers.disable_progress_bar()
        try:
            train(settings, folder, world, request.stopping)
        except GpuherdError as problem:
            logger.info("error: %s", problem)  # for run.log; who catches it says it to people
            raise
        except Exception:
            logger.info("an unexpected error", exc_info=True)  # the same
            raise
        if world.is_main and (summary := folder.summary()) is not None:
            print(f"Trained: {summary['steps']} steps in {summary['seconds']:.0f} s; {printable(str(folder.model))}")


def _begun(
    settings: TrainSettings, options: JobOptions, stack: ExitStack, *, alone: bool
) -> tuple[TrainSettings, TrainDirectory, Lengths]:
    """The configuration, the folder locked and begun, and how long what is learnt from is, where that was not read
    before (``alone``: no process has started this one, and looked). Raises what is wrong."""
    folder, lengths = settings.directory(options.output), UNKNOWN
    look_over(folder, settings, resume=options.resume)
    if alone and not folder.done.exists():
        lengths = data_lengths(settings, check_data(settings))
    folder.create_root()
    stack.callback(DispatcherLock(folder.train_lock).close)
    begin(folder, settings, resume=options.resume)
    if alone:  # else it may be meant for us
        folder.stop.unlink(missing_ok=True)
    return settings, folder, lengths


def train(settings: TrainSettings, folder: TrainDirectory, world: DistEnv, stopping: Callable[[], bool]) -> None:
    """Trains to the end, or from a checkpoint on, and writes done.json last; all processes call it.

    Args:
        stopping: asked after each step; where it says so in any process, a checkpoint is saved and the training ends by
            an error whose exit code is INTERRUPTED.

    Raises what algorithms, environments and models raise.
    """
    if world.device == "cpu" and settings.precision.amp_dtype == "float16":
        raise UsageError("training.use_fp16 on a CPU: float16 is slow and overflows there; use_bf16, or neither")
    logger.info("process %d of %d on %s", world.rank, world.size, world.device)
    started, policy = time.monotonic(), Policy(settings.model)
    seed_all(settings.sampling.seed)
    if settings.watching.project is not None:  # wandb reads these itself, of every training in this process
        os.environ["WANDB_PROJECT"] = settings.watching.project
        os.environ["WANDB_NAME"] = str(settings.watching.run_name)
    with ExitStack() as stack:
        algorithm, hooks = settings.algorithm.make(), replace(settings.watching, stopping=stopping)
        environments = None
        if settings.policy_env is not None:
            environments = make_environments("policy_env", settings.policy_env, world.device)
            stack.callback(environments.close)
        evaluation = stack.enter_context(closing(Evaluation(settings, algorithm, world)))
        problems: Sequence[Problem] = ()
        task = None
        if settings.samples and environments is not None:
            task = task_of(algorithm, environments)
            problems = training_problems(settings, task or environments)
            algorithm = settings.with_problems(len(problems)).make()
            if task is None:
                hooks = replace(hooks, roll=roller(settings, environments), turns=environments.most_turns)
            if evaluation:
                hooks = replace(hooks, evaluate=evaluation, evaluate_every=settings.eval_every)

        def end(trained: Policy) -> None:
            if evaluation and not settings.samples:
                _evaluate(settings, folder, world, trained, evaluation)
            _finish(settings, folder, world, trained, time.monotonic() - started)

        training = Training(
            task=task,
            problems=problems,
            rows=[rows_of(settings, algorithm, environments, folder, world, stopping)],
            policy=policy,
            reference=policy,
            value_model=None,
            folder=folder.root,
            round=0,
            sampling=settings.sampling,
            precision=settings.precision,
            device=world.device,
            seed=settings.sampling.seed,
            steps=settings.steps(world.size),
            backend=settings.backend,
            extra={"hooks": hooks},
        )
        run_training(algorithm, training, world, {"policy": policy}, end)


def _evaluate(
    settings: TrainSettings, folder: TrainDirectory, world: DistEnv, policy: Policy, evaluation: Evaluation
) -> None:
    """Evaluates the trained policy at the end: what learns from rows has no sampler while it trains."""
    from gpuherd.posttrain.rollout.sampler import Sampler

    step = max((int(line["step"]) for line in read_curves(folder.root)), default=0)
    found = evaluation(Sampler(policy, settings.precision, world.device, settings.sampling), step)
    if world.is_main:
        amend(folder.root, step, found)


def _finish(settings: TrainSettings, folder: TrainDirectory, world: DistEnv, policy: Policy, seconds: float) -> None:
    """Writes done.json. Raises CannotWrite."""
    memory = memory_summary(of_world(world))
    if not world.is_main:
        return
    for line in memory:
        logger.info("%s", line)
    lines = read_curves(folder.root) or [{"step": 0}]
    summary = {
        "gpuherd_version": __version__,
        "experiment_name": settings.experiment_name,
        "algorithm": settings.algorithm.name,
        "policy": policy.to_dict(),
        "processes": world.size,
        "strategy": str(settings.steps(world.size).strategy),
        "steps": int(lines[-1]["step"]),
        "last": {name: value for name, value in lines[-1].items() if name != "step"},
        "seconds": seconds,
    }
    write_values(folder.done, summary)


if __name__ == "__main__":
    run_process(main)
