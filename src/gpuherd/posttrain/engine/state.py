"""The state of a training by name: weights, optimiser states and buffers, as the processes divide them and checkpoints
keep them; and a model's whole weights, put together one after the other."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.posttrain.engine.strategies import reshard

if TYPE_CHECKING:
    from torch import Tensor

    from gpuherd.posttrain.engine.train_engine import TrainEngine


def state_of(trainee: TrainEngine) -> dict[str, Any]:
    """The trained weights, the optimiser's states and the persistent buffers by name, as they lie in this process (as
    DTensors where they are sharded): ``weights/NAME``, ``optimizer/NAME/KEY``, ``buffers/NAME``."""
    if trainee.steps.shards:
        reshard(trainee.plain)
    found: dict[str, Any] = {}
    for name, weight in trainee.weights.items():
        found[f"weights/{name}"] = weight.detach()
        for key, value in trainee.optimizer.state.get(weight, {}).items():
            if hasattr(value, "shape"):
                found[f"optimizer/{name}/{key}"] = value
    persistent = trainee.plain.state_dict()
    found |= {f"buffers/{name}": each for name, each in trainee.plain.named_buffers() if name in persistent}
    return found


def state_numbers(trainee: TrainEngine) -> dict[str, dict[str, float]]:
    """The optimiser's states that are plain numbers, by the weight's name (bitsandbytes counts its steps so)."""
    states = {name: trainee.optimizer.state.get(weight, {}) for name, weight in trainee.weights.items()}
    plain = {
        name: {key: value for key, value in state.items() if isinstance(value, int | float)}
        for name, state in states.items()
    }
    return {name: numbers for name, numbers in plain.items() if numbers}


def empty_state(trainee: TrainEngine, kept: Mapping[str, tuple[tuple[int, ...], Any]]) -> dict[str, Any]:
    """Tensors to read a kept state into, by the names of ``state_of``: the weights and buffers themselves, and new ones
    for the optimiser, which lie and are divided as their weight is where they have its shape.

    Args:
        kept: whole shape and dtype of each tensor.

    Raises KeyError for a name that the trainee does not have.
    """
    import torch

    if trainee.steps.shards:
        reshard(trainee.plain)
    buffers = dict(trainee.plain.named_buffers())
    found: dict[str, Any] = {}
    for full, (shape, dtype) in kept.items():
        kind, _, name = full.partition("/")
        if kind == "weights":
            found[full] = trainee.weights[name].detach()
        elif kind == "buffers":
            found[full] = buffers[name]
        else:
            name, _, key = name.rpartition("/")
            weight = trainee.weights[name].detach()
            if key == "step":  # torch counts steps on the CPU
                found[full] = torch.empty(shape, dtype=dtype)
            elif shape == tuple(weight.shape):
                found[full] = torch.empty_like(weight, dtype=dtype)
            else:  # bitsandbytes' tables
                found[full] = torch.empty(shape, dtype=dtype, device=weight.device)
    return found


def set_optimizer_state(
    trainee: TrainEngine, state: Mapping[str, Any], numbers: Mapping[str, dict[str, float]]
) -> None:
    """Gives the optimiser the states of ``empty_state``, once they are read, and of ``state_numbers``."""
    states: dict[str, dict[str, Any]] = {name: dict(plain) for name, plain in numbers.items()}
    for full, tensor in state.items():
        kind, _, name = full.partition("/")
        if kind == "optimizer":
            name, _, key = name.rpartition("/")
            states.setdefault(name, {})[key] = tensor
    trainee.optimizer.state.clear()
    for name, each in states.items():
        trainee.optimizer.state[trainee.weights[name]] = each


def whole_state(
    module: Any, wanted: Callable[[str], bool] | None, spill: Path | None, *, keep: bool
) -> dict[str, Tensor]:
    """See ``TrainEngine.full_state``; where not ``keep`` this process takes part, and nothing is returned."""
    state: dict[str, Tensor] = {}
    done: dict[int, Tensor | None] = {}  # weights that are tied are one
    problem: OSError | None = None
    for name, tensor in module.state_dict(keep_vars=True).items():
        if wanted is not None and not wanted(name):
            continue
        if id(tensor) not in done:
            done[id(tensor)] = None
            sharded = hasattr(tensor, "full_tensor")
            whole = (tensor.full_tensor() if sharded else tensor).detach()
            if keep and problem is None:
                try:
                    done[id(tensor)] = _on_disk(whole, spill) if sharded and spill else whole.cpu()
                except OSError as trouble:
                    problem = trouble
        if (kept := done[id(tensor)]) is not None:
            state[name] = kept
    if problem is not None:
        raise problem
    return state


def _on_disk(tensor: Tensor, folder: Path) -> Tensor:
    """A copy of the tensor in a file of this folder that has no name and ends with it. Raises OSError."""
    import torch

    if not tensor.numel():
        return tensor.cpu()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".weights-")
    try:
        # Before it is mapped: writing where the disk is full would end the process.
        os.posix_fallocate(descriptor, 0, tensor.nbytes)
        mapped = torch.from_file(name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    finally:
        os.close(descriptor)
        Path(name).unlink()
    return mapped.view(tensor.shape).copy_(tensor)


def file_numbers(state: Mapping[str, Any], most: int) -> dict[str, int]:
    """Into which of its files, counted from 1, each process writes a tensor: no more than so many bytes of its own in
    one, since a file is put together in memory. The same in all processes."""
    found: dict[str, int] = {}
    number, filled = 1, 0
    for name, each in state.items():
        shares = each.device_mesh.size() if hasattr(each, "device_mesh") else 1
        size = -(-each.numel() // shares) * each.element_size()
        if filled and filled + size > most:
            number, filled = number + 1, 0
        found[name], filled = number, filled + size
    return found


def unshared(state: dict[str, Any]) -> dict[str, Any]:
    """The same, a copy of each tensor but the first of those that lie in one place (bitsandbytes' tables, which all
    weights share), as safetensors wants it."""
    seen: set[int] = set()
    found: dict[str, Any] = {}
    for name, each in state.items():
        local = each.to_local() if hasattr(each, "to_local") else each
        place = local.untyped_storage().data_ptr()
        found[name] = each.clone() if place and place in seen and local is each else each
        seen.add(place)
    return found
