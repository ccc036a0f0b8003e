"""Weights of small models with heavy tails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Weights = Mapping[str, "np.ndarray[Any, np.dtype[np.float32]]"]
AddModel = Callable[..., None]


def heavy(seed: int, layers: int = 2, width: int = 24, change: float = 0.0) -> dict[str, Any]:
    """Weights of a small model; ``change`` moves each by so many standard deviations, as a fine-tune would."""
    rng, noise = np.random.default_rng(seed), np.random.default_rng(seed + 1000)
    weights = {}
    for layer in range(layers):
        for part, shape in (("self_attn.q_proj", (width, width)), ("mlp.up_proj", (2 * width, width))):
            W = rng.standard_t(3, shape)
            weights[f"model.layers.{layer}.{part}"] = (W + change * noise.standard_normal(shape)).astype(np.float32)
    return weights
