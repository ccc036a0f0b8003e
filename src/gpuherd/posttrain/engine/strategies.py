"""A module made ready for training in several processes, by torch's DDP or torch's fully_shard (FSDP2) layer by layer,
and which rows of its state each process then holds.

fully_shard works on a CPU too. It divides each weight along its first dimension, in the order of ranks, as torch.chunk
does; the optimiser's states that have the weight's shape lie beside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.options import Sharding, StepOptions, Strategy
from gpuherd.posttrain.engine.world import World

if TYPE_CHECKING:
    from torch import Tensor

    from gpuherd.posttrain.engine.trainee import Trainee


def check_strategy(steps: StepOptions, world: World) -> None:
    """Raises UsageError where the strategy and the number of processes don't go together."""
    if world.size > 1 and steps.strategy == Strategy.SINGLE:
        raise UsageError(f"{world.size} processes with strategy single; choose ddp or fsdp")
    if world.backend is None and steps.shards:
        raise UsageError("strategy fsdp in one process has nothing to divide; start several by torchrun, or choose ddp")


def distributed(
    module: Any, steps: StepOptions, world: World, amp_dtype: Any, layers: Sequence[Any] | None, *, all_used: bool
) -> Any:
    """The module on the world's device, wrapped (DDP) or sharded in its place (FSDP: the same object again).

    Args:
        layers: what FSDP gathers one after the other; found by itself where None.
        all_used: every trainable weight has a part in every loss; DDP looks for those that have none otherwise.
    """
    if steps.shards:
        return _sharded(module, steps, world, amp_dtype, transformer_layers(module) if layers is None else layers)
    _move(module, world.device)
    if world.size == 1:
        return module
    from torch.nn.parallel import DistributedDataParallel

    # A forward pass is nobody else's business: buffers are not exchanged in it. (torch 2.13 has another word for it.)
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    apart: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
    devices = [int(world.device.partition(":")[2])] if world.device.startswith("cuda") else None
    wrapped = DistributedDataParallel(
        module,
        device_ids=devices,
        find_unused_parameters=not all_used,
        gradient_as_bucket_view=True,
        **apart,
    )
    if all_used:  # otherwise the first buckets stay
        _settle_buckets(wrapped)
    return wrapped


def _settle_buckets(wrapped: Any) -> None:
    """Gives DDP its final buckets before the first step, by a backward pass of zeros.

    DDP sorts gradients into other buckets once a first backward pass has shown in which order they come. Where a
    gradient lies in its bucket decides in which order three and more processes are summed: a resumed process, whose
    first step is not the training's, would round otherwise. Here the weights get their gradients from the last to the
    first, nearly as a real pass gives them, so that sums still run beside the backward pass.
    """
    import torch

    class Zero(torch.nn.Module):
        def forward(self, total: Any) -> Any:
            for weight in weights:
                total = total + weight.sum().to(total.dtype)
            return total * 0

    module = wrapped.module
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    wrapped.module = Zero()
    try:
        wrapped(torch.zeros((), device=weights[0].device)).backward()
    finally:
        wrapped.module = module
        for weight in weights:
            weight.grad = None


def _sharded(module: Any, steps: StepOptions, world: World, amp_dtype: Any, layers: Sequence[Any]) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    kind = world.device.partition(":")[0]
    # On a CPU the weights are in the computer's memory anyway.
    offload = CPUOffloadPolicy() if steps.fsdp_cpu_offload and kind == "cuda" else OffloadPolicy()
    how: dict[str, Any] = {
        "mesh": init_device_mesh(kind, (world.size,)),
        "reshard_after_forward": steps.fsdp_sharding_strategy == Sharding.FULL_SHARD,
        "mp_policy": MixedPrecisionPolicy(param_dtype=amp_dtype, reduce_dtype=torch.float32),
        "offload_policy": offload,
    }
    for layer in layers:
        fully_shard(layer, **how)
    return fully_shard(module, **how)


def transformer_layers(module: Any) -> list[Any]:
    """The members of the outermost list of like modules that holds most weights: the layers of a transformer, under
    whatever name. Empty where there is none."""
    import torch

    lists: list[tuple[int, list[Any]]] = []
    inside: list[str] = []
    for name, each in module.named_modules():
        if not isinstance(each, torch.nn.ModuleList) or any(name.startswith(outer) for outer in inside):
            continue
        members = list(each)
        if len(members) > 1 and len({type(member) for member in members}) == 1:
            lists.append((sum(weight.numel() for weight in each.parameters()), members))
            inside.append(f"{name}.")
    return max(lists, key=lambda found: found[0])[1] if lists else []


def enable_checkpointing(module: Any) -> None:
    """Lets layers compute their activations again in the backward pass. Raises UsageError for modules that can't."""
    for each in module.modules():
        if not getattr(each, "supports_gradient_checkpointing", False):
            continue
        how = {"use_reentrant": False}
        if hasattr(each, "activation_checkpointing_enable"):  # its name from transformers 5.23 on
            each.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
        else:
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        return
    raise UsageError(f"gradient_checkpointing: {type(module).__name__} can't; turn it off")


@contextmanager
def gathered(module: Any, steps: StepOptions) -> Iterator[None]:
    """While the block runs, every process holds all weights of a sharded module whole: its forward passes then need no
    other process, and each may do as many as it likes (sampling). Memory: the whole model."""
    shards = sharded_parts(module)
    for part in shards:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in shards:
            part.reshard()
            part.set_reshard_after_forward(steps.fsdp_sharding_strategy == Sharding.FULL_SHARD, recurse=False)


