"""Small models for tests of training plans, as transformers builds them, and their architectures read off them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tests.models.plan.meta_models import architecture_of, meta_model

from gpuherd.models.plan.architecture import Architecture, LayerCache

_WIDE = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1408}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _WIDE,
    "qwen3": {**_WIDE, "head_dim": 64},
    "phi3": {**_WIDE, "pad_token_id": 0},
    "gemma3_text": {**_WIDE, "head_dim": 64},
    "olmo2": _WIDE,
    "gpt2": {"n_embd": 512, "n_head": 8, "attn_pdrop": 0.0},
    "gpt_neox": {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
    "opt": {"hidden_size": 512, "num_attention_heads": 8, "ffn_dim": 2048, "word_embed_proj_dim": 512},
    "mixtral": {**_WIDE, "intermediate_size": 704, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {**_WIDE, "head_dim": 64},
    "bloom": {"hidden_size": 512, "n_head": 8},
}
EAGER = ("gemma2", "bloom")


def config_of(family: str, *, layers: int = 6, vocab: int = 4000, **changes: Any) -> Any:
    """A config of a family, narrow enough for tests."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**CONFIGS[family], "vocab_size": vocab, **changes})
    config.num_hidden_layers = layers
    kinds = getattr(config, "layer_types", None) or []
    if "sliding_attention" in kinds:
        config.layer_types = [("sliding_attention", "full_attention")[number % 2] for number in range(layers)]
    elif kinds:
        config.layer_types = ["full_attention"] * layers
    return config


def architecture(config: Any) -> Architecture:
    """The architecture of a config, with what the formulas of inference know of caches."""
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    read = architecture_of(meta_model(config), LayerCache(2 * keys * size))
    experts = getattr(config, "num_experts_per_tok", None)
    return replace(read, intermediate_size=experts * config.intermediate_size) if experts else read


def model_of(config: Any, dtype: torch.dtype, *, eager: bool = False) -> Any:
    """The model itself."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager" if eager else "sdpa")
