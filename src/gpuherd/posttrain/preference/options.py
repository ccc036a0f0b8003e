"""What all algorithms on TRL's trainers are told: plain frozen data, checked, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.interface import Training
from gpuherd.posttrain.preference.settings import Run, steps_for
from gpuherd.posttrain.training.options import Lora, OptimiserOptions, Optimizer, Scheduler, StepOptions


@dataclass(frozen=True, kw_only=True)
class FittingOptions:
    """Raises UsageError.

    Attributes:
        epochs: how often each row is learnt from.
        batch_size: rows of an optimiser step, over all processes.
        max_steps: no more optimiser steps than these; None: as many as the epochs have.
        lr, weight_decay, grad_clip, scheduler, warmup_steps, optimizer, betas, eps: of the optimiser.
        num_workers: processes that make batches.
        save_every: steps between checkpoints; None: twenty in all, at least 25 steps apart.
        lora: an adapter is trained; None: all weights (or the adapter that the policy has already).
    """

    epochs: int = 1
    batch_size: int = 16
    max_steps: int | None = None
    lr: float = 1e-5
    weight_decay: float = 0.0
    grad_clip: float | None = 1.0
    scheduler: Scheduler = Scheduler.CONSTANT
    warmup_steps: int = 0
    optimizer: Optimizer = Optimizer.ADAMW
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    num_workers: int = 0
    save_every: int | None = None
    lora: Lora | None = None

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("max_steps", 1), ("save_every", 1), ("num_workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name}={value}; the least is {least}")
        _ = self.optimiser  # refuses what is out of range

    @property
    def optimiser(self) -> OptimiserOptions:
        """The optimiser's part."""
        return OptimiserOptions(
            learning_rate=self.lr,
            weight_decay=self.weight_decay,
            betas=self.betas,
            eps=self.eps,
            max_grad_norm=self.grad_clip,
            scheduler=self.scheduler,
            warmup_steps=self.warmup_steps,
            optimizer=self.optimizer,
        )

    def identity(self) -> dict[str, Any]:
        """All of them that change what is learnt, as JSON values."""
        left_out = ("num_workers", "save_every")
        return {name: value for name, value in asdict(self).items() if name not in left_out}


class Hooks(Protocol):
    """What a caller of ``train`` may put in as ``Training.extra["hooks"]``, as far as it is used here.

    Attributes:
        save_every: steps between checkpoints.
        keep: so many are kept.
        log_every: steps between lines of the curves.
        report_to: ``tensorboard``, ``wandb``.
        run_name, project: for W&B.
        stopping: asked after each step; where it says so, a checkpoint is saved and the training ends by Stopped.
    """

    @property
    def save_every(self) -> int: ...
    @property
    def keep(self) -> int: ...
    @property
    def log_every(self) -> int: ...
    @property
    def run_name(self) -> str | None: ...
    @property
    def project(self) -> str | None: ...
    @property
    def report_to(self) -> Sequence[str]: ...
    @property
    def stopping(self) -> Callable[[], bool] | None: ...


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
    hooks: Hooks | None = work.extra.get("hooks")
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
            "model": work.policy.model,
            "adapter": work.policy.adapter,
            "reference": [work.reference.model, work.reference.adapter],
            "data": data,
            "seed": work.seed,
            "precision": [work.precision.dtype, work.precision.amp_dtype],
            "options": options.identity(),
            **(besides or {}),
        },
    )
    if hooks is None:
        return run
    return replace(
        run,
        save_every=hooks.save_every,
        keep=hooks.keep,
        log_every=hooks.log_every,
        report_to=tuple(hooks.report_to),
        run_name=hooks.run_name,
        project=hooks.project,
        stopping=hooks.stopping,
    )
