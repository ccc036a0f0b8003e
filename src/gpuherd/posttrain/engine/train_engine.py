"""A module in training: one optimiser step over the items of all processes, exact however they are divided.

The gradient of a step is that of sum(loss_sum) / sum(weight), both sums over all items of all processes. So the number
of processes and the size of micro-batches change nothing but the order of additions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpuherd.errors import GpuherdError
from gpuherd.posttrain.engine import state, strategies
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.options import OptimiserOptions, StepOptions, learning_rate
from gpuherd.runs.worker import is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

T = TypeVar("T")
Sums = dict[str, tuple[float, float]]  # by the name of a figure its sum, and what that is divided by

_CALM = 20  # steps without trouble before micro-batches first grow


class NotFinite(GpuherdError):
    """A loss or a gradient is no finite number; the weights are as they were before the step."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a loss function may return in place of a scalar.

    Attributes:
        total: the sum of the losses of the items, a scalar that gradients can be taken of.
        figures: by name a sum and what it is divided by; a step tells each one's mean over all items of all processes,
            whatever the micro-batches.
    """

    total: Tensor
    figures: Mapping[str, tuple[Tensor | float, Tensor | float]]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one step did.

    Attributes:
        loss: sum(loss_sum) / sum(weight) over all processes; None where no item had any weight: nothing was changed.
        grad_norm: over all weights, before it was cut down; None as above, or where float16 overflowed.
        learning_rate: of this step.
        micro_batch: items at once at most, in this process.
        items: of all processes.
        skipped: the weights were not changed: nothing to learn, or float16 overflowed and the scale was lowered.
        sums: of the figures of ``Loss`` over all processes: by name the sum and what it is divided by.
    """

    loss: float | None
    grad_norm: float | None
    learning_rate: float
    micro_batch: int
    items: int
    skipped: bool = False
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def means(self) -> dict[str, float]:
        """The mean of each figure, by name; those that nothing had a part in are left out."""
        return pooled_means([self])


def pooled_means(steps: Sequence[StepFigures]) -> dict[str, float]:
    """The mean of each figure over all that these steps learnt from; those that nothing had a part in are left out.

    >>> pooled_means([StepFigures(1.0, 1.0, 0.1, 1, 1, sums={"kl": (each, each)}) for each in (1.0, 3.0)])
    {'kl': 1.0}
    """
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step.sums):
        parts = [step.sums.get(name, (0.0, 0.0)) for step in steps]
        weight = math.fsum(each[1] for each in parts)
        if weight > 0:
            found[name] = math.fsum(each[0] for each in parts) / weight
    return found


