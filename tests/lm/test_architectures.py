"""Models of all kinds of caches: a batch of unlike prompts, with samples, equals each prompt alone, and one whole pass.

Attention, sliding windows, chunks, experts, states (Mamba and its kin), mixtures of these, and models whose states lie
outside of any cache.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
from tests.qa.small_models import make_tokenizer, seeded

from gpuherd.lm.backend import Decoding, PromptTokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from gpuherd.lm.model import LanguageModel  # noqa: E402

LLAMA: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
SSM: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}
HYBRID = LLAMA | {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
KINDS: dict[str, dict[str, Any]] = {
    "mistral": LLAMA | {"sliding_window": 16},
    "mixtral": LLAMA | {"num_local_experts": 4},
    "mamba": SSM,
    "recurrent_gemma": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "lru_width": 64,
        "num_attention_heads": 4, "attention_window_size": 16,
    },
    "falcon_h1": HYBRID | {"mamba_d_ssm": 64, "mamba_d_head": 8},
    "gemma2": LLAMA | {"sliding_window": 16, "head_dim": 16},
    "gemma3_text": LLAMA | {"sliding_window": 16, "head_dim": 16, "num_hidden_layers": 6},
    "cohere2": LLAMA | {"sliding_window": 16},
    "gpt_oss": LLAMA | {"sliding_window": 16, "head_dim": 16, "num_local_experts": 4},
    "llama4_text": LLAMA
    | {"attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 128, "head_dim": 16},
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 16},
    "falcon": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "falcon_alibi": {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True,
    },
    "qwen2_moe": LLAMA | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "deepseek_v3": LLAMA
    | {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "qk_nope_head_dim": 8, "n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    },
    "gpt_neox": {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"},
    "opt": {
        "vocab_size": 512, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "word_embed_proj_dim": 64, "max_position_embeddings": 512,
    },
    "bloom": {"vocab_size": 512, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "mpt": {"vocab_size": 512, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 512},
    "mamba2": SSM | {"num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "falcon_mamba": SSM,
    "jamba": LLAMA
    | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False,
       "num_experts": 2},
    "bamba": HYBRID | {"mamba_d_head": 16, "attn_layer_indices": [1]},
    "lfm2": LLAMA | {"block_ff_dim": 128, "full_attn_idxs": [1]},
    "rwkv": {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "attention_hidden_size": 64,
        "context_length": 512,
    },
    "minimax": LLAMA | {"head_dim": 16, "num_local_experts": 2, "block_size": 8, "num_hidden_layers": 4},
}  # fmt: skip
QUICK = (("mistral", False), ("mixtral", True), ("mamba", False), ("recurrent_gemma", False))
WITHOUT_CACHE = {"recurrent_gemma", "rwkv", "minimax"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def prompts(shared: bool) -> list[PromptTokens]:
    """Of unlike lengths, some of one length; with or without a long beginning that they share."""
    draw = random.Random(5)
    begin = [draw.randrange(7, 512) for _ in range(40)] if shared else []
    return [
        PromptTokens(f"q{number}", (0, *begin, *(draw.randrange(7, 512) for _ in range(length))))
        for number, length in enumerate((3, 5, 20, 5, 9))
    ]


def cases() -> list[Any]:
    """Each kind with prompts that share a beginning and with others; all but a few take too long for every run."""
    found = []
    for case in ((kind, shared) for kind in KINDS for shared in (False, True)):
        marks = () if case in QUICK else (pytest.mark.slow,)
        found.append(pytest.param(*case, id=f"{case[0]}-{'shared' if case[1] else 'apart'}", marks=marks))
    return found


@pytest.mark.parametrize(("kind", "shared"), cases())
def test_a_batch_equals_each_prompt_alone_and_one_whole_pass(kind: str, shared: bool, tokenizer: Any) -> None:
    module = random_module(kind, KINDS[kind])
    lm, exact = LanguageModel(module, tokenizer), LanguageModel(module, tokenizer, exact=True)
    asked = prompts(shared)
    how = Decoding(greedy=True, samples=2, max_new_tokens=14, end_ids=tuple(range(1, 12)), seed=1)
    for prompt, together, alone in zip(asked, lm.decode(asked, how), exact.decode(asked, how), strict=True):
        for one, other in zip((together.greedy, *together.samples), (alone.greedy, *alone.samples), strict=True):
            assert one is not None
            assert other is not None
            assert (one.token_ids, one.end_id) == (other.token_ids, other.end_id)
            assert one.log_probs == pytest.approx(other.log_probs, abs=3e-5)
        assert together.greedy is not None
        with torch.inference_mode():
            ids = torch.tensor([[*prompt.token_ids, *together.greedy.token_ids]])
            log_probs = module(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        steps = log_probs[len(prompt.token_ids) - 1 : -1]
        behind = steps.gather(1, ids[0, len(prompt.token_ids) :, None])[:, 0]
        assert torch.allclose(behind, steps.amax(dim=-1), atol=3e-5)
        assert together.greedy.log_probs == pytest.approx(behind.tolist(), abs=3e-5)
    assert (lm._model.cache_name is None) is (kind in WITHOUT_CACHE)
    continuations = [(20,), (20, 21), (22, 23, 24)]
    for weighed, each in zip(lm.weigh(asked, continuations), exact.weigh(asked, continuations), strict=True):
        assert weighed == pytest.approx(each, abs=3e-5)
    assert lm.hidden(asked) == pytest.approx(exact.hidden(asked), abs=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma3_text", "mixtral", "gpt_neox", "falcon", "mamba", "jamba"])
@pytest.mark.filterwarnings("ignore")
def test_greedy_answers_are_those_of_transformers_generate(kind: str, tokenizer: Any) -> None:
    module = random_module(kind, KINDS[kind])
    asked = prompts(shared=True)
    decoded = LanguageModel(module, tokenizer).decode(asked, Decoding(max_new_tokens=20))
    for prompt, each in zip(asked, decoded, strict=True):
        ids = torch.tensor([prompt.token_ids])
        out = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None,
            pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        theirs = out.sequences[0, ids.shape[1] :].tolist()
        assert each.greedy is not None
        assert list(each.greedy.token_ids) == theirs
        log_probs = [logits[0].log_softmax(-1)[token].item() for logits, token in zip(out.logits, theirs, strict=True)]
        assert each.greedy.log_probs == pytest.approx(log_probs, abs=3e-5)


def random_module(kind: str, fields: dict[str, Any]) -> Any:
    """A small model of this kind with random weights."""
    with seeded(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some models speak of kernels that they would like
        config = transformers.AutoConfig.for_model(kind.removesuffix("_alibi"), **fields)
        if hasattr(config, "initializer_range"):
            config.initializer_range = 0.1
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_a_shared_beginning_is_read_once_only_where_a_gap_behind_it_changes_nothing(tokenizer: Any) -> None:
    shares = {}
    for kind in ("mistral", "mixtral", "mamba", "mpt"):
        model = LanguageModel(random_module(kind, KINDS[kind]), tokenizer)._model
        shares[kind] = (model.goes_on_behind_a_gap(16), model.goes_on_behind_a_gap(17))
    assert shares == {
        "mistral": (True, False),  # sees 16 tokens back, and a gap would be among them
        "mixtral": (True, True),
        "mamba": (False, False),  # padding would go through its state
        "mpt": (False, False),  # tells places by counting, gap and all
    }
