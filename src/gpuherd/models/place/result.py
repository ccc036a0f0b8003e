"""What planning answers: how a model or a training lies on GPUs and how full each gets, or why it fits nowhere. Frozen
data, in bytes.

Four classes for two questions: ``MemoryPlan`` and ``AnswerRefusal`` for a model that generates answers,
``TrainingPlan`` and ``TrainingRefusal`` for a training. All are an ``Outcome``; both refusals are a ``Refusal``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Generic, Literal, TypeVar

from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.result import Usage
from gpuherd.models.plan.training_job import TrainingJob
from gpuherd.models.plan.training_result import TrainingUsage
from gpuherd.models.plan.weights import weight_bytes
from gpuherd.models.plan.workload import MIB, Reserve, Workload

Parallel = Literal["one", "layers", "tensor"]
U = TypeVar("U", Usage, TrainingUsage)


@dataclass(frozen=True, slots=True)
class GpuLoad(Generic[U]):
    """A GPU and what lies there.

    Attributes:
        first, after_last: of a model that generates answers, the blocks that lie there, by number. A training has all
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
class Outcome(Generic[U]):
    """A plan or a refusal.

    Attributes:
        architecture: what was planned. Over several GPUs its blocks may stand in another order than that of
            computation: a tied head lies with the embedding, whose storage it shares.
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


@dataclass(frozen=True, kw_only=True)
class _Answers(Outcome[Usage]):
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


@dataclass(frozen=True, kw_only=True)
class _Training(Outcome[TrainingUsage]):
    """A training.

    Attributes:
        trained: how many numbers are trained.
        checkpointed, plain: usage of the fullest GPU with and without checkpointing, whichever the job asks for.
    """

    job: TrainingJob
    trained: int
    checkpointed: TrainingUsage
    plain: TrainingUsage


@dataclass(frozen=True, slots=True)
class AllGpus:
    """A training divided over all GPUs that were given."""

    gpus: int
    usage: TrainingUsage
    largest_batch: int


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(_Training):
    """A training that fits.

    Attributes:
        loads: ``fsdp``: the fewest that fit; ``ddp``: all that fit; ``single``: one.
        largest_batch: on a GPU, with these tokens, on the GPUs of ``loads``.
        on_all: the same job divided over all GPUs: usage of the fullest and largest batch; None where ``loads`` has
            all of them or more GPUs change nothing.
    """

    largest_batch: int
    on_all: AllGpus | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingRefusal(_Training, Refusal):
    """A training that fits nowhere."""


def format_blocks(architecture: Architecture, first: int, after_last: int) -> str:
    """What lies in ``blocks[first:after_last]``: ``embedding, layers 0-18``; ``layers 61-79, norm, head``.

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