class TrainEngine:
    """A module with its optimiser in a world.

    Args:
        module: a torch module; those of its weights that require gradients are trained. It is moved to the world's
            device; with FSDP it is sharded in its place.
        total_steps: of the whole training, for the schedule.
        amp_dtype: ``bfloat16`` or ``float16`` (with loss scaling): passes run under autocast in it; None: as it is.
        layers: what FSDP gathers one after the other; the transformer's layers by default.
        all_used: every trainable weight has a part in every loss.

    Attributes:
        module: to be called in losses (the wrapper that sums gradients, where there is one).
        plain: without the wrapper: for names and weights.
        steps_done: optimiser steps since the beginning of the training.

    Raises:
        UsageError: nothing to train, or a strategy that doesn't go with the world or the optimiser.
    """

    def __init__(
        self,
        module: Any,
        optimiser: OptimiserOptions,
        steps: StepOptions,
        world: DistEnv,
        *,
        total_steps: int,
        amp_dtype: str | None = None,
        layers: Sequence[Any] | None = None,
        all_used: bool = True,
    ):
        import torch

        strategies.check_strategy(steps, world)
        self.optimiser, self.steps, self.world, self.total_steps = optimiser, steps, world, total_steps
        self.steps_done = 0
        self.micro = MicroBatch.of(steps.micro_batch_size)
        self._kind = world.device.partition(":")[0]
        self._amp = None if amp_dtype is None else getattr(torch, amp_dtype)
        if steps.gradient_checkpointing:
            strategies.enable_checkpointing(module)
        self.plain = module
        self.module = strategies.distributed(module, steps, world, self._amp, layers, all_used=all_used)
        self.weights = strategies.trainable(module)
        self.optimizer = strategies.make_optimizer(self.weights, optimiser, sharded=steps.shards)
        self.scaler = torch.amp.GradScaler(self._kind, enabled=self._amp is torch.float16)

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(
        self,
        items: Sequence[T],
        loss_sum: Callable[[Sequence[T]], Tensor | Loss],
        weight: Callable[[Sequence[T]], float],
    ) -> StepFigures:
        """One optimiser step over the items of all processes; each gives its own, and may have none.

        Args:
            items: of this process.
            loss_sum: the sum (not the mean) of the losses of some items, a scalar that gradients can be taken of, or a
                ``Loss`` with figures; calls ``self.module``, in all processes equally often.
            weight: what the sum of losses is divided by: the number of tokens, or of items; of none it is 0.

        Raises:
            NotFinite: the loss, or without loss scaling a gradient, is no finite number.
            torch.OutOfMemoryError: without dynamic_batch_size, or where a single item is too much.
        """
        rate = learning_rate(self.optimiser, self.steps_done, self.total_steps)
        of_all = self.world.gather((len(items), float(weight(items)) if items else 0.0))
        count, total = sum(many for many, _ in of_all), math.fsum(heavy for _, heavy in of_all)
        if not math.isfinite(total) or total < 0:
            raise NotFinite(f"step {self.steps_done + 1}: the items' weight is {total}; it is a number from 0 on")
        if total == 0:
            self.steps_done += 1
            return StepFigures(None, None, rate, self.micro.size, count, skipped=True)
        self.module.train()
        own, sums = self._gradients(items, loss_sum, total, [many for many, _ in of_all])
        loss = self.world.total(own)
        of_all_processes = self._summed(sums)
        norm = self._update(loss / total, rate)
        figures = StepFigures(
            loss / total, norm, rate, self.micro.size, count, skipped=norm is None, sums=of_all_processes
        )
        self.steps_done += 1
        if self.steps.dynamic_batch_size:
            self.micro = self.micro.after_step()
        self._clear_cache()
        return figures

    def _gradients(
        self, items: Sequence[T], loss_sum: Callable[[Sequence[T]], Tensor | Loss], total: float, counts: Sequence[int]
    ) -> tuple[float, Sums]:
        """Leaves the gradients, summed over all processes; returns this process's sums of losses and of figures."""
        spare = self._spare(items, counts)
        while True:
            self.optimizer.zero_grad(set_to_none=True)
            most = max(pieces_needed(many, self.micro.size) for many in counts)
            together = not self.steps.dynamic_batch_size
            sums: Sums = {}
            try:
                loss = sum(
                    self._passed(each, loss_sum, total, sums)
                    for each in passes(items, self.micro.size, most, spare, together=together)
                )
                return loss, sums
            except (RuntimeError, MemoryError) as problem:
                smaller = self.micro.halved(len(items)) if is_out_of_memory(problem) else None
                if not self.steps.dynamic_batch_size or smaller is None:
                    raise
                logger.warning(
                    "step %d: memory ran out with %d items at once; going on with %d",
                    self.steps_done + 1,
                    min(self.micro.size, len(items)),
                    smaller.size,
                )
                self.micro = smaller
            # Outside of the handler: its exception holds the tensors that were too many. The whole step is done again,
            # because some layers had their gradients of the pass already.
            self._empty_cache()

    def _spare(self, items: Sequence[T], counts: Sequence[int]) -> T | None:
        """An item for passes that don't count; None in one process."""
        if self.world.size == 1:
            return None
        if min(counts) > 0:
            return items[0]
        return next(each for each in self.world.gather(items[0] if items else None) if each is not None)

    def _passed(
        self, one: Pass[T], loss_sum: Callable[[Sequence[T]], Tensor | Loss], total: float, sums: Sums
    ) -> float:
        """One pass, whose figures are added to ``sums``; returns its sum of losses."""
        import torch

        autocast = torch.autocast(self._kind, self._amp) if self._amp is not None else nullcontext()
        with self._syncing(one.last):
            with autocast:
                made = loss_sum(one.items)
            loss, figures = (made.total, made.figures) if isinstance(made, Loss) else (made, {})
            # Both strategies take the mean of the processes' gradients.
            factor = self.world.size / total if one.counts else 0.0
            self.scaler.scale(loss.float() * factor).backward()  # type: ignore[no-untyped-call]
        for name, (added, weight) in figures.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + _number(added), before[1] + _number(weight)) if one.counts else before
        return float(loss.detach()) if one.counts else 0.0

    def _summed(self, sums: Sums) -> Sums:
        """The figures of all processes; each calls with the same names, as each has done a pass."""
        if not sums:
            return {}
        of_all = self.world.gather(sums)
        return {
            name: (math.fsum(each[name][0] for each in of_all), math.fsum(each[name][1] for each in of_all))
            for name in sums
        }

    def _syncing(self, last: bool) -> AbstractContextManager[Any]:
        from torch.nn.parallel import DistributedDataParallel

        waits = isinstance(self.module, DistributedDataParallel) and not last
        return self.module.no_sync() if waits else nullcontext()

    def _update(self, loss: float, rate: float) -> float | None:
        """Changes the weights; returns the gradients' norm, None where float16 overflowed and nothing was changed."""
        import torch

        if not math.isfinite(loss):
            self.optimizer.zero_grad(set_to_none=True)
            raise NotFinite(f"step {self.steps_done + 1}: the loss is {loss}; the weights are as they were before it")
        self.scaler.unscale_(self.optimizer)
        most = math.inf if self.optimiser.max_grad_norm is None else self.optimiser.max_grad_norm
        found = torch.nn.utils.clip_grad_norm_(self.weights.values(), most)
        norm = float(found.full_tensor() if hasattr(found, "full_tensor") else found)
        if not math.isfinite(norm) and not self.scaler.is_enabled():
            self.optimizer.zero_grad(set_to_none=True)
            raise NotFinite(f"step {self.steps_done + 1}: the gradient's norm is {norm}; the weights are as before")
        strategies.set_learning_rate(self.optimizer, rate)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm if math.isfinite(norm) else None

    def _clear_cache(self) -> None:
        every = self.steps.clear_cache_interval
        if every is not None and self.steps_done % every == 0:
            self._empty_cache()

    def _empty_cache(self) -> None:
        if self._kind == "cuda":
            import torch

            torch.cuda.empty_cache()

    # --- weights ------------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """While the block runs each process has all weights whole: forward passes of ``plain`` need no other process
        (sampling under FSDP). Without FSDP it is so anyway."""
        if not self.steps.shards:
            yield
            return
        with strategies.gathered(self.plain, self.steps):
            yield

    def full_state(
        self, wanted: Callable[[str], bool] | None = None, *, spill: Path | None = None
    ) -> dict[str, Tensor]:
        """Weights and persistent buffers by name, whole, on the CPU: in the main process; nothing in the others. All
        processes call it together, and each tensor of a sharded module is put together by itself.

        Args:
            wanted: the names that are; all by default.
            spill: a folder on whose disk the tensors of a sharded module lie, in files without a name that go with
                them, so that no process has to have the whole model in memory; in memory where None.

        Raises OSError where they can't lie there, in the main process, when all processes have done their part.
        """
        if self.steps.shards:
            strategies.reshard(self.plain)
        return state.whole_state(self.plain, wanted, spill, keep=self.world.is_main)

    # --- going on exactly ---------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """What is no tensor, for JSON: the steps done, the micro-batch, the loss scale."""
        return {"steps_done": self.steps_done, "micro": asdict(self.micro), "scaler": self.scaler.state_dict()}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """From ``counters``. The micro-batch is as it was, unless the options say another size now."""
        self.steps_done = int(counters["steps_done"])
        kept = MicroBatch(**counters["micro"])
        self.micro = kept if kept.most == self.steps.micro_batch_size else MicroBatch.of(self.steps.micro_batch_size)
        if counters["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(dict(counters["scaler"]))


def _number(value: Tensor | float) -> float:
    return float(value if isinstance(value, int | float) else value.detach())


# --- micro-batches, pure --------------------------------------------------------------------------------------------


def cuts(items: Sequence[T], pieces: int) -> list[Sequence[T]]:
    """The items in so many pieces whose lengths differ by one at most, in order; those at the end may be empty.

    >>> [list(piece) for piece in cuts("abcde", 3)]
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    base, longer = divmod(len(items), max(1, pieces))
    ends = [0]
    for number in range(pieces):
        ends.append(ends[-1] + base + (number < longer))
    return [items[begin:end] for begin, end in pairwise(ends)]


