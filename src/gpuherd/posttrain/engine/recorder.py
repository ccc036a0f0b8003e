"""What every training does behind each of its steps: figures go to the curves and callbacks, a checkpoint is written
when one is due, and the training ends where it is asked to stop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuherd.posttrain.engine.callbacks import Callbacks
from gpuherd.posttrain.engine.checkpoints import Checkpoints, Restored
from gpuherd.posttrain.engine.curves import Curves
from gpuherd.posttrain.engine.options import Stopped, Watching
from gpuherd.posttrain.engine.train_engine import TrainEngine


class Recorder:
    """The curves, callbacks and checkpoints of one training. ``close`` closes the curves.

    Args:
        folder: of the training: ``curves.jsonl``, ``checkpoints/``.
        trainee: goes on from the newest checkpoint.
        identity: what that must have in common with this training.
        total_steps: of the whole training.

    Attributes:
        restored: the checkpoint that the training goes on from; None at its beginning.

    Raises what ``Checkpoints.restore``, ``Curves`` and ``Callbacks`` raise.
    """

    def __init__(
        self, folder: Path, trainee: TrainEngine, watching: Watching, *, identity: Mapping[str, Any], total_steps: int
    ):
        self._trainee, self._watching, self._total_steps = trainee, watching, total_steps
        self._checkpoints = Checkpoints(folder / "checkpoints", trainee.world, identity=identity, keep=watching.keep)
        self.restored: Restored | None = self._checkpoints.restore(trainee)
        self._curves = Curves(
            folder,
            trainee.world,
            watching.report_to,
            step=0 if self.restored is None else self.restored.step,
            name=watching.run_name,
            project=watching.project,
        )
        self._callbacks = Callbacks(watching.callbacks, trainee.world, folder, total_steps)

    def step(
        self,
        step: int,
        figures: Mapping[str, float | None],
        *,
        evaluated: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
        saves_last: bool = False,
    ) -> None:
        """Ends a step, in all processes together.

        Args:
            step: from 1.
            evaluated: figures of an evaluation behind it.
            extra: what a checkpoint keeps besides.
            saves_last: a checkpoint is written behind the last step too.

        Raises Stopped, when a checkpoint is there, and CannotWrite.
        """
        watching, last = self._watching, step == self._total_steps
        figures = {**figures, **(evaluated or {})}
        if evaluated or last or step % watching.log_every == 0:
            self._curves.log(step, figures)
        self._callbacks.step(step, figures)
        if evaluated:
            self._callbacks.evaluation(step, evaluated)
        stopping = watching.stopping is not None and self._trainee.world.any(watching.stopping())
        if saves_last if last else stopping or watching.saves(step):
            self._callbacks.checkpoint(step, self._checkpoints.save(step, self._trainee, extra or {}))
        if stopping and not last:
            raise Stopped.after(step, self._total_steps)

    def end(self, model: Path) -> None:
        """The trained model is written."""
        self._callbacks.end(model)

    def close(self) -> None:
        """Closes the curves."""
        self._curves.close()
