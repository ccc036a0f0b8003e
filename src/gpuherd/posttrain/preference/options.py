"""What all algorithms on TRL's trainers are told: plain frozen data, checked, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.checkpoints import DIGESTS
from gpuherd.posttrain.engine.options import Lora, Optimised, StepOptions
from gpuherd.posttrain.engine.watching import Watching
from gpuherd.posttrain.preference.settings import Run, steps_for
from gpuherd.posttrain.types import Training


@dataclass(frozen=True, kw_only=True)
class FittingOptions(Optimised):
    """Beside ``Optimised``. Raises UsageError.

    Attributes:
        epochs: how often each row is learnt from.
        batch_size: rows of an optimiser step, over all processes.
        max_steps: no more optimiser steps than these; None: as many as the epochs have.
        num_workers: processes that make batches.
        save_every: steps between checkpoints; None: twenty in all, at least 25 steps apart.
        lora: an adapter is trained; None: all weights (or the adapter that the policy has already).
    """

    epochs: int = 1
    batch_size: int = 16
    max_steps: int | None = None
    lr: float = 1e-5
    num_workers: int = 0
    save_every: int | None = None
    lora: Lora | None = None

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("max_steps", 1), ("save_every", 1), ("num_workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name}={value}; the least is {least}")
        _ = self.optimiser  # refuses what is out of range

    def identity(self) -> dict[str, Any]:
        """All of them that change what is learnt, as JSON values."""
        left_out = ("num_workers", "save_every")
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def run_of(
    work: Training,
    options: FittingOptions,
    *,
    algorithm: str,
    rows: int,
    data: str,
    sequences: int = 1,
    besides: Mapping[str, Any] | None = None,
) -> Run:
    """One training of ``work``.

    Args:
        rows: that there are to learn from.
        data: what tells them apart from others (``digest``).
        sequences: of each row.
        besides: what changes results besides, as JSON values: what a checkpoint must agree in too.
    """
    hooks: Watching | None = work.extra.get("hooks")
    run = Run(
        folder=work.folder,
        stage=f"{algorithm} training",
        optimiser=options.optimiser,
        steps=work.steps or StepOptions(),
        batch_size=options.batch_size,
        total_steps=steps_for(rows, options.epochs, options.batch_size, options.max_steps),
        sequences=sequences,
        amp_dtype=work.precision.amp_dtype,
        device=work.device,
        seed=work.seed,
        save_every=options.save_every,
        num_workers=options.num_workers,
        identity={
            "algorithm": algorithm,
            "policy": work.named(work.policy),
            "reference": work.named(work.reference),
            DIGESTS: dict(work.digests),
            "data": data,
            "seed": work.seed,
            "precision": [work.precision.dtype, work.precision.amp_dtype],
            "options": options.identity(),
            **(besides or {}),
        },
    )
    return run if hooks is None else replace(run, **hooks.named())
