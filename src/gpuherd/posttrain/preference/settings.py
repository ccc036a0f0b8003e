"""What one training by TRL is to do, and the same in the words of TRL's settings. Pure; no torch, no TRL.

TRL's own defaults are not what anybody asked for: bfloat16 and gradient checkpointing on, learning rates of 1e-6 to
1e-4 by trainer, sequences cut at 1,024 tokens, KL weight 0, a checkpoint every 500 steps. So every setting that counts
is said here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.options import OptimiserOptions, Optimizer, Scheduler, Sharding, StepOptions

_OPTIMIZERS = {Optimizer.ADAMW: "adamw_torch", Optimizer.ADAMW_8BIT: "adamw_bnb_8bit", Optimizer.SGD: "sgd"}
_SCHEDULES = {
    Scheduler.CONSTANT: "constant_with_warmup",
    Scheduler.LINEAR: "linear",
    Scheduler.COSINE: "cosine",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One training.

    Attributes:
        folder: checkpoints go to ``checkpoints/``, the trained model to ``model/``.
        stage: what progress is told as.
        batch_size: rows of an optimiser step, over all processes.
        sequences: of each row (the completions of a problem); micro-batches are of sequences.
        total_steps: optimiser steps.
        amp_dtype: of autocast; None: none.
        device: ``cpu``, ``cuda`` or ``cuda:0``.
        save_every: steps between checkpoints; None: twenty in all, at least 25 steps apart.
        keep: so many of the newest checkpoints are kept.
        num_workers: processes that make batches.
        log_every: steps between lines of the curves; the last step has one always.
        report_to: ``tensorboard``, ``wandb``: where curves go besides their file.
        run_name, project: what W&B calls the run, and its project.
        stopping: asked after each step; where it says so in any process, a checkpoint is saved and Stopped raised.
        identity: all that a checkpoint must agree in to be gone on from, as JSON values.
    """

    folder: Path
    stage: str
    optimiser: OptimiserOptions
    steps: StepOptions
    batch_size: int
    total_steps: int
    sequences: int = 1
    amp_dtype: str | None = None
    device: str = "cpu"
    seed: int = 0
    save_every: int | None = None
    keep: int = 2
    num_workers: int = 0
    log_every: int = 1
    report_to: tuple[str, ...] = ()
    run_name: str | None = None
    project: str | None = None
    stopping: Callable[[], bool] | None = None
    identity: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("batch_size", "total_steps", "keep", "log_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{self.stage}: {name}={getattr(self, name)}; the least is 1")
        if self.save_every is not None and self.save_every < 1:
            raise UsageError(f"{self.stage}: save_every={self.save_every}; the least is 1")
        if self.steps.shards and self.device == "cpu":
            raise UsageError(
                f"{self.stage}: strategy fsdp on a CPU: accelerate, under TRL, would run ddp and not say so; choose "
                "strategy ddp, or GPUs"
            )

    @property
    def micro_batch_size(self) -> int:
        """Sequences at once at most, in each process."""
        return min(self.steps.micro_batch_size, self.batch_size * self.sequences)

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints."""
        return self.save_every or max(25, -(-self.total_steps // 20))


@dataclass(frozen=True, slots=True)
class Cut:
    """How a process's rows of a step are cut: ``micro`` at once, so many times."""

    micro: int
    times: int


