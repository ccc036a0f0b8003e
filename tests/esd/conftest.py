"""Small models on disk, made in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

MakeModel = Callable[..., Path]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """``make_model("a", seed=1)`` writes a model folder with a few small matrices and returns its path."""

    def make(name: str, *, seed: int = 0, layers: int = 2, width: int = 32, fill: float | None = None) -> Path:
        rng = np.random.default_rng(seed)
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        tensors: dict[str, Any] = {"model.embed_tokens.weight": rng.standard_normal((50, width)).astype(np.float32)}
        for layer in range(layers):
            for part, shape in (("self_attn.q_proj", (width, width)), ("mlp.up_proj", (2 * width, width))):
                weight = rng.standard_t(3, shape).astype(np.float32)
                tensors[f"model.layers.{layer}.{part}.weight"] = weight if fill is None else np.full_like(weight, fill)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": width}))
        return folder

    return make


@pytest.fixture
def make_adapter(tmp_path: Path) -> MakeModel:
    """``make_adapter("lora", base=path)`` writes a LoRA adapter for a model of ``make_model``."""

    def make(name: str, *, base: str | Path | None, seed: int = 0, layers: int = 2, width: int = 32) -> Path:
        rng = np.random.default_rng(seed)
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        tensors = {}
        for layer in range(layers):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
            tensors[f"{prefix}.lora_A.weight"] = rng.standard_normal((4, width)).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = rng.standard_normal((width, 4)).astype(np.float32)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
        if base is not None:
            config["base_model_name_or_path"] = str(base)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    return make