def reshard(module: Any) -> None:
    """Makes all weights of a sharded module shards again: after a forward pass without a backward pass some are not."""
    for part in sharded_parts(module):
        part.reshard()


def sharded_parts(module: Any) -> list[Any]:
    """The modules in it that are sharded, itself included."""
    from torch.distributed.fsdp import FSDPModule

    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def _move(module: Any, device: str) -> None:
    """To the device, unless all lies there: quantised weights can't be moved."""
    import torch

    wanted = torch.device(device)
    if any(tensor.device != wanted for tensor in (*module.parameters(), *module.buffers())):
        module.to(wanted)


@dataclass(frozen=True, slots=True)
class Place:
    """Which part of a tensor lies in a process.

    Attributes:
        shape: of the whole.
        start, stop: its rows here; None where it is never divided.
    """

    shape: tuple[int, ...]
    start: int | None = None
    stop: int | None = None


def rows(length: int, rank: int, size: int) -> tuple[int, int]:
    """The first row and the one after the last that a process has, as torch.chunk divides them.

    >>> [rows(5, rank, 4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-length // size)
    return min(rank * each, length), min((rank + 1) * each, length)


def local(tensor: Tensor) -> Tensor:
    """This process's part of it, on the CPU, contiguous."""
    part: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach().cpu().contiguous()  # type: ignore[no-any-return]


def place_of(trainee: Trainee, shape: tuple[int, ...], *, of_weight: bool) -> Place:
    """Where a tensor of this whole shape lies in this process. ``of_weight``: it is divided as its weight is."""
    if not (of_weight and shape):
        return Place(shape)
    if not trainee.steps.shards:
        return Place(shape, 0, shape[0])
    return Place(shape, *rows(shape[0], trainee.world.rank, trainee.world.size))


def state_tensors(trainee: Trainee) -> Iterator[tuple[str, Place, Tensor]]:
    """The trained weights, the optimiser's states and persistent buffers that training can change: name, place, and
    this process's part (on the CPU)."""
    if trainee.steps.shards:
        reshard(trainee.plain)
    for name, weight in trainee.weights.items():
        yield f"weights/{name}", place_of(trainee, tuple(weight.shape), of_weight=True), local(weight)
        for key, value in trainee.optimizer.state.get(weight, {}).items():
            if hasattr(value, "shape"):
                follows = tuple(value.shape) == tuple(weight.shape)
                yield f"optimizer/{name}/{key}", place_of(trainee, tuple(value.shape), of_weight=follows), local(value)
    persistent = trainee.plain.state_dict()
    for name, buffer in trainee.plain.named_buffers():
        if name in persistent:
            yield f"buffers/{name}", Place(tuple(buffer.shape)), local(buffer)


def state_numbers(trainee: Trainee) -> dict[str, dict[str, float]]:
    """The optimiser's states that are plain numbers, by the weight's name (bitsandbytes counts its steps so)."""
    return {
        name: plain
        for name, weight in trainee.weights.items()
        if (
            plain := {
                key: value
                for key, value in trainee.optimizer.state.get(weight, {}).items()
                if isinstance(value, int | float)
            }
        )
    }


def load_state(
    trainee: Trainee,
    names: Iterator[tuple[str, tuple[int, ...]]],
    read: Callable[[str, Place], Tensor],
    numbers_kept: dict[str, dict[str, float]],
) -> None:
    """Puts kept tensors into their places.

    Args:
        names: every kept tensor's name and whole shape.
        read: gives the part of a tensor that a place says.
        numbers_kept: of ``state_numbers``.
    """
    import torch

    if trainee.steps.shards:
        reshard(trainee.plain)
    buffers = dict(trainee.plain.named_buffers())
    states: dict[str, dict[str, Any]] = {name: dict(plain) for name, plain in numbers_kept.items()}
    with torch.no_grad():
        for full, shape in names:
            kind, _, name = full.partition("/")
            if kind == "buffers":
                buffers[name].copy_(read(full, Place(shape)))
            elif kind == "weights":
                weight = trainee.weights[name]
                part = weight.to_local() if hasattr(weight, "to_local") else weight
                part.copy_(read(full, place_of(trainee, shape, of_weight=True)))
            else:
                name, _, key = name.rpartition("/")
                weight = trainee.weights[name]
                follows = shape == tuple(weight.shape)
                value = read(full, place_of(trainee, shape, of_weight=follows))
                states.setdefault(name, {})[key] = _beside(weight, value) if follows else _state(weight, key, value)
    trainee.optimizer.state.clear()
    for name, state in states.items():
        trainee.optimizer.state[trainee.weights[name]] = state


def _beside(weight: Any, value: Tensor) -> Any:
    """A state that has its weight's shape, on the weight's device and divided as it is."""
    if not hasattr(weight, "to_local"):
        return value.to(weight.device)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.to(weight.to_local().device),
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def _state(weight: Any, key: str, value: Tensor) -> Tensor:
    """Another one: torch counts steps on the CPU; bitsandbytes' tables lie on the weight's device."""
    return value if key == "step" else value.to(weight.device)


def without_dropout(module: Any) -> None:
    """Switches a model's dropout off: the policy that learns is the one that sampled, and no other one at each pass."""
    from torch.nn.modules.dropout import _DropoutNd

    for each in module.modules():
        if isinstance(each, _DropoutNd):
            each.p = 0.0
        for name, value in list(vars(each).items()):  # of attention, which hands the number on
            if "dropout" in name and isinstance(value, float):
                setattr(each, name, 0.0)
