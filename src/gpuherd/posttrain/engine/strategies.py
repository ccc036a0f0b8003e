"""A module made ready for training in several processes, by torch's DDP or torch's fully_shard (FSDP2) layer by layer,
and its state by name, as checkpoints keep it.

fully_shard works on a CPU too. It divides each weight along its first dimension, in the order of ranks, as torch.chunk
does; the optimiser's states that have the weight's shape are divided in the same way.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.options import Sharding, StepOptions, Strategy

if TYPE_CHECKING:
    from torch import Tensor

    from gpuherd.posttrain.engine.train_engine import TrainEngine


def check_strategy(steps: StepOptions, world: DistEnv) -> None:
    """Raises UsageError where the strategy and the number of processes don't go together."""
    if world.size > 1 and steps.strategy == Strategy.SINGLE:
        raise UsageError(f"{world.size} processes with strategy single; choose ddp or fsdp")
    if world.backend is None and steps.shards:
        raise UsageError("strategy fsdp in one process has nothing to divide; start several by torchrun, or choose ddp")


def distributed(
    module: Any, steps: StepOptions, world: DistEnv, amp_dtype: Any, layers: Sequence[Any] | None, *, all_used: bool
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

    # Buffers are not exchanged in forward passes. (torch 2.13 renamed the argument.)
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
    first, nearly as a real pass gives them, so that sums still overlap the backward pass.
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


def _sharded(module: Any, steps: StepOptions, world: DistEnv, amp_dtype: Any, layers: Sequence[Any]) -> Any:
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
    rows = _take_rows(module)
    for layer in layers:
        fully_shard(layer, **how)
    fully_shard(module, **how)
    _give_rows(module, rows, "cpu" if isinstance(offload, CPUOffloadPolicy) else world.device)
    return module


# --- rows of weights that were read before the module was sharded -----------------------------------------------------

_ROWS = "gpuherd_rows"


def hold(module: Any, sharded: Any) -> None:
    """Gives a module without memory (on the meta device) this process's rows of the weights of the same module that is
    sharded already, each as an attribute of its weight, and the other's buffers.

    The weights become placeholders of their shape that take the memory of one number: adapters and heads can be put
    beside them as beside weights on the CPU. Their content follows once ``distributed`` has sharded the module.
    """
    import torch

    read = dict(sharded.named_parameters())

    def placeholder(name: str, weight: Any) -> Any:
        rows = read[name].detach()
        empty = torch.empty((), dtype=rows.dtype).expand(weight.shape)
        made = torch.nn.Parameter(empty, requires_grad=rows.dtype.is_floating_point)
        setattr(made, _ROWS, rows.to_local())
        return made

    _replace(module, placeholder)
    for name, buffer in sharded.named_buffers():
        owner, _, own = name.rpartition(".")
        setattr(module.get_submodule(owner), own, buffer)


def _take_rows(module: Any) -> dict[str, Any]:
    """The rows in hand, by the weights' names; the placeholders become weights without memory, which fully_shard
    divides without touching them."""
    import torch

    found = {name: getattr(weight, _ROWS) for name, weight in module.named_parameters() if hasattr(weight, _ROWS)}
    if found:
        _replace(
            module,
            lambda _, weight: (
                torch.nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
                if hasattr(weight, _ROWS)
                else weight
            ),
        )
    return found


def _give_rows(module: Any, rows: dict[str, Any], device: str) -> None:
    """Makes the rows the content of the weights of a module that is sharded now."""
    import torch
    from torch.distributed.tensor import DTensor

    def filled(name: str, weight: Any) -> Any:
        part = rows.pop(name, None)
        if part is None:
            return weight
        whole = DTensor.from_local(
            part.to(device),
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
        return torch.nn.Parameter(whole, requires_grad=weight.requires_grad)

    if rows:
        _replace(module, filled)


def _replace(module: Any, make: Callable[[str, Any], Any]) -> None:
    """Puts another weight in the place of each, one for those that share one."""
    before = list(module.named_parameters(remove_duplicate=False))
    made: dict[int, Any] = {}
    for name, weight in before:
        if id(weight) not in made:
            made[id(weight)] = make(name, weight)
        owner, _, own = name.rpartition(".")
        setattr(module.get_submodule(owner), own, made[id(weight)])


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
    """To the device, unless everything is there already: quantised weights can't be moved."""
    import torch

    wanted = torch.device(device)
    if any(tensor.device != wanted for tensor in (*module.parameters(), *module.buffers())):
        module.to(wanted)


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


def without_dropout(module: Any) -> None:
    """Switches a model's dropout off: the policy that learns is the one that sampled, and no other one at each pass."""
    from torch.nn.modules.dropout import _DropoutNd

    for each in module.modules():
        if isinstance(each, _DropoutNd):
            each.p = 0.0
        for name, value in list(vars(each).items()):  # of attention, which hands the number on
            if "dropout" in name and isinstance(value, float):
                setattr(each, name, 0.0)
