"""What a plan says: where each block goes and how full each GPU gets, or why not. Plain frozen data, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.workload import MIB, Reserve, Workload

Parallel = Literal["one", "layers", "tensor"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes on one GPU, by what they are for."""

    weights: int = 0
    quantisation: int = 0
    cache: int = 0
    workspace: int = 0
    context: int = 0
    reserve: int = 0

    @property
    def total(self) -> int:
        """All of them, the reserve too."""
        return self.weights + self.quantisation + self.cache + self.workspace + self.context + self.reserve


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """A GPU of one replica: which blocks lie there, by number, and what they take."""

    card: Card
    first: int
    after_last: int
    usage: Usage

    @property
    def left(self) -> int:
        """Bytes that stay free, beyond the reserve; below 0 where it doesn't fit."""
        return self.card.free - self.usage.total

    @property
    def fullness(self) -> float:
        """The part of what may be used that is used: above 1 where it doesn't fit."""
        return self.usage.total / self.card.free if self.card.free else float("inf")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A placement that fits.

    Attributes:
        architecture: what was planned. Over several GPUs its blocks may stand in another order than that of
            computation: a tied head lies with the embedding, whose storage it shares.
        parallel: ``one`` GPU a replica; ``layers``: one after the other over several; ``tensor``: each layer over all.
        loads: the GPUs of the first replica, in the order of the blocks. With ``tensor`` all have all blocks, a part of
            each.
        replicas: how many times the model fits on the GPUs that were given, this one included.
        replica_cards: the cards of each replica, the first one's first.
        largest_batch: with these tokens, on these GPUs of one replica.
        warnings: sentences that a person should read.
    """

    architecture: Architecture
    precision: Precision
    workload: Workload
    reserve: Reserve
    parallel: Parallel
    loads: tuple[GpuLoad, ...]
    replicas: int
    replica_cards: tuple[tuple[Card, ...], ...]
    largest_batch: int
    warnings: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return len(self.loads)

    @property
    def memory_mb(self) -> int:
        """What must be free on each of the GPUs, in MB of 2^20 bytes: context and reserve are in it. Queues know one
        figure for all GPUs of a job: that of the fullest."""
        return max(-(-load.usage.total // MIB) for load in self.loads)

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


@dataclass(frozen=True, slots=True)
class Alternative:
    """Something that would fit: what to change, as words of the command line, and a sentence."""

    words: tuple[str, ...]
    sentence: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """No placement fits.

    Attributes:
        reason: one sentence with the figures.
        needed: bytes that the best placement takes together; ``missing``: what the fullest GPU has too little.
        loads: that best placement on all GPUs, with GPUs fuller than 1; () where there is none.
        alternatives: what would fit, the smallest change first.
    """

    architecture: Architecture
    precision: Precision
    workload: Workload
    reserve: Reserve
    reason: str
    needed: int
    missing: int
    loads: tuple[GpuLoad, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
