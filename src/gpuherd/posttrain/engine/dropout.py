"""A model's own dropout, switched off. Imports torch inside the function only."""

from __future__ import annotations

from typing import Any


def without_dropout(module: Any) -> None:
    """Switches a model's dropout off: the policy that learns is the one that sampled, and no other one at each pass."""
    from torch.nn.modules.dropout import _DropoutNd

    for each in module.modules():
        if isinstance(each, _DropoutNd):
            each.p = 0.0
        for name, value in list(vars(each).items()):  # of attention, which hands the number on
            if "dropout" in name and isinstance(value, float):
                setattr(each, name, 0.0)
