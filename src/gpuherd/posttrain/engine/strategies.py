"""A module made ready for training: in several processes, by torch's DDP or torch's fully_shard (FSDP2) layer by layer;
and its optimiser.

fully_shard works on a CPU too. It divides each weight along its first dimension, in the order of ranks, as torch.chunk
does; the optimiser's states that have the weight's shape are divided in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpuherd.errors import UsageError, naming_extras
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.options import OptimiserOptions, Optimizer, Sharding, StepOptions, Strategy


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

    The weights become placeholders of their shape that take the memory of one number: adapters and heads can be added
    as to weights on the CPU. Their content follows once ``distributed`` has sharded the module.
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


def without_dropout(module: Any) -> None:
    """Switches a model's dropout off: the policy that learns is the one that sampled, and no other one at each pass."""
    from torch.nn.modules.dropout import _DropoutNd

    for each in module.modules():
        if isinstance(each, _DropoutNd):
            each.p = 0.0
        for name, value in list(vars(each).items()):  # of attention, which hands the number on
            if "dropout" in name and isinstance(value, float):
                setattr(each, name, 0.0)


# --- the optimiser ---------------------------------------------------------------------------------------------------


def trainable(module: Any) -> dict[str, Any]:
    """The trainable weights by name, in the module's order. Raises UsageError where there are none."""
    found = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    if not found:
        raise UsageError(f"{type(module).__name__} has no weight that is to be trained")
    return found


def make_optimizer(weights: dict[str, Any], options: OptimiserOptions, *, sharded: bool) -> Any:
    """An optimiser with two groups: matrices with weight decay, and what has one dimension or none without.

    Raises UsageError for 8-bit states of sharded weights, MissingExtra without bitsandbytes.
    """
    import torch

    groups = [
        {"params": [each for each in weights.values() if each.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [each for each in weights.values() if each.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if options.optimizer == Optimizer.SGD:
        return torch.optim.SGD(groups, lr=options.learning_rate)
    if options.optimizer == Optimizer.ADAMW:
        return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps)
    if sharded:
        raise UsageError("optimizer adamw-8bit with strategy fsdp: bitsandbytes can't divide its states; use adamw")
    with naming_extras({"bitsandbytes": "bnb"}, "8-bit optimisers take"):
        import bitsandbytes
    return bitsandbytes.optim.AdamW8bit(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps)


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """For the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
