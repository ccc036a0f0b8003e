"""Configs of the families whose plans are held against a measurement, and what a plan says that they need."""

from __future__ import annotations

from typing import Any

import transformers

from gpuherd.models.describe.description import Architecture
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.memory.peak import stages_of
from gpuherd.models.memory.weights import Precision

TWO = {"num_hidden_layers": 2}
LLAMA_8B = {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 14336, "num_key_value_heads": 8}
SMALL = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 4,
    "vocab_size": 32000, "max_position_embeddings": 4096, **TWO,
}  # fmt: skip
LATENT = {
    **SMALL, "intermediate_size": 6144, "num_key_value_heads": 16, "moe_intermediate_size": 2048,
    "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 512,
    "kv_lora_rank": 256,
}  # fmt: skip
# Published shapes, two layers of each, and small ones of the families that no other stands for.
CONFIGS: dict[str, Any] = {
    "llama-3.1-8b": transformers.LlamaConfig(**LLAMA_8B, vocab_size=128256, **TWO),
    "llama-2-7b": transformers.LlamaConfig(**TWO),
    "qwen3-0.6b": transformers.Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        vocab_size=151936, **TWO,
    ),
    "gemma2-9b": transformers.Gemma2Config(
        hidden_size=3584, intermediate_size=14336, num_attention_heads=16, num_key_value_heads=8, head_dim=256, **TWO
    ),
    "gemma3-12b": transformers.Gemma3TextConfig(
        hidden_size=3840, intermediate_size=15360, num_attention_heads=16, num_key_value_heads=8, head_dim=256,
        num_hidden_layers=6,
    ),
    "phi-2": transformers.PhiConfig(
        hidden_size=2560, intermediate_size=10240, num_attention_heads=32, vocab_size=51200, **TWO
    ),
    "phi-4": transformers.Phi3Config(
        hidden_size=5120, intermediate_size=17920, num_attention_heads=40, num_key_value_heads=10, vocab_size=100352,
        pad_token_id=0, **TWO,
    ),
    "gpt2": transformers.GPT2Config(n_layer=2),
    "gpt-j-6b": transformers.GPTJConfig(n_layer=2),
    "gpt-neo-1.3b": transformers.GPTNeoConfig(
        num_layers=2, attention_types=[[["global", "local"], 1]], max_position_embeddings=4096
    ),
    "pythia-2.8b": transformers.GPTNeoXConfig(
        hidden_size=2560, intermediate_size=10240, num_attention_heads=32, **TWO
    ),
    "opt-6.7b": transformers.OPTConfig(
        hidden_size=4096, ffn_dim=16384, num_attention_heads=32, word_embed_proj_dim=4096, **TWO
    ),
    "bloom-7b": transformers.BloomConfig(hidden_size=4096, n_head=32, n_layer=2),
    "falcon-7b": transformers.FalconConfig(**TWO),
    "olmo2-7b": transformers.Olmo2Config(
        hidden_size=4096, intermediate_size=11008, num_attention_heads=32, vocab_size=100352, **TWO
    ),
    "command-r": transformers.CohereConfig(**TWO),
    "granite-8b": transformers.GraniteConfig(
        hidden_size=4096, intermediate_size=12800, num_attention_heads=32, num_key_value_heads=8, **TWO
    ),
    "starcoder2-7b": transformers.Starcoder2Config(
        hidden_size=4608, intermediate_size=18432, num_attention_heads=36, num_key_value_heads=4, **TWO
    ),
    "stablelm-3b": transformers.StableLmConfig(**TWO),
    "mixtral-8x7b": transformers.MixtralConfig(**TWO),
    "qwen3-30b-a3b": transformers.Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, **TWO,
    ),
    "gpt-oss-20b": transformers.GptOssConfig(**TWO),
    "gemma-2b": transformers.GemmaConfig(**SMALL),
    "mistral-7b": transformers.MistralConfig(**SMALL, sliding_window=300),
    "ministral": transformers.Ministral3Config(**SMALL),
    "qwen2": transformers.Qwen2Config(**SMALL, use_sliding_window=True, max_window_layers=1, sliding_window=256),
    "smollm3": transformers.SmolLM3Config(**SMALL, pad_token_id=0),
    "olmo": transformers.OlmoConfig(**SMALL),
    "olmo3": transformers.Olmo3Config(**{**SMALL, "num_hidden_layers": 4}),
    "glm": transformers.GlmConfig(**SMALL, head_dim=64, pad_token_id=0),
    "glm4": transformers.Glm4Config(**SMALL, head_dim=64, pad_token_id=0),
    "command-r7b": transformers.Cohere2Config(**{**SMALL, "num_hidden_layers": 4}),
    "nemotron": transformers.NemotronConfig(**SMALL),
    "mpt-1b": transformers.MptConfig(d_model=1024, n_heads=16, n_layers=2, vocab_size=32000, max_seq_len=4096),
    "codegen": transformers.CodeGenConfig(n_embd=1024, n_layer=2, n_head=16, vocab_size=32000),
    "starcoder": transformers.GPTBigCodeConfig(n_embd=1024, n_layer=2, n_head=16, n_positions=2048, vocab_size=32000),
    "llama-4": transformers.Llama4TextConfig(
        **{**SMALL, "num_hidden_layers": 4}, intermediate_size_mlp=4096, num_local_experts=4, head_dim=64
    ),
    "phi-3.5-moe": transformers.PhimoeConfig(**SMALL, num_local_experts=8),
    "granite-moe": transformers.GraniteMoeConfig(**SMALL, num_local_experts=8),
    "olmoe": transformers.OlmoeConfig(**SMALL, num_experts=8),
    "qwen2-moe": transformers.Qwen2MoeConfig(
        **SMALL, num_experts=8, moe_intermediate_size=512, shared_expert_intermediate_size=2048
    ),
    "deepseek-v2": transformers.DeepseekV2Config(**LATENT),
    "deepseek-v3": transformers.DeepseekV3Config(**LATENT),
}  # fmt: skip
LIKE_CUDA = frozenset({"deepseek-v2", "deepseek-v3"})
WITH_ENCODER: dict[str, Any] = {
    "flan-t5-base": transformers.T5Config(
        d_model=768, d_kv=64, d_ff=2048, num_layers=2, num_heads=12, feed_forward_proj="gated-gelu"
    ),
    "t5-large": transformers.T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=2, num_heads=16),
    "t5-3b": transformers.T5Config(d_model=1024, d_kv=128, d_ff=16384, num_layers=2, num_heads=32),
    "mt5-base": transformers.MT5Config(d_model=768, d_kv=64, d_ff=2048, num_layers=2, num_heads=12),
    "umt5-base": transformers.UMT5Config(d_model=768, d_kv=64, d_ff=2048, num_layers=2, num_heads=12),
    "bart-large": transformers.BartConfig(encoder_layers=2, decoder_layers=2, max_position_embeddings=2048),
    "mbart-large": transformers.MBartConfig(encoder_layers=2, decoder_layers=2, max_position_embeddings=2048),
}
RECURRENT = {
    "mamba2-1.3b": transformers.Mamba2Config(hidden_size=2048, num_heads=64, head_dim=64, **TWO),
    "mamba-1.4b": transformers.MambaConfig(hidden_size=2048, use_mambapy=False, **TWO),
    "qwen3-next-80b-a3b": transformers.Qwen3NextConfig(num_hidden_layers=4),
    "falcon-h1": transformers.FalconH1Config(**TWO),
    "bamba-9b": transformers.BambaConfig(attn_layer_indices=[1], **TWO),
    "falcon-mamba": transformers.FalconMambaConfig(hidden_size=1024, use_mambapy=False, **TWO),
    "jamba": transformers.JambaConfig(
        **SMALL, num_experts=4, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1
    ),
    "granite-4": transformers.GraniteMoeHybridConfig(
        **SMALL, num_local_experts=4, layer_types=["mamba", "attention"], mamba_n_heads=32, mamba_d_head=64
    ),
    "recurrent-gemma-2b": transformers.RecurrentGemmaConfig(num_hidden_layers=3),
}
# Torch's grouped product of fake tensors is one of bfloat16 alone.
GROUPED = frozenset(
    {"mixtral", "qwen3_moe", "gpt_oss", "phimoe", "granitemoe", "olmoe", "qwen2_moe", "deepseek_v2", "deepseek_v3"}
)


def needs(architecture: Architecture, workload: Workload, precision: Precision) -> tuple[int, int]:
    """The greatest line of all blocks, for the prompt and for a token."""
    stages = [stages_of(block, architecture, workload, precision) for block in architecture.blocks]
    return (
        max(line.at(workload.batch) for each in stages for line in each.prompt),
        max(line.at(workload.batch) for each in stages for line in each.token),
    )
