"""Trains to the end with a trainer of TRL, from the newest whole checkpoint on; leaves a model, whole or not at all.

Imports torch inside functions only.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpuherd.errors import ExitCode, GpuherdError, naming_extras
from gpuherd.posttrain.preference import checkpoints
from gpuherd.posttrain.preference.settings import Run, arguments
from gpuherd.posttrain.training import folders
from gpuherd.posttrain.training.curves import Curves
from gpuherd.posttrain.training.world import World

EXTRAS = dict.fromkeys(("torch", "transformers", "trl", "datasets", "accelerate", "peft"), "posttrain")
RECORD = "training.json"  # in the trained model's folder: what it is of


class Stopped(GpuherdError):
    """A training ended before its last step because it was asked to; its last checkpoint is of that moment."""

    exit_code = ExitCode.INTERRUPTED


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
    from transformers import PrinterCallback

    from gpuherd.posttrain.preference.watching import Watching

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with _quiet(), World.from_environment(run.device) as world:
        if world.is_main:
            folders.settle(model_folder(run.folder))
        world.barrier()
        if is_finished(run.folder, run.identity):
            return model_folder(run.folder)
        newest = checkpoints.newest(run.folder / "checkpoints", run.identity)
        step = 0 if newest is None else int(newest.name.rpartition("-")[2])
        with Curves(run.folder, world, run.report_to, step=step) as curves:
            trainer = build(arguments(run, world.size), [Watching(run, world, curves)], world)
            trainer.remove_callback(PrinterCallback)  # it prints every step's figures; they are in the curves
            trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
            if trainer.state.global_step < run.total_steps:
                raise Stopped(
                    f"stopped after step {trainer.state.global_step} of {run.total_steps}; the same command goes on "
                    "from there"
                )
            _save(trainer, run, world, beside or {})
    return model_folder(run.folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says of older names that TRL uses, and without progress bars of files."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
            yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _save(trainer: Any, run: Run, world: World, beside: Mapping[str, str]) -> None:
    """The trained model, whole or not at all; checkpoints are of no use any more."""
    target = model_folder(run.folder)
    temporary = folders.aside(target)
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
        folders.publish(target)
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
    world.barrier()
