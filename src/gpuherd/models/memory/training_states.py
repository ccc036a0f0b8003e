"""A model as training plans count it: equal blocks once, with how often they occur, so that a plan of 126 layers takes
as long as one of two. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod

from gpuherd.errors import UsageError
from gpuherd.models.describe.description import Architecture, Block, Role, Tensor
from gpuherd.models.memory.training_job import ALL_LINEAR, LoraShape, Optimiser, StepMemory, TrainingJob
from gpuherd.models.memory.weights import number_bytes, weight_bytes
from gpuherd.options import did_you_mean


@dataclass(frozen=True, slots=True)
class TrainingModel:
    """An architecture, and its distinct blocks in their order, each with the number of blocks like it."""

    architecture: Architecture
    blocks: tuple[tuple[Block, int], ...]

    def tensors(self) -> Iterator[tuple[Tensor, int]]:
        """Tensors that have a storage of their own (tied ones once), each with the number of tensors like it."""
        for block, times in self.blocks:
            for tensor in block.tensors:
                if tensor.tied_to is None:
                    yield tensor, times

    def layers(self) -> list[tuple[Block, int]]:
        """Those blocks that are layers."""
        return [(block, times) for block, times in self.blocks if block.kind == "layer"]

    def around(self) -> list[Block]:
        """Those that are not."""
        return [block for block, times in self.blocks if block.kind != "layer" for _ in range(times)]

    def first_layer(self) -> Block:
        """The first layer; of a model without layers its first block."""
        return next((block for block, _ in self.layers()), self.blocks[0][0])

    def with_tensors(self, more: Callable[[Block], tuple[Tensor, ...]]) -> TrainingModel:
        """The same with further tensors in each block."""
        blocks = tuple((replace(block, tensors=(*block.tensors, *more(block))), times) for block, times in self.blocks)
        return TrainingModel(self.architecture, blocks)


def training_model(architecture: Architecture) -> TrainingModel:
    """The model of an architecture. Blocks are equal if their tensors are, by name within the block, and their cache.

    >>> from gpuherd.models.describe.description import Role
    >>> layers = [Block(f"h.{n}", "layer", (Tensor(f"h.{n}.w", (4, 4), Role.LINEAR),)) for n in range(3)]
    >>> model = training_model(Architecture("m", "t", None, tuple(layers), 4, 4, 9, 1))
    >>> [(block.name, times) for block, times in model.blocks]
    [('h.0', 3)]
    """
    found: dict[object, tuple[Block, int]] = {}
    for number, block in enumerate(architecture.blocks):
        key: object = number
        if block.kind == "layer" and all(tensor.tied_to is None for tensor in block.tensors):
            key = block.form
        first, times = found.get(key, (block, 0))
        found[key] = (first, times + 1)
    return TrainingModel(architecture, tuple(found.values()))


# Bytes that lie on a GPU from step to step: parameters, gradients, optimiser states. Pure; to the byte.
#
# Sources, each checked in tests against the thing itself:
#
# - gradients have the type of their parameter (torch's autograd);
# - AdamW keeps two moments in the type of the parameter and a float32 step (torch 2.13; arXiv 1711.05101);
# - 8-bit AdamW (arXiv 2110.02861) keeps two bytes a number, a float32 scale for 256 of each, and two tables for all;
#   tensors below 4,096 numbers stay in float32, and so do embeddings, because transformers' Trainer sets them apart;
# - Adafactor (arXiv 1804.04235) keeps a norm and a float32 mean for each row and each column, of a vector each
#   square;
# - FSDP (torch's ``fully_shard``) divides every parameter along its first dimension and rounds up: arXiv 2304.11277.

_FLOAT32 = 4
_SMALL = 4096  # numbers: below that 8-bit AdamW keeps float32
_SCALED = 256  # numbers that share a scale
_TABLES = 2 * 256 * _FLOAT32


def with_lora(model: TrainingModel, lora: LoraShape) -> TrainingModel:
    """The model with an adapter's matrices as further tensors of its blocks: ``….lora_A.default.weight`` and ``…B…``.

    Raises UsageError for a target that no linear module has, and names the nearest.
    """
    names = [tensor.name for block, _ in model.blocks for tensor in block.tensors if tensor.role is Role.LINEAR]
    linears = [name.removesuffix(".weight") for name in names]
    if not linears:
        raise UsageError(f"{model.architecture.model} has no linear module that a LoRA adapter could lie on")
    for target in lora.targets:
        if target != ALL_LINEAR and not any(_is_target(name, (target,)) for name in linears):
            hint = did_you_mean(target, sorted({name.rpartition(".")[2] for name in linears}), cutoff=0)
            raise UsageError(f"no linear module of {model.architecture.model} is called {target}{hint}")
    return model.with_tensors(lambda block: tuple(_matrices(block, lora)))


def has_linear(model: TrainingModel) -> bool:
    """Whether an adapter finds something to lie on."""
    return any(tensor.role is Role.LINEAR for block, _ in model.blocks for tensor in block.tensors)


def is_trained(tensor: Tensor, job: TrainingJob) -> bool:
    """Whether the optimiser changes it: every parameter, or the adapter's matrices alone."""
    return not tensor.buffer and (job.lora is None or is_lora(tensor))


