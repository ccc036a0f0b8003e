"""Small models for tests of training plans, as transformers builds them, and their architectures read off them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from tests.models.describe.formulas.from_config import architecture_of

from gpuherd.models.describe.description import Architecture
from gpuherd.models.describe.known_models import with_peaks_of
from gpuherd.models.describe.meta import describe_config

_WIDE = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1408}
_EXPERTS = {"moe_intermediate_size": 352, "num_experts": 8, "num_experts_per_tok": 2}
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
    "mistral": _WIDE,
    "ministral3": {**_WIDE, "head_dim": 64},
    "qwen2": _WIDE,
    "granite": _WIDE,
    "smollm3": {**_WIDE, "pad_token_id": 0},
    "glm": {**_WIDE, "head_dim": 64, "pad_token_id": 0},
    "glm4": {**_WIDE, "head_dim": 64, "pad_token_id": 0},
    "gemma": {**_WIDE, "head_dim": 64},
    "olmo": _WIDE,
    "olmo3": _WIDE,
    "cohere": _WIDE,
    "cohere2": {**_WIDE, "head_dim": 64},
    "nemotron": {**_WIDE, "head_dim": 64},
    "stablelm": _WIDE,
    "starcoder2": {**_WIDE, "intermediate_size": 2048},
    "phi": {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
    "gptj": {"n_embd": 512, "n_head": 8, "n_inner": 2048, "rotary_dim": 32},
    "gpt_neo": {"hidden_size": 512, "num_heads": 8, "num_layers": 6, "attention_types": [[["global", "local"], 3]]},
    "qwen2_moe": {**_WIDE, **_EXPERTS, "shared_expert_intermediate_size": 704},
    "qwen3_moe": {**_WIDE, **_EXPERTS, "intermediate_size": 704, "head_dim": 64},
    "olmoe": {**_WIDE, **_EXPERTS, "intermediate_size": 352},
    "granitemoe": {**_WIDE, "intermediate_size": 352, "num_local_experts": 8, "num_experts_per_tok": 2},
    "falcon": {"hidden_size": 512, "num_attention_heads": 8, "ffn_hidden_size": 2048},
    "deepseek_v3": {
        **_WIDE,
        **_EXPERTS,
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
    },
    "mamba2": {"hidden_size": 512, "num_heads": 16, "head_dim": 64, "n_groups": 1},
    "mamba": {"hidden_size": 512},
    "llama4_text": {
        **_WIDE,
        "head_dim": 64,
        "num_local_experts": 4,
        "intermediate_size_mlp": 704,
        "intermediate_size": 352,
    },
}
EAGER = ("gemma2", "bloom", "gptj", "gpt_neo", "mamba", "mamba2")
EXPERTS = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
    "deepseek_v3",
)  # their product on the CPU is of bf16 alone


def config_of(family: str, *, layers: int = 6, vocab: int = 4000, **changes: Any) -> Any:
    """A config of a family, narrow enough for tests."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**CONFIGS[family], "vocab_size": vocab, **changes})
    config.num_hidden_layers = layers
    if family.startswith("mamba"):
        return config
    kinds = getattr(config, "layer_types", None) or []
    if "sliding_attention" in kinds:
        config.layer_types = [("sliding_attention", "full_attention")[number % 2] for number in range(layers)]
    elif kinds:
        config.layer_types = ["full_attention"] * layers
    return config


def unmeasured(config: Any) -> Architecture:
    """The architecture of a config: its tensors, without what its layers need."""
    return architecture_of(config.to_dict(), f"a small {config.model_type}")


def architecture(config: Any) -> Architecture:
    """The architecture of a config with what training steps need, measured once for all that have such layers."""
    fields = config.to_dict()
    one = {"num_hidden_layers": 2, "layer_types": (fields.get("layer_types") or [])[:2]}
    if not fields.get("final_logit_softcapping"):  # which keeps something of each word
        one["vocab_size"] = 64
    if config.model_type in ("gpt_neo", "deepseek_v3", "llama4_text"):  # lists of layers of their own, further kinds
        one = {}
    some = fields | {key: value for key, value in one.items() if fields.get(key)} | {"pad_token_id": 0}
    return with_peaks_of(unmeasured(config), _measured(json.dumps(some, sort_keys=True, default=str)))


@cache
def _measured(config: str) -> Architecture:
    return describe_config(json.loads(config), "m", peaks=False, training=True)


def model_of(config: Any, dtype: torch.dtype, *, eager: bool = False) -> Any:
    """The model itself."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager" if eager else "sdpa")
