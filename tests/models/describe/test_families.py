"""Every family against the model that transformers builds of the same config on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.models.describe.formulas.from_config import FAMILIES
from tests.models.describe.meta import check

SMALL: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97,
}  # fmt: skip
GROUPED: Mapping[str, Any] = {**SMALL, "num_key_value_heads": 2}
GPT: Mapping[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 97, "n_positions": 33}
NEO: Mapping[str, Any] = {
    "hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 97, "max_position_embeddings": 33,
}  # fmt: skip
LATENT: Mapping[str, Any] = {
    **SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20,
    "n_group": 2, "topk_group": 1, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
STATES: Mapping[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 97, "pad_token_id": 0}
MAMBA2: Mapping[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
DELTA: Mapping[str, Any] = {
    "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
    "num_experts_per_tok": 2,
}  # fmt: skip
T5: Mapping[str, Any] = {
    "d_model": 64, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_heads": 4, "vocab_size": 97,
    "relative_attention_num_buckets": 8,
}  # fmt: skip
BART: Mapping[str, Any] = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80, "decoder_ffn_dim": 96, "vocab_size": 99, "max_position_embeddings": 33,
}  # fmt: skip
VISION: Mapping[str, Any] = {
    "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56,
    "patch_size": 14, "model_type": "siglip_vision_model",
}  # fmt: skip
PIXTRAL: Mapping[str, Any] = {**VISION, "model_type": "pixtral"}

CASES: Mapping[str, list[Mapping[str, Any]]] = {
    "llama": [
        GROUPED,
        {**SMALL, "head_dim": 24, "tie_word_embeddings": True},
        {**GROUPED, "attention_bias": True, "mlp_bias": True},
    ],
    "mistral": [GROUPED, {**GROUPED, "head_dim": 24, "sliding_window": None, "tie_word_embeddings": True}],
    "ministral3": [GROUPED],
    "qwen2": [
        GROUPED,
        {**GROUPED, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8},
        {**GROUPED, "tie_word_embeddings": True},
    ],
    "qwen3": [GROUPED, {**GROUPED, "head_dim": 24, "attention_bias": True, "tie_word_embeddings": True}],
    "smollm3": [
        {**GROUPED, "pad_token_id": 0},
        {**GROUPED, "pad_token_id": 0, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ],
    "gemma": [{**GROUPED, "head_dim": 24}, {**GROUPED, "head_dim": 16, "tie_word_embeddings": False}],
    "gemma2": [{**GROUPED, "head_dim": 24}, {**GROUPED, "head_dim": 16, "attention_bias": True}],
    "gemma3_text": [{**GROUPED, "head_dim": 24}, {**GROUPED, "num_hidden_layers": 7, "sliding_window": 8}],
    "olmo": [GROUPED, {**SMALL, "attention_bias": True, "tie_word_embeddings": True}],
    "olmo2": [GROUPED, {**SMALL, "attention_bias": True, "tie_word_embeddings": True}],
    "olmo3": [{**GROUPED, "num_hidden_layers": 5}],
    "granite": [GROUPED, {**GROUPED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}],
    "cohere": [GROUPED, {**GROUPED, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False}],
    "cohere2": [{**GROUPED, "num_hidden_layers": 5}],
    "starcoder2": [GROUPED, {**GROUPED, "use_bias": False, "tie_word_embeddings": False}],
    "stablelm": [
        GROUPED,
        {**GROUPED, "use_qkv_bias": True, "qk_layernorm": True},
        {**SMALL, "num_key_value_heads": 4, "use_parallel_residual": True, "tie_word_embeddings": True},
    ],
    "phi": [GROUPED, {**GROUPED, "qk_layernorm": True, "tie_word_embeddings": True}],
    "phi3": [
        {**GROUPED, "pad_token_id": 0},
        {**GROUPED, "pad_token_id": 0, "sliding_window": 8, "tie_word_embeddings": True},
    ],
    "glm": [{**GROUPED, "head_dim": 16, "pad_token_id": 0}, {**GROUPED, "attention_bias": False, "pad_token_id": 0}],
    "glm4": [{**GROUPED, "head_dim": 16, "pad_token_id": 0}],
    "nemotron": [{**GROUPED, "head_dim": 24}, {**GROUPED, "head_dim": 16, "attention_bias": True, "mlp_bias": True}],
    "mixtral": [GROUPED, {**GROUPED, "num_local_experts": 3, "head_dim": 24, "tie_word_embeddings": True}],
    "phimoe": [GROUPED, {**GROUPED, "attention_bias": True, "lm_head_bias": True}],
    "granitemoe": [GROUPED, {**GROUPED, "attention_bias": True, "tie_word_embeddings": True}],
    "olmoe": [{**GROUPED, "num_experts": 5, "num_experts_per_tok": 2}, {**SMALL, "attention_bias": True}],
    "qwen2_moe": [
        {**GROUPED, "num_experts": 6, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48},
        {**GROUPED, "num_experts": 6, "decoder_sparse_step": 2, "mlp_only_layers": [0], "qkv_bias": False},
        {**GROUPED, "num_experts": 6, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8},
    ],
    "qwen3_moe": [
        {**GROUPED, "num_experts": 6, "moe_intermediate_size": 40, "head_dim": 24, "num_experts_per_tok": 2},
        {**GROUPED, "num_experts": 6, "decoder_sparse_step": 2, "attention_bias": True, "num_experts_per_tok": 3},
    ],
    "deepseek_v2": [{**LATENT, "topk_method": "greedy"}, {**LATENT, "q_lora_rank": None, "attention_bias": True}],
    "deepseek_v3": [LATENT, {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 0}],
    "gpt_oss": [{**GROUPED, "head_dim": 24, "num_local_experts": 4}, {**GROUPED, "num_local_experts": 4}],
    "llama4_text": [
        {**GROUPED, "head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 80},
        {**GROUPED, "head_dim": 16, "num_local_experts": 4, "interleave_moe_layer_step": 2, "num_hidden_layers": 5},
    ],
    "mamba": [{**STATES, "state_size": 8}, {**STATES, "use_bias": True, "use_conv_bias": False, "time_step_rank": 5}],
    "falcon_mamba": [STATES],
    "mamba2": [
        {**STATES, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 8},
        {**STATES, "num_heads": 8, "head_dim": 16, "n_groups": 1, "use_bias": True, "tie_word_embeddings": True},
    ],
    "bamba": [
        {**GROUPED, **MAMBA2, "attn_layer_indices": [1]},
        {**GROUPED, **MAMBA2, "attn_layer_indices": [0, 2], "mamba_proj_bias": True, "mlp_bias": True,
         "attention_bias": True},
    ],
    "granitemoehybrid": [
        {**GROUPED, **MAMBA2, "shared_intermediate_size": 40, "num_local_experts": 0,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        {**GROUPED, **MAMBA2, "layer_types": ["mamba", "attention", "mamba"], "tie_word_embeddings": True},
    ],
    "falcon_h1": [
        {**GROUPED, **MAMBA2, "mamba_d_ssm": 128},
        {**GROUPED, **MAMBA2, "mamba_d_ssm": 128, "mamba_rms_norm": True, "projectors_bias": True, "mlp_bias": True},
    ],
    "jamba": [
        {**GROUPED, "num_hidden_layers": 6, "num_experts": 4, "mamba_d_state": 8},
        {**GROUPED, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_proj_bias": True, "mamba_dt_rank": 7},
    ],
    "recurrent_gemma": [SMALL, {**SMALL, "lru_width": 96, "num_key_value_heads": 1, "attention_bias": True}],
    "qwen3_next": [
        {**GROUPED, **DELTA, "num_hidden_layers": 5},
        {**GROUPED, **DELTA, "layer_types": ["full_attention", "linear_attention", "linear_attention"],
         "mlp_only_layers": [1], "attention_bias": True},
    ],
    "t5": [T5, {**T5, "num_decoder_layers": 3, "feed_forward_proj": "gated-gelu"}],
    "mt5": [T5],
    "umt5": [{**T5, "num_decoder_layers": 3}],
    "bart": [BART, {**BART, "tie_word_embeddings": False}],
    "mbart": [BART],
    "bert": [SMALL],
    "roberta": [{**SMALL, "max_position_embeddings": 33, "type_vocab_size": 3}],
    "xlm-roberta": [SMALL],
    "distilbert": [{"dim": 64, "hidden_dim": 80, "n_layers": 3, "n_heads": 4, "vocab_size": 97}],
    "gemma3": [
        {"text_config": {**GROUPED, "model_type": "gemma3_text"}, "vision_config": VISION},
        {"text_config": GROUPED, "vision_config": {**VISION, "vision_use_head": False}, "tie_word_embeddings": False},
    ],
    "mistral3": [
        {"text_config": {**GROUPED, "model_type": "mistral"}, "vision_config": PIXTRAL},
        {"text_config": {**GROUPED, "model_type": "ministral3"}, "vision_config": PIXTRAL,
         "multimodal_projector_bias": True, "tie_word_embeddings": False},
    ],
    "gpt2": [GPT, {**GPT, "n_inner": 80, "tie_word_embeddings": False}, {**GPT, "add_cross_attention": True}],
    "gpt_bigcode": [GPT, {**GPT, "multi_query": False, "n_inner": 80}],
    "gpt_neo": [{**NEO, "attention_types": [[["global", "local"], 2]], "num_layers": 4},
                {**NEO, "attention_types": [[["global"], 2]], "intermediate_size": 80, "tie_word_embeddings": False}],
    "gptj": [{**GPT, "rotary_dim": 8}, {**GPT, "rotary_dim": 8, "n_inner": 80, "tie_word_embeddings": True}],
    "codegen": [{**GPT, "rotary_dim": 8}],
    "gpt_neox": [SMALL, {**SMALL, "attention_bias": False, "tie_word_embeddings": True}],
    "bloom": [{"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 97}],
    "falcon": [
        {**SMALL, "bias": True},
        {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2},
        {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {**SMALL, "multi_query": False, "parallel_attn": False, "ffn_hidden_size": 80, "tie_word_embeddings": False},
    ],
    "opt": [
        {**SMALL, "ffn_dim": 80, "word_embed_proj_dim": 64},
        {**SMALL, "ffn_dim": 80, "word_embed_proj_dim": 32, "do_layer_norm_before": False, "enable_bias": False},
        {**SMALL, "word_embed_proj_dim": 64, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False},
    ],
    "mpt": [{"d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 97}],
}  # fmt: skip

# Of the same shapes as another that is checked in every run.
ALIKE = frozenset(
    {"mt5", "xlm-roberta", "roberta", "falcon_mamba", "ministral3", "glm4", "olmo3", "olmo2", "cohere2", "codegen",
     "mbart", "granite", "smollm3", "gemma", "granitemoe", "olmoe", "deepseek_v2", "umt5", "nemotron"}
)  # fmt: skip


def test_every_family_has_cases() -> None:
    assert set(CASES) == set(FAMILIES)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [pytest.param(name, case, id=f"{name}-{n}") for name, cases in CASES.items() for n, case in enumerate(cases)],
)
def test_as_transformers_builds_it(model_type: str, fields: Mapping[str, Any]) -> None:
    ours = check(model_type, fields)
    assert ours.hidden_size in (48, 64)
    assert ours.layers >= 2
