"""How a training is watched, kept and ended: plain frozen data, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Watching:
    """Nothing of it changes what is learnt.

    Attributes:
        save_every: steps between checkpoints.
        keep: so many of the newest checkpoints are kept.
        log_every: steps between lines of the curves; the last step and those with figures of a check have one always.
        report_to, run_name, project: where curves go besides their file, and what they are called there.
        stopping: asked after each step; where it says so in any process, a checkpoint is saved and Stopped raised.
    """

    save_every: int = 10
    keep: int = 2
    log_every: int = 1
    report_to: tuple[str, ...] = ()
    run_name: str | None = None
    project: str | None = None
    stopping: Callable[[], bool] | None = None

    def named(self) -> dict[str, Any]:
        """These fields by name, without what a subclass adds."""
        return {each.name: getattr(self, each.name) for each in fields(Watching)}
