"""The optimiser of a module's trainable weights, and its state by the weights' names."""

from __future__ import annotations

from typing import Any

from gpuherd.errors import UsageError, naming_extras
from gpuherd.posttrain.engine.options import OptimiserOptions, Optimizer


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