def is_lora(tensor: Tensor) -> bool:
    """Whether it is a matrix of an adapter, by its name."""
    return ".lora_A." in tensor.name or ".lora_B." in tensor.name


def is_target(tensor: Tensor, job: TrainingJob) -> bool:
    """Whether an adapter lies on this weight."""
    if job.lora is None or tensor.role is not Role.LINEAR:
        return False
    return _is_target(tensor.name.removesuffix(".weight"), job.lora.targets)


def features(tensor: Tensor) -> tuple[int, int]:
    """Inputs and outputs of a linear weight."""
    first, last = tensor.shape[0], tensor.shape[-1]
    return (first, last) if tensor.transposed else (last, first)


def states_of(model: TrainingModel, job: TrainingJob, shards: int = 1) -> StepMemory:
    """What one GPU holds of the model that is trained, adapters included; ``shards`` GPUs divide it.

    Tied tensors count once. Of the result's parts parameters, quantisation, gradients and optimiser are set.
    """
    found = [(_tensor_states(tensor, job, shards), times) for tensor, times in model.tensors()]
    weights, scales, gradients, optimiser = (sum(states[n] * times for states, times in found) for n in range(4))
    tables = _TABLES if job.optimiser is Optimiser.ADAMW_8BIT else 0
    return StepMemory("states", weights, scales, gradients, optimiser + tables)


def trained_number_bytes(tensor: Tensor, job: TrainingJob) -> int:
    """Bytes of one number of a tensor that is trained, and of its gradient."""
    return _FLOAT32 if is_lora(tensor) else number_bytes(tensor, job.base_precision)


def optimiser_bytes(tensor: Tensor, shape: tuple[int, ...], number: int, optimiser: Optimiser) -> int:
    """What the optimiser keeps of a parameter: ``shape`` is its part on this GPU, ``number`` the bytes of a number.

    >>> weight = Tensor("w", (4096, 1024), Role.LINEAR)
    >>> [optimiser_bytes(weight, weight.shape, 4, kind) for kind in Optimiser]
    [33554436, 8519680, 0, 20484]
    """
    numel = prod(shape)
    if optimiser is Optimiser.SGD:
        return 0
    if optimiser is Optimiser.ADAMW:
        return 2 * numel * number + _FLOAT32
    if optimiser is Optimiser.ADAFACTOR:
        means = prod(shape[:-1]) + prod(shape[:-2]) * shape[-1] if len(shape) >= 2 else numel
        return _FLOAT32 * (means + 1)
    if numel < _SMALL or tensor.role is Role.EMBEDDING:
        return 2 * numel * _FLOAT32
    return 2 * numel + 2 * _FLOAT32 * -(-numel // _SCALED)


def part_of(shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """The shape of one GPU's part, rounded up as FSDP pads it."""
    return (-(-shape[0] // shards), *shape[1:]) if shape and shards > 1 else shape


def _tensor_states(tensor: Tensor, job: TrainingJob, shards: int) -> tuple[int, int, int, int]:
    """Bytes of a tensor, its quantisation, its gradient and its optimiser's states."""
    weights, quantisation = _stored(tensor, job, shards)
    if not is_trained(tensor, job):
        return weights, quantisation, 0, 0
    shape, number = part_of(tensor.shape, shards), trained_number_bytes(tensor, job)
    return weights, quantisation, prod(shape) * number, optimiser_bytes(tensor, shape, number, job.optimiser)


def _stored(tensor: Tensor, job: TrainingJob, shards: int) -> tuple[int, int]:
    """Codes of 4 bits are divided number by number; their scales are not."""
    if is_lora(tensor):
        return prod(part_of(tensor.shape, shards)) * _FLOAT32, 0
    weights, state = weight_bytes(tensor, job.base_precision)
    if shards == 1:
        return weights, state
    if state:
        return -(-weights // shards), state
    return prod(part_of(tensor.shape, shards)) * (weights // max(1, tensor.numel)), 0


def _matrices(block: Block, lora: LoraShape) -> Iterator[Tensor]:
    for tensor in block.tensors:
        module = tensor.name.removesuffix(".weight")
        if tensor.role is Role.LINEAR and _is_target(module, lora.targets):
            inputs, outputs = features(tensor)
            yield Tensor(f"{module}.lora_A.default.weight", (lora.rank, inputs))
            yield Tensor(f"{module}.lora_B.default.weight", (outputs, lora.rank))


def _is_target(module: str, targets: tuple[str, ...]) -> bool:
    return any(target in (ALL_LINEAR, module) or module.endswith(f".{target}") for target in targets)
