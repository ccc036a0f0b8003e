"""What is told and kept while a trainer of TRL is at work: progress, curves, whole checkpoints.

Imports transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gpuherd.engines import progress
from gpuherd.posttrain.engine.curves import Curves
from gpuherd.posttrain.engine.trainee import NotFinite
from gpuherd.posttrain.engine.world import World
from gpuherd.posttrain.preference import checkpoints
from gpuherd.posttrain.preference.settings import Run

# The last two are means over micro-batches of the extremes of each: they depend on how a step is cut.
_NOT_TOLD = ("epoch", "total_flos", "num_tokens", "step_time", "min_reward", "max_reward")


class Watching(TrainerCallback):  # type: ignore[misc]
    """Called by the trainer in every process."""

    def __init__(self, run: Run, world: World, curves: Curves):
        self._run, self._world, self._curves = run, world, curves

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Tells where it goes on from."""
        progress.report(state.global_step, state.max_steps, self._run.stage)

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tells how far it is; ends the training, with a checkpoint, where it is asked to stop."""
        if self._world.is_main:
            progress.report(state.global_step, state.max_steps, self._run.stage)
        stopping = self._run.stopping
        if stopping is not None and self._world.any(stopping()) and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Adds the step to the curves. Raises NotFinite for a loss that is no number, before anything is saved."""
        if logs is None or "loss" not in logs:
            return
        told = {name: float(value) for name, value in logs.items() if name not in _NOT_TOLD}
        # With float16 a step that overflowed is left out, and its norm is no number.
        if self._run.amp_dtype == "float16" and not math.isfinite(told.get("grad_norm", 0.0)):
            told.pop("grad_norm")
        for name, value in told.items():
            if not math.isfinite(value):
                raise NotFinite(
                    f"{self._run.stage}: the {name} of step {state.global_step} is {value}; lower the learning rate, "
                    "or train in float32; the checkpoint before is whole"
                )
        if state.global_step % self._run.log_every == 0 or state.global_step == state.max_steps:
            self._curves.log(state.global_step, told)

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Makes the checkpoint count, once all processes have written theirs."""
        self._world.barrier()
        if self._world.is_main:
            folder = Path(args.output_dir)
            checkpoints.finish(folder / f"checkpoint-{state.global_step}", self._run.identity)
            checkpoints.rotate(folder, self._run.keep)
        self._world.barrier()
