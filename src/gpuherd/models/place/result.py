"""Results of planning, frozen and in bytes: where the blocks of a model go and how full each GPU gets, or why it fits
nowhere.

``MemoryPlan`` and ``AnswerRefusal`` are about a model that generates answers; ``TrainingPlan`` and ``TrainingRefusal``
(in ``training``) about a training. All four are a ``PlanOutcome``; both refusals are a ``Refusal``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from gpuherd.models.describe.description import Architecture
from gpuherd.models.memory.kv_cache import MIB, Reserve, Workload
from gpuherd.models.memory.usage import Usage
from gpuherd.models.memory.weights import Precision, weight_bytes
from gpuherd.models.place.gpus import GpuSpec

if TYPE_CHECKING:
    from gpuherd.models.memory.training_job import TrainingUsage

Parallel = Literal["one", "layers", "tensor"]


U = TypeVar("U", bound="Usage | TrainingUsage")


@dataclass(frozen=True, slots=True)
class GpuLoad(Generic[U]):
    """A GPU and what it holds.

    Attributes:
        first, after_last: of a model that generates answers, the blocks on it, by number. A training has all
            blocks on each GPU, or a part of each.
    """

    gpu: GpuSpec
    usage: U
    first: int = 0
    after_last: int = 0

    @property
    def left(self) -> int:
        """Bytes that stay free, beyond the reserve; below 0 where it doesn't fit."""
        return self.gpu.free - self.usage.total

    @property
    def fullness(self) -> float:
        """The part of what may be used that is used: above 1 where it doesn't fit."""
        return self.usage.total / self.gpu.free if self.gpu.free else float("inf")


@dataclass(frozen=True, slots=True)
class Alternative:
    """A change with which it would fit: its words of the command line, and a sentence."""

    words: tuple[str, ...]
    sentence: str


@dataclass(frozen=True, kw_only=True)
class PlanOutcome(Generic[U]):
    """A plan or a refusal.

    Attributes:
        architecture: what was planned. Over several GPUs its blocks may stand in another order than that of
            computation: a tied head is next to the embedding, whose storage it shares.
        loads: the GPUs in use, those of the first replica in the order of the blocks; of a refusal the best placement,
            with GPUs fuller than they can be, () where there is none.
        warnings: sentences that a person should read.
    """

    architecture: Architecture
    reserve: Reserve
    loads: tuple[GpuLoad[U], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs in use, by one replica."""
        return len(self.loads)

    @property
    def fullest(self) -> GpuLoad[U]:
        """The GPU with the least memory left."""
        return min(self.loads, key=lambda load: load.left)

    @property
    def memory_mb(self) -> int:
        """What must be free on each of the GPUs, in MB of 2^20 bytes: context and reserve are in it. Queues know one
        figure for all GPUs of a job: that of the GPU that needs most."""
        return max(-(-load.usage.total // MIB) for load in self.loads)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why no placement fits.

    Attributes:
        reason: one sentence with the figures.
        missing: bytes that the fullest GPU has too little.
        alternatives: what would fit, the smallest change first; each has been planned.
        incapable: the GPUs can't compute in these numbers, so that memory alone would not help.
    """

    reason: str
    missing: int = 0
    alternatives: tuple[Alternative, ...] = ()
    incapable: bool = False

    def with_advice(self, changes: Sequence[str]) -> str:
        """The reason, and changes with which it would fit, in words."""
        return self.reason + (f". What would fit: {'; '.join(changes)}" if changes else "")


@dataclass(frozen=True, kw_only=True)
class _Answers(PlanOutcome[Usage]):
    """Answers that a model is to generate, with weights in a precision."""

    precision: Precision
    workload: Workload


@dataclass(frozen=True, kw_only=True)
class MemoryPlan(_Answers):
    """A model that fits.

    Attributes:
        parallel: ``one`` GPU a replica; ``layers``: one after the other over several; ``tensor``: each layer over all,
            so that each of ``loads`` has a part of all blocks.
        replicas: how many times the model fits on the GPUs that were given, this one included.
        replica_gpus: the GPUs of each replica, the first one's first.
        largest_batch: with these tokens, on these GPUs of one replica.
    """

    parallel: Parallel
    replicas: int
    replica_gpus: tuple[tuple[GpuSpec, ...], ...]
    largest_batch: int

    @property
    def device_map(self) -> dict[str, int]:
        """Module path -> number of the GPU among those of the replica, as transformers takes it. Empty with
        ``tensor``, where transformers lays out every layer itself."""
        if self.parallel == "tensor":
            return {}
        return {
            block.name: number
            for number, load in enumerate(self.loads)
            for block in self.architecture.blocks[load.first : load.after_last]
        }


@dataclass(frozen=True, kw_only=True)
class AnswerRefusal(_Answers, Refusal):
    """A model that fits nowhere. ``needed``: bytes that the best placement takes together."""

    needed: int = 0


def format_blocks(architecture: Architecture, first: int, after_last: int) -> str:
    """The names of ``blocks[first:after_last]``: ``embedding, layers 0-18``; ``layers 61-79, norm, head``.

    Layers are numbered from 0 in the order of computation.
    """
    before = sum(block.kind == "layer" for block in architecture.blocks[:first])
    parts: list[str] = []
    for kind, group in groupby(architecture.blocks[first:after_last], key=lambda block: block.kind):
        blocks = list(group)
        if kind != "layer":
            name = kind if kind != "other" else ", ".join(block.name for block in blocks)
            if name not in parts:
                parts.append(name)
            continue
        last = before + len(blocks) - 1
        parts.append(f"layer {before}" if len(blocks) == 1 else f"layers {before}-{last}")
        before = last + 1
    return ", ".join(parts) or "nothing"


def weights_bytes(architecture: Architecture, precision: Precision) -> int:
    """All weights in this precision, with their quantisation state, tied ones once."""
    return sum(sum(weight_bytes(each, precision)) for each in architecture.tensors() if each.tied_to is None)
