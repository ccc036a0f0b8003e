"""Trains to the end with a trainer of TRL, from the newest whole checkpoint on; leaves a model, whole or not at all.

Imports torch inside functions only.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuherd import atomic
from gpuherd.errors import UsageError, naming_extras
from gpuherd.posttrain.engine.curves import Curves
from gpuherd.posttrain.engine.stopping import Stopped
from gpuherd.posttrain.engine.world import World
from gpuherd.posttrain.preference import checkpoints
from gpuherd.posttrain.preference.settings import Run, arguments
from gpuherd.runs.worker import is_out_of_memory

logger = logging.getLogger(__name__)

EXTRAS = dict.fromkeys(("torch", "transformers", "trl", "datasets", "accelerate", "peft"), "posttrain")
RECORD = "training.json"  # in the trained model's folder: what it is of


Build = Callable[[dict[str, Any], Sequence[Any], World], Any]


def model_folder(folder: Path) -> Path:
    """Where the trained model of a training in ``folder`` is."""
    return folder / "model"


def is_finished(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the training in this folder has ended. Raises UsageError where it was another training."""
    record = model_folder(folder) / RECORD
    if not record.exists():
        return False
    checkpoints.check_identity(
        model_folder(folder), json.loads(record.read_text(encoding="utf-8")).get("identity"), identity
    )
    return True


def fit(run: Run, build: Build, beside: Mapping[str, str] | None = None) -> Path:
    """Trains as ``run`` says; nothing is done where that has been done. Returns the folder of the model.

    Args:
        build: makes the trainer, of TRL's settings, callbacks and the world; called once there is something to do.
        beside: texts of further files in the model's folder, by name.

    Raises:
        UsageError: the folder is that of another training; settings that don't go together.
        NotFinite: the loss is no number.
        Stopped: it was asked to stop, and has saved a checkpoint.
        MissingExtra, CannotWrite.
    """
    with naming_extras(EXTRAS, "training by TRL takes"):
        import datasets  # noqa: F401
        import trl  # noqa: F401
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with _quiet(), World.from_environment(run.device) as world:
        if world.is_main:
            atomic.settle(model_folder(run.folder))
        world.barrier()
        if is_finished(run.folder, run.identity):
            return model_folder(run.folder)
        _check_world(run, world)
        while not _trained(run, build, world, beside or {}):
            run = _halved(run)
    return model_folder(run.folder)


def _trained(run: Run, build: Build, world: World, beside: Mapping[str, str]) -> bool:
    """Trains from the newest checkpoint on, and saves the model. False where memory ran out and less may fit."""
    from transformers import PrinterCallback

    from gpuherd.posttrain.preference.watching import Watching

    newest = checkpoints.newest(run.folder / "checkpoints", run.identity)
    step = 0 if newest is None else int(newest.name.rpartition("-")[2])
    with Curves(run.folder, world, run.report_to, step=step, name=run.run_name, project=run.project) as curves:
        trainer = build(arguments(run, world.size), [Watching(run, world, curves)], world)
        trainer.remove_callback(PrinterCallback)  # it prints every step's figures; they are in the curves
        try:
            trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
        except (RuntimeError, MemoryError) as problem:
            if not (run.steps.dynamic_batch_size and run.micro_batch_size > 1 and is_out_of_memory(problem)):
                raise
            return False
        done = trainer.state.global_step
        if done < run.total_steps:
            raise Stopped.after(done, run.total_steps)
        _save(trainer, run, world, beside)
    return True


def _halved(run: Run) -> Run:
    """With half the rows at once, after memory ran out; gives back what the failed try held."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    size = run.micro_batch_size // 2
    logger.warning("%s: out of memory with %d rows at once; going on with %d", run.stage, run.micro_batch_size, size)
    return replace(run, steps=replace(run.steps, micro_batch_size=size))


def _check_world(run: Run, world: World) -> None:
    """Raises UsageError for what can't be done on this device, or in so many processes."""
    if world.size == 1 and world.device not in ("cpu", "cuda:0"):
        raise UsageError(
            f"{run.stage} on {world.device}: transformers' trainers use the first GPU that a process sees; show it "
            "that one alone (CUDA_VISIBLE_DEVICES), and say cuda"
        )
    if run.steps.dynamic_batch_size and world.size > 1:
        raise UsageError(
            f"{run.stage}: dynamic_batch_size in {world.size} processes: TRL's trainers can't leave a step that all do "
            "together; use a smaller micro_batch_size"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says of older names that TRL uses, and without progress bars of files and of data."""
    import datasets
    from transformers.utils import logging as transformers_logging

    shown, data_shown = transformers_logging.is_progress_bar_enabled(), not datasets.are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
            yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
        if data_shown:
            datasets.enable_progress_bars()


def _save(trainer: Any, run: Run, world: World, beside: Mapping[str, str]) -> None:
    """The trained model, whole or not at all; checkpoints are of no use any more."""
    target = model_folder(run.folder)
    temporary = atomic.aside(target)
    if world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    world.barrier()
    trainer.save_model(str(temporary))  # all processes: sharded weights are gathered
    world.barrier()
    if world.is_main:
        (temporary / "training_args.bin").unlink(missing_ok=True)  # a pickle that nobody needs
        record = {"identity": run.identity, "steps": run.total_steps, "batch_size": run.batch_size}
        for name, text in {**beside, RECORD: json.dumps(record) + "\n"}.items():
            (temporary / name).write_text(text, encoding="utf-8")
        atomic.publish(target)
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
    world.barrier()
