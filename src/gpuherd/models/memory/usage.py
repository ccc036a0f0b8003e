"""Bytes on one GPU of a model that generates answers, for any run of its blocks. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from gpuherd.models.describe.description import Architecture, Block, Tensor
from gpuherd.models.memory.kv_cache import CacheSizes, Reserve, Workload, sequence_bytes
from gpuherd.models.memory.peak import Stages, divides_heads, stages_of
from gpuherd.models.memory.weights import Precision, weight_bytes


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


# What a run of blocks takes on one GPU: weights, quantisation, cache, workspace, context and reserve. Pure.
#
# ``CostTable`` answers for any run of blocks and any batch without walking over tensors: sums are kept as prefix
# sums, and what is the greatest of its blocks by how often each distinct need occurs. Tensors of one storage are
# counted once on a GPU, and once more on each further GPU that holds one of them.


class HasMemory(Protocol):
    """A GPU, as far as the bytes on it depend on it: ``place`` knows more of GPUs."""

    @property
    def total(self) -> int:
        """All of its memory, in bytes."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """A storage of several tensors: which blocks have one of them, their names, and its bytes."""

    blocks: tuple[int, ...]
    names: tuple[str, ...]
    weights: int
    quantisation: int


@dataclass(frozen=True, slots=True)
class _Cost:
    """What one block takes: ``held`` are bytes of its own weights and their quantisation, and of the cache of one
    sequence after the prompt and at the end."""

    held: tuple[int, int, int, int]
    stages: Stages


class CostTable:
    """The bytes of any run of blocks of an architecture. Built in milliseconds; an answer takes microseconds.

    Args:
        architecture: whose blocks.
        precision: how weights lie in memory.
        workload: tokens, and the batch where none is named.
        reserve: kept free on each GPU.
        ways: above 1: tensor parallel over so many GPUs; what transformers' plan divides (``Tensor.split``) counts in
            parts, rounded up, and so do the keys and values of the layers that have divided tensors.
    """

    def __init__(
        self, architecture: Architecture, precision: Precision, workload: Workload, reserve: Reserve, *, ways: int = 1
    ) -> None:
        self.architecture = architecture
        self.workload = workload
        self._reserve = reserve
        self._shared = _shared_storages(architecture.blocks, precision, ways)
        tied = {name for shared in self._shared for name in shared.names}
        costs = _costs(architecture, tied, workload, precision, ways)
        # Prefix sums of what is held, and for each distinct need how many of the blocks before each position have it.
        self._own, self._kept = ([_prefix([cost.held[n] for cost in costs]) for n in pair] for pair in ((0, 1), (2, 3)))
        stages = [cost.stages for cost in costs]
        self._needs = [(one, _prefix([int(each == one) for each in stages])) for one in dict.fromkeys(stages)]

    def weights(self, first: int, after_last: int) -> tuple[int, int]:
        """Bytes of the weights of ``blocks[first:after_last]`` and of their quantisation."""
        weights, state = (sums[after_last] - sums[first] for sums in self._own)
        for shared in self._shared:
            at = bisect_left(shared.blocks, first)
            if at < len(shared.blocks) and shared.blocks[at] < after_last:
                weights += shared.weights
                state += shared.quantisation
        return weights, state

    def cache(self, first: int, after_last: int, batch: int | None = None) -> CacheSizes:
        """Bytes that ``blocks[first:after_last]`` keep of all sequences."""
        return CacheSizes(*(sums[after_last] - sums[first] for sums in self._kept)) * self._batch(batch)

    def workspace(self, first: int, after_last: int, batch: int | None = None) -> tuple[int, int]:
        """Bytes on top of weights and cache: at most while the prompt is read, and for each further token."""
        many = self._batch(batch)
        here = [stages for stages, before in self._needs if before[after_last] > before[first]]
        return (
            max((line.at(many) for stages in here for line in stages.prompt), default=0),
            max((line.at(many) for stages in here for line in stages.token), default=0),
        )

    def usage(self, first: int, after_last: int, card: HasMemory, batch: int | None = None) -> Usage:
        """What ``blocks[first:after_last]`` take on a card at the fuller of both moments: after the prompt, at the end.

        ``cache`` is the larger cache of the two, and ``workspace`` what the fuller moment has beyond that.
        """
        weights, state = self.weights(first, after_last)
        cache = self.cache(first, after_last, batch)
        for_prompt, for_token = self.workspace(first, after_last, batch)
        fullest = max(cache.after_prompt + for_prompt, cache.at_end + for_token)
        return Usage(
            weights=weights,
            quantisation=state,
            cache=cache.largest,
            workspace=fullest - cache.largest,
            context=self._reserve.context,
            reserve=self._reserve.on(card.total),
        )

    def _batch(self, batch: int | None) -> int:
        return self.workload.batch if batch is None else batch


def _costs(
    architecture: Architecture, tied: set[str], workload: Workload, precision: Precision, ways: int
) -> list[_Cost]:
    """What each block takes; blocks that differ in their name alone are looked at once."""
    known: dict[object, _Cost] = {}
    found: list[_Cost] = []
    for block in architecture.blocks:
        key = block.form, tuple(tensor.name in tied for tensor in block.tensors)
        cost = known.get(key)
        if cost is None:
            cost = known[key] = _cost(block, architecture, tied, workload, precision, ways)
        found.append(cost)
    return found


def _cost(
    block: Block, architecture: Architecture, tied: set[str], workload: Workload, precision: Precision, ways: int
) -> _Cost:
    pairs = [_part_bytes(tensor, precision, ways) for tensor in block.tensors if tensor.name not in tied]
    kept = CacheSizes()
    if block.cache is not None:
        kept = sequence_bytes(block.cache, workload, precision, decoder_only=not architecture.is_encoder_decoder)
        kept = _part_of_cache(block, kept, ways)
    weights, state = (sum(pair[n] for pair in pairs) for n in (0, 1))
    stages = stages_of(block, architecture, workload, precision, ways=ways)
    return _Cost((weights, state, kept.after_prompt, kept.at_end), stages)


def _part_bytes(tensor: Tensor, precision: Precision, ways: int) -> tuple[int, int]:
    weights, state = weight_bytes(tensor, precision)
    return (-(-weights // ways), -(-state // ways)) if tensor.split else (weights, state)


def _part_of_cache(block: Block, kept: CacheSizes, ways: int) -> CacheSizes:
    if ways == 1 or not divides_heads(block):
        return kept
    return CacheSizes(-(-kept.after_prompt // ways), -(-kept.at_end // ways))


def _shared_storages(blocks: Sequence[Block], precision: Precision, ways: int) -> tuple[_Shared, ...]:
    places: dict[str, list[tuple[int, str]]] = {}
    for number, block in enumerate(blocks):
        for tensor in block.tensors:
            if tensor.tied_to is not None:
                places.setdefault(tensor.tied_to, []).append((number, tensor.name))
    owners = {
        tensor.name: (number, tensor)
        for number, block in enumerate(blocks)
        for tensor in block.tensors
        if tensor.name in places
    }
    return tuple(
        _Shared(
            tuple(sorted({owners[name][0], *(number for number, _ in others)})),
            (name, *(other for _, other in others)),
            *_part_bytes(owners[name][1], precision, ways),
        )
        for name, others in places.items()
    )


def _prefix(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(numbers, initial=0))