def pieces_needed(count: int, size: int) -> int:
    """How many micro-batches of at most ``size`` so many items take."""
    return -(-count // size)


@dataclass(frozen=True, slots=True)
class Pass(Generic[T]):
    """One forward and backward pass.

    Attributes:
        items: at least one.
        counts: False where the pass is there for the other processes' sake: its loss is multiplied by 0.
        last: gradients are summed over the processes in it (DDP).
    """

    items: Sequence[T]
    counts: bool
    last: bool


def passes(items: Sequence[T], size: int, most: int, spare: T | None, *, together: bool) -> list[Pass[T]]:
    """The passes of one process in one step.

    Args:
        size: items at once at most.
        most: passes of the process that needs most, if all were to do as many.
        spare: an item for passes that don't count; None in a world of one process.
        together: all processes do equally many passes (FSDP needs it; DDP as long as none changes its size on its own).
            Otherwise each does its own, and one more that doesn't count, in which gradients are summed.
    """
    if spare is None:
        return [Pass(piece, True, False) for piece in cuts(items, pieces_needed(len(items), size))]
    if together:
        real = cuts(items, most)
        return [Pass(piece or [spare], bool(piece), number + 1 == most) for number, piece in enumerate(real)]
    own = [Pass(piece, True, False) for piece in cuts(items, pieces_needed(len(items), size))]
    return [*own, Pass([spare], False, True)]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The size of micro-batches where it follows the memory.

    Attributes:
        most: of the options.
        size: now.
        calm: steps since it last changed.
        patience: so many calm steps before it grows; doubled whenever it had grown too far, so that a size that never
            fits is tried ever more seldom.
        grown: its last change was a growth.
        halvings: how often memory ran out.
    """

    most: int
    size: int
    calm: int = 0
    patience: int = _CALM
    grown: bool = False
    halvings: int = 0

    @classmethod
    def of(cls, most: int) -> MicroBatch:
        """Of this size."""
        return cls(most, most)

    def halved(self, items: int) -> MicroBatch | None:
        """After memory has run out with so many items at once at most; None where one item was too much."""
        tried = min(self.size, items)
        if tried <= 1:
            return None
        patience = 2 * self.patience if self.grown else self.patience
        return replace(self, size=tried // 2, calm=0, patience=patience, grown=False, halvings=self.halvings + 1)

    def after_step(self) -> MicroBatch:
        """After a step that went well: perhaps doubled again."""
        if self.size == self.most:
            return self
        if self.calm + 1 < self.patience:
            return replace(self, calm=self.calm + 1)
        return replace(self, size=min(self.most, 2 * self.size), calm=0, grown=True)
