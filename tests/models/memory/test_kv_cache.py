"""The bytes of caches against the storages that transformers holds after it has generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.describe.formulas.from_config import architecture_of

from gpuherd.models.describe.description import LayerCache
from gpuherd.models.memory.kv_cache import CacheSizes, Reserve, Workload, sequence_bytes
from gpuherd.models.memory.usage import CostTable
from gpuherd.models.memory.weights import Precision

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.models.memory.real_memory import cache_storage  # noqa: E402

SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 131, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2}
WINDOW = 8
# Prompt and new tokens.
LENGTHS = ((WINDOW + 1, 4), (3, 2), (2 * WINDOW, 5), (WINDOW - 1, 2), (2 * WINDOW, 1))
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**GROUPED, num_hidden_layers=3),
    "gpt2": transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=131),
    "bloom": transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=131),
    "mistral": transformers.MistralConfig(**GROUPED, num_hidden_layers=2, sliding_window=WINDOW),
    "qwen2": transformers.Qwen2Config(
        **GROUPED, num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen2 without its window": transformers.Qwen2Config(
        **GROUPED, num_hidden_layers=2, use_sliding_window=False, sliding_window=WINDOW, max_window_layers=0
    ),
    "gemma2": transformers.Gemma2Config(**GROUPED, num_hidden_layers=4, head_dim=16, sliding_window=WINDOW),
    "gemma3": transformers.Gemma3TextConfig(**GROUPED, num_hidden_layers=7, head_dim=16, sliding_window=WINDOW),
    "gpt_oss": transformers.GptOssConfig(
        **GROUPED, num_hidden_layers=4, head_dim=16, sliding_window=WINDOW, num_local_experts=4
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, num_hidden_layers=2, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=12, v_head_dim=16, n_routed_experts=4, n_group=2, topk_group=1, moe_intermediate_size=32,
        num_experts_per_tok=2, first_k_dense_replace=1,
    ),
    "qwen3_next": transformers.Qwen3NextConfig(
        **GROUPED, num_hidden_layers=4, head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32,
    ),
    "mamba": transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=131, state_size=8),
    "falcon_h1": transformers.FalconH1Config(
        **GROUPED, num_hidden_layers=2, head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8
    ),
}  # fmt: skip
T5 = transformers.T5Config(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=131)


def _kept(config: Any, workload: Workload) -> CacheSizes:
    found = architecture_of(config.to_dict(), "test")
    return CostTable(found, Precision.FP32, workload, Reserve()).cache(0, len(found.blocks))


# One of each kind of layer: full, windows beside full ones, latent, states. Most of the time goes into states, token by
# token on the CPU, hence a single length of those.
EVERY_TIME = {"llama": LENGTHS, "qwen2": LENGTHS[:3], "deepseek_v3": LENGTHS[:1], "mamba": LENGTHS[:1]}


@pytest.mark.parametrize("name", list(EVERY_TIME))
def test_one_of_each_kind_keeps_the_bytes_of_transformers(name: str) -> None:
    _agrees(name, EVERY_TIME[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CONFIGS))
def test_kept_bytes_are_those_of_transformers(name: str) -> None:
    _agrees(name, LENGTHS)


def _agrees(name: str, lengths: Sequence[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    config = CONFIGS[name]
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for prompt, new in lengths:
        kept = _kept(config, Workload(3, prompt, new))
        assert kept.at_end == cache_storage(model, batch=3, prompt=prompt, new=new), (prompt, new)
        assert kept.after_prompt == cache_storage(model, batch=3, prompt=prompt, new=1), (prompt, new)


def test_an_encoder_decoder_keeps_the_prompt_in_its_cross_attention() -> None:
    model = transformers.AutoModelForSeq2SeqLM.from_config(T5).eval()
    model.generation_config.decoder_start_token_id = 0
    for prompt, new in ((5, 1), (5, 4), (11, 2)):
        assert _kept(T5, Workload(2, prompt, new)).at_end == cache_storage(model, batch=2, prompt=prompt, new=new)


def test_a_window_holds_the_whole_prompt_until_the_first_token_is_computed() -> None:
    one = LayerCache(per_token=10, window=4)
    kept = sequence_bytes(one, Workload(1, 100, 50), Precision.BF16, decoder_only=True)
    assert kept == CacheSizes(after_prompt=2 * 10 * 100, at_end=2 * 10 * 4)
    assert kept.largest == kept.after_prompt


def test_states_keep_their_own_precision() -> None:
    one = LayerCache(per_sequence=7, per_sequence_fp32=5)
    for precision, expected in ((Precision.BF16, 7 * 2 + 5 * 4), (Precision.FP32, 12 * 4)):
        kept = sequence_bytes(one, Workload(9, 100, 50), precision, decoder_only=True)
        assert kept == CacheSizes(expected, expected)


@given(
    st.builds(LayerCache, *[st.integers(0, 9)], window=st.none() | st.integers(2, 40), per_sequence=st.integers(0, 9)),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_more_tokens_never_keep_less_and_a_window_never_more(cache: LayerCache, prompt: int, new: int) -> None:
    def kept(prompt: int, new: int, which: LayerCache = cache) -> CacheSizes:
        return sequence_bytes(which, Workload(1, prompt, new), Precision.FP16, decoder_only=True)

    now = kept(prompt, new)
    assert now.largest <= kept(prompt + 1, new).largest
    assert now.largest <= kept(prompt, new + 1).largest
    plain = LayerCache(cache.per_token, per_sequence=cache.per_sequence)
    assert now.at_end <= kept(prompt, new, plain).at_end
    assert now.after_prompt == kept(prompt, new, plain).after_prompt
