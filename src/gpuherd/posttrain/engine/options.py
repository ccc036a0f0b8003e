"""How weights are changed, and how a training is logged, kept and ended: plain frozen data, checked, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Self, TypeVar

from gpuherd.errors import ExitCode, GpuherdError, UsageError
from gpuherd.posttrain.config.typed import check_range

if TYPE_CHECKING:
    from gpuherd.posttrain.types import Training


class Optimizer(StrEnum):
    """Which optimiser."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw-8bit"  # bitsandbytes': a quarter of AdamW's memory
    SGD = "sgd"  # without momentum


class Scheduler(StrEnum):
    """How the learning rate goes down after the warm-up."""

    LINEAR = "linear"
    COSINE = "cosine"
    CONSTANT = "constant"


class Strategy(StrEnum):
    """How several processes train one model."""

    SINGLE = "single"  # one process
    DDP = "ddp"  # each holds the whole model
    FSDP = "fsdp"  # each holds its part of each layer (torch's fully_shard)


class Sharding(StrEnum):
    """What FSDP keeps whole, in the words of FSDP1 that configs use."""

    FULL_SHARD = "full_shard"  # weights are sharded again after each layer's forward pass
    SHARD_GRAD_OP = "shard_grad_op"  # they stay whole between the forward pass and the backward pass
    NO_SHARD = "no_shard"  # the same as DDP


@dataclass(frozen=True, slots=True)
class OptimiserOptions:
    """An optimiser and its learning rate. Raises UsageError.

    Attributes:
        learning_rate: the highest, reached after the warm-up.
        weight_decay: decoupled (arXiv 1711.05101), of matrices; biases and norms have none.
        betas, eps: of AdamW.
        max_grad_norm: gradients are scaled down to this norm over all weights; None: never.
        scheduler: to 0 at the last step, linearly or along half a cosine; or constant.
        warmup_steps: so many first steps in which the learning rate rises linearly.
    """

    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    scheduler: Scheduler = Scheduler.CONSTANT
    warmup_steps: int = 0
    optimizer: Optimizer = Optimizer.ADAMW

    def __post_init__(self) -> None:
        _named(Scheduler, "scheduler", self.scheduler)
        _named(Optimizer, "optimizer", self.optimizer)
        _check("learning_rate", self.learning_rate, self.learning_rate > 0, "above 0")
        check_range(self, "weight_decay", 0)
        _check("betas", self.betas[0], 0 <= self.betas[0] < 1, "from 0 to under 1")
        _check("betas", self.betas[1], 0 <= self.betas[1] < 1, "from 0 to under 1")
        _check("eps", self.eps, self.eps > 0, "above 0")
        if self.max_grad_norm is not None:
            _check("max_grad_norm", self.max_grad_norm, self.max_grad_norm > 0, "above 0, or null for none")
        check_range(self, "warmup_steps", 0)


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a step is fitted into memory and divided among processes; none of it changes results beyond rounding.

    Attributes:
        micro_batch_size: items whose activations lie in memory together, in each process.
        gradient_checkpointing: activations of layers are computed again in the backward pass: less memory, more time.
        clear_cache_interval: the GPU's allocator gives back what it keeps, every so many steps; None: never.
        dynamic_batch_size: where memory runs out, the micro-batch is halved, and grows back after steps that went well;
            without it the error is raised. Not with FSDP, whose processes can't leave a step alone.
        strategy: for several processes.
        fsdp_sharding_strategy: see Sharding.
        fsdp_cpu_offload: weights, gradients and the optimiser's states lie in the computer's memory.
    """

    micro_batch_size: int = 4
    gradient_checkpointing: bool = False
    clear_cache_interval: int | None = None
    dynamic_batch_size: bool = False
    strategy: Strategy = Strategy.SINGLE
    fsdp_sharding_strategy: Sharding = Sharding.FULL_SHARD
    fsdp_cpu_offload: bool = False

    def __post_init__(self) -> None:
        _named(Strategy, "strategy", self.strategy)
        _named(Sharding, "fsdp_sharding_strategy", self.fsdp_sharding_strategy)
        check_range(self, "micro_batch_size", 1)
        check_range(self, "clear_cache_interval", 1)
        if self.dynamic_batch_size and self.shards:
            raise UsageError(
                "dynamic_batch_size with strategy fsdp: a process whose memory runs out can't leave a step that all do "
                "together; use a smaller micro_batch_size, or strategy ddp"
            )
        if self.fsdp_cpu_offload and not self.shards:
            raise UsageError("fsdp_cpu_offload is for strategy fsdp with full_shard or shard_grad_op alone")

    @property
    def shards(self) -> bool:
        """Whether each process holds only a part of the weights."""
        return self.strategy == Strategy.FSDP and self.fsdp_sharding_strategy != Sharding.NO_SHARD


@dataclass(frozen=True, kw_only=True)
class Optimised:
    """The words for ``OptimiserOptions`` in the options of an algorithm, which gives ``lr`` a default of its own.

    Attributes:
        lr, weight_decay, grad_clip, scheduler, warmup_steps, optimizer, betas, eps: of the optimiser.
    """

    lr: float
    weight_decay: float = 0.0
    grad_clip: float | None = 1.0
    scheduler: Scheduler = Scheduler.CONSTANT
    warmup_steps: int = 0
    optimizer: Optimizer = Optimizer.ADAMW
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def optimiser(self) -> OptimiserOptions:
        """The same for ``TrainEngine``. Raises UsageError for what is out of range, by the name that it has here."""
        _check("lr", self.lr, self.lr > 0, "above 0")
        if self.grad_clip is not None:
            _check("grad_clip", self.grad_clip, self.grad_clip > 0, "above 0, or null for none")
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


class Quantization(StrEnum):
    """How bitsandbytes stores the weights under an adapter."""

    INT8 = "int8"  # arXiv 2208.07339
    NF4 = "nf4"  # arXiv 2305.14314
    NF4_DQ = "nf4-dq"  # with its scales quantised too


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter to be trained in place of the weights (arXiv 2106.09685). Raises UsageError.

    Attributes:
        r: its rank.
        alpha: its update is scaled by alpha / r.
        dropout: of the adapter's inputs, while it is trained.
        target_modules: the last parts of the names of the layers that get one; None: PEFT's choice for the model.
        quantization: of the frozen weights under it, while it is trained (QLoRA, arXiv 2305.14314); None: none. Not
            with strategy fsdp, which can't divide codes.
    """

    r: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] | None = None
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        if self.quantization is not None:
            _named(Quantization, "quantization", self.quantization)
        check_range(self, "r", 1)
        check_range(self, "alpha", above=0)
        _check("dropout", self.dropout, 0 <= self.dropout < 1, "from 0 to under 1")
        if self.target_modules == ():
            raise UsageError("target_modules=[]: no layer would get an adapter; PEFT chooses them for null")


