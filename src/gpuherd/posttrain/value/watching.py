"""What a caller of ``train`` has put in as ``Training.extra["hooks"]``, as far as it is used here. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpuherd.posttrain.algos.interface import Training


@dataclass(frozen=True, slots=True)
class Watching:
    """How a training is watched, kept and ended. Nothing of it changes what is learnt.

    Attributes:
        save_every: steps between checkpoints.
        keep: so many of the newest checkpoints are kept.
        log_every: steps between lines of the curves; the last step and those with figures of a check have one always.
        report_to, run_name, project: where curves go besides their file, and what they are called there.
        stopping: asked after each step; where it says so in any process, a checkpoint is saved and Stopped raised.
    """

    save_every: int
    keep: int = 2
    log_every: int = 1
    report_to: tuple[str, ...] = ()
    run_name: str | None = None
    project: str | None = None
    stopping: Callable[[], bool] | None = None


def watching(work: Training, save_every: int) -> Watching:
    """As the hooks say; without hooks, a checkpoint every ``save_every`` steps."""
    hooks: Any = work.extra.get("hooks")
    if hooks is None:
        return Watching(save_every)
    return Watching(
        save_every=hooks.save_every,
        keep=hooks.keep,
        log_every=hooks.log_every,
        report_to=tuple(hooks.report_to),
        run_name=hooks.run_name,
        project=hooks.project,
        stopping=hooks.stopping,
    )
