"""The architecture of a GGUF model, as transformers loads it: turned back into weights. Pure.

Knows which of llama.cpp's architectures are families that are known here, by which fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.gguf import MODEL_TYPE
from gpuherd.models.names import shown
from gpuherd.models.plan import from_config
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.tensors.source import TensorInfo

# llama.cpp's name -> model_type.
_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "starcoder2": "starcoder2",
    "phi3": "phi3",
}
_BLOCK = re.compile(r"blk\.(\d+)\..+")


def is_gguf(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's config was made of the metadata of a GGUF file."""
    return config.get("model_type") == MODEL_TYPE


def architecture_of(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], model: str) -> Architecture:
    """The architecture, from the metadata as ``gguf_model`` has them and the shapes of the tensors.

    Raises BadModel when the architecture is not known here, or the file holds another number of weights than it should.
    """
    named = str(config.get("architecture"))
    if named not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise BadModel(f"{shown(model)} is a GGUF file of the architecture {shown(named)}; known here: {known}")
    layers = {int(match[1]) for match in map(_BLOCK.fullmatch, tensors) if match}
    embedding = tensors.get("token_embd.weight")
    if not layers or embedding is None:
        raise BadModel(f"{shown(model)} has no token_embd.weight or no layers: it is no whole model")
    fields = {
        **config,
        "model_type": _FAMILIES[named],
        "num_hidden_layers": max(layers) + 1,
        "vocab_size": embedding.shape[0],
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    formula = from_config.architecture_of(fields, model)
    stored = sum(prod(info.shape) for info in tensors.values() if not info.name.startswith("rope_"))
    if stored != formula.parameters:
        raise BadModel(
            f"{shown(model)}: its metadata and its weights disagree: {formula.parameters} numbers are expected of the "
            f"architecture {shown(named)}, the file holds {stored}"
        )
    told = (
        "A GGUF model is turned back into weights when transformers loads it: planned as those weights, with the "
        "windows of attention that are usual in its family."
    )
    return replace(formula, source="weights", stored=None, assumptions=(*formula.assumptions, told))
