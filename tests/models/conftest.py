"""Small random models made by transformers, saved once for all tests of this folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TINY: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": False},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16, "bos_token_id": 0,
             "eos_token_id": 0},
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
            "max_position_embeddings": 16, "word_embed_proj_dim": 32, "pad_token_id": 1},
    "mixtral": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 3, "num_experts_per_tok": 2},
    "gpt_neox": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64},
    "phi3": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "max_seq_len": 16, "expansion_ratio": 2},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16, "rotary_dim": 4},
    "gpt_neox_japanese": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
                          "intermediate_multiple_size": 2, "bos_token_id": 0, "eos_token_id": 0},
    "dbrx": {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "max_seq_len": 16,
             "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
             "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 3, "moe_top_k": 2}},
    "gpt_oss": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "num_local_experts": 3,
                "num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": 0},
    "persimmon": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0},
    "granitemoe": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 3, "num_experts_per_tok": 2},
    "jetmoe": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 2,
               "kv_channels": 8, "vocab_size": 64, "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {"hidden_size": 32, "moe_intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "num_experts": 3,
                  "num_experts_per_tok": 2},
    "olmoe": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 64, "num_experts": 3, "num_experts_per_tok": 2},
    "deepseek_v3": {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
                    "first_k_dense_replace": 0, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64,
                    "n_routed_experts": 3, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
                    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 8},
    "llama4_text": {"hidden_size": 32, "intermediate_size": 24, "intermediate_size_mlp": 48, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
                    "num_local_experts": 3, "interleave_moe_layer_step": 1, "pad_token_id": 0},
    "xlm-roberta": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "vocab_size": 64, "max_position_embeddings": 16, "pad_token_id": 0, "is_decoder": True},
}  # fmt: skip


def build(model_type: str, **changes: Any) -> Any:
    """A causal language model with random weights of a spread that makes mistakes visible."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**TINY[model_type], **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model.eval()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Path]]:
    """``tiny("llama", **config) -> (model, folder)``: built and saved once for the session."""
    made: dict[str, tuple[Any, Path]] = {}

    def make(model_type: str, **changes: Any) -> tuple[Any, Path]:
        key = f"{model_type}{sorted(changes.items())}"
        if key not in made:
            model = build(model_type, **changes)
            folder = tmp_path_factory.mktemp(model_type)
            model.save_pretrained(folder)
            made[key] = (model, folder)
        return made[key]

    return make