def cut(batch_size: int, micro_batch_size: int, processes: int, stage: str = "batch_size") -> Cut:
    """Micro-batches of one size, the largest that is allowed and divides a process's rows: TRL takes the mean over
    micro-batches, so that uneven ones would weigh some rows more than others.

    Raises UsageError where the processes do not divide the batch.

    >>> cut(24, 8, 2)
    Cut(micro=6, times=2)
    """
    if batch_size % processes:
        raise UsageError(f"{stage}: {processes} processes do not divide batch_size {batch_size}; choose a multiple")
    rows = batch_size // processes
    micro = max(size for size in range(1, min(rows, micro_batch_size) + 1) if rows % size == 0)
    return Cut(micro, rows // micro)


def steps_for(rows: int, epochs: int, batch_size: int, max_steps: int | None = None) -> int:
    """Optimiser steps in which every row is learnt from ``epochs`` times, no more than ``max_steps``.

    >>> steps_for(10, 3, 8), steps_for(10, 3, 8, 2)
    (4, 2)
    """
    steps = -(-rows * epochs // batch_size)
    return steps if max_steps is None else min(steps, max_steps)


def order(rows: int, steps: int, batch_size: int, seed: int) -> list[int]:
    """Which row stands at each place of all steps: one shuffle of all rows after the other, each its own.

    Every batch is full (the last one begins another shuffle), so that no process repeats rows to fill it up, and what
    is learnt from in a step does not depend on the number of processes.

    >>> sorted(order(3, 2, 3, 0)[:3])
    [0, 1, 2]
    """
    places: list[int] = []
    for shuffle in range(-(-steps * batch_size // rows)):
        places += sorted(range(rows), key=partial(_lot, seed, shuffle))
    return places[: steps * batch_size]


def digest(rows: Sequence[dict[str, Any]]) -> str:
    """What tells data apart: the first 16 hex digits of the SHA-256 of the rows as JSON."""
    told = hashlib.sha256()
    for row in rows:
        told.update(json.dumps(row, sort_keys=True).encode())
    return told.hexdigest()[:16]


def _lot(seed: int, shuffle: int, row: int) -> bytes:
    """What a row draws in a shuffle."""
    return hashlib.blake2b(f"{seed} {shuffle} {row}".encode(), digest_size=8).digest()


def arguments(run: Run, processes: int) -> dict[str, Any]:
    """The settings that TRL's config classes share, for ``run`` in so many processes. Raises UsageError."""
    cut(run.batch_size, run.batch_size, processes, run.stage)  # whole rows to each process
    pieces = cut(run.batch_size * run.sequences, run.steps.micro_batch_size, processes, run.stage)
    optimiser = run.optimiser
    return {
        "output_dir": str(run.folder / "checkpoints"),
        "per_device_train_batch_size": pieces.micro,
        "gradient_accumulation_steps": pieces.times,
        "max_steps": run.total_steps,
        "learning_rate": optimiser.learning_rate,
        "weight_decay": optimiser.weight_decay,
        "adam_beta1": optimiser.betas[0],
        "adam_beta2": optimiser.betas[1],
        "adam_epsilon": optimiser.eps,
        "max_grad_norm": optimiser.max_grad_norm or 0.0,  # TRL's word for never
        "optim": _OPTIMIZERS[Optimizer(optimiser.optimizer)],
        "lr_scheduler_type": _SCHEDULES[Scheduler(optimiser.scheduler)],
        "warmup_steps": optimiser.warmup_steps,
        "bf16": run.amp_dtype == "bfloat16",
        "fp16": run.amp_dtype == "float16",
        _checkpointing_argument(): run.steps.gradient_checkpointing,
        "torch_empty_cache_steps": run.steps.clear_cache_interval,
        "use_cpu": run.device == "cpu",
        "seed": run.seed,
        "data_seed": run.seed,
        "save_strategy": "steps",
        "save_steps": run.checkpoint_every,
        "save_total_limit": None,  # old ones are removed when the new one is known to be whole
        "save_only_model": False,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "disable_tqdm": True,
        "push_to_hub": False,
        "remove_unused_columns": False,
        "dataloader_num_workers": run.num_workers,
        "dataloader_pin_memory": run.device != "cpu",
        "ddp_find_unused_parameters": False,
        **_sharding(run.steps),
    }


def _checkpointing_argument() -> str:
    """The name that the installed transformers has for gradient checkpointing: another one from 5.23 on."""
    major, minor = version("transformers").split(".")[:2]
    return "activation_checkpointing" if (int(major), int(minor)) >= (5, 23) else "gradient_checkpointing"


def _sharding(steps: StepOptions) -> dict[str, Any]:
    """FSDP in transformers' words: each layer is a unit."""
    if not steps.shards:
        return {}
    kept = steps.fsdp_sharding_strategy == Sharding.SHARD_GRAD_OP
    return {
        "fsdp": "full_shard auto_wrap offload" if steps.fsdp_cpu_offload else "full_shard auto_wrap",
        "fsdp_config": {
            "fsdp_version": 2,
            "reshard_after_forward": not kept,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "FULL_STATE_DICT",
            "cpu_ram_efficient_loading": False,
        },
    }
