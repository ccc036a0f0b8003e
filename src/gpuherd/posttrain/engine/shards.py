"""The tensors of a training's state as this process holds them: whole, or its rows of them.

fully_shard divides each weight along its first dimension, in the order of ranks, as torch.chunk does; the optimiser's
states that have the weight's shape lie beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuherd.posttrain.engine import strategies
from gpuherd.posttrain.engine.trainee import Trainee

if TYPE_CHECKING:
    from torch import Tensor


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


def tensors(trainee: Trainee) -> Iterator[tuple[str, Place, Tensor]]:
    """The trained weights, the optimiser's states and persistent buffers that training can change: name, place, and
    this process's part (on the CPU)."""
    if trainee.steps.shards:
        strategies.reshard(trainee.plain)
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


def numbers(trainee: Trainee) -> dict[str, dict[str, float]]:
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


def load(
    trainee: Trainee,
    names: Iterator[tuple[str, tuple[int, ...]]],
    read: Callable[[str, Place], Tensor],
    numbers_kept: dict[str, dict[str, float]],
) -> None:
    """Puts kept tensors into their places.

    Args:
        names: every kept tensor's name and whole shape.
        read: gives the part of a tensor that a place says.
        numbers_kept: of ``numbers``.
    """
    import torch

    if trainee.steps.shards:
        strategies.reshard(trainee.plain)
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