def _named(kind: type[StrEnum], name: str, word: str) -> None:
    if word not in set(kind):
        raise UsageError(f"{name}={word!r}; it is one of {', '.join(kind)}")


def _check(name: str, value: float, right: bool, wanted: str) -> None:
    if not (right and -math.inf < value < math.inf):
        raise UsageError(f"{name}={value}; it is {wanted}")


MOST_SEED = 10**15  # torch takes 64 bits, and some seeds are multiplied by a thousand
SAVE_EVERY = 10  # steps between checkpoints, where nothing else is set


@dataclass(frozen=True, slots=True)
class Watching:
    """Nothing of it changes what is learnt.

    Attributes:
        save_every: steps between checkpoints; None: the algorithm's own number.
        keep: so many of the newest checkpoints are kept.
        log_every: steps between lines of the curves; the last step and those with figures of a check have one always.
        report_to, run_name, project: where curves go besides their file, and what they are called there.
        callbacks: classes that are called (``engine.callbacks``).
        stopping: called after each step; where it is true in any process, a checkpoint is saved and Stopped raised.
    """

    save_every: int | None = None
    keep: int = 2
    log_every: int = 1
    report_to: tuple[str, ...] = ()
    run_name: str | None = None
    project: str | None = None
    callbacks: tuple[str, ...] = ()
    stopping: Callable[[], bool] | None = None

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after so many steps."""
        return step % (self.save_every or SAVE_EVERY) == 0


WatchingT = TypeVar("WatchingT", bound=Watching)


def hooks_of(work: Training, default: WatchingT) -> WatchingT:
    """The hooks of a training's caller (``Training.extra["hooks"]``), or the default; its ``save_every`` counts where
    they name none."""
    hooks: WatchingT = work.extra.get("hooks") or default
    return replace(hooks, save_every=hooks.save_every or default.save_every)


def learning_rate(options: OptimiserOptions, step: int, total_steps: int) -> float:
    """The learning rate of a step, counted from 0, as transformers' schedules have it for one warm-up.

    It rises linearly over the ``warmup_steps`` first steps (step 0 has 1 / warmup_steps of it, not 0: no step is lost),
    then goes down so that it would be 0 at ``total_steps``; constant stays.

    >>> [learning_rate(OptimiserOptions(1.0, scheduler=Scheduler.LINEAR, warmup_steps=2), s, 6) for s in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    if options.scheduler == Scheduler.CONSTANT:
        return options.learning_rate
    gone = (step - options.warmup_steps) / max(1, total_steps - options.warmup_steps)
    left = max(0.0, 1.0 - gone)
    if options.scheduler == Scheduler.COSINE:
        left = (1.0 - math.cos(math.pi * left)) / 2
    return options.learning_rate * left


class Stopped(GpuherdError):
    """A training was asked to stop; a checkpoint of that moment is there to go on from."""

    exit_code = ExitCode.INTERRUPTED

    @classmethod
    def after(cls, done: int, steps: int) -> Self:
        """After so many of its steps.

        >>> print(Stopped.after(2, 6))
        stopped after step 2 of 6; the same command goes on from there
        """
        return cls(f"stopped after step {done} of {steps}; the same command goes on from there")
