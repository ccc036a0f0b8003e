"""Small random models made by transformers, saved once for all tests of this folder: the real thing, but its size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.qa.conftest import trained

__all__ = ["trained"]

Small = Callable[..., Path]


def slow(*values: object) -> Any:
    """A case of a broad sweep, whose kind of check another case of it makes in every run."""
    return pytest.param(*values, marks=pytest.mark.slow)


LLAMA: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "tie_word_embeddings": False, "max_position_embeddings": 256,
}  # fmt: skip
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "tied": ("llama", {**LLAMA, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 320, "n_positions": 128}),
    "mixtral": ("mixtral", {**LLAMA, "num_local_experts": 4, "num_hidden_layers": 3}),
    "t5": ("t5", {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 320,
                  "decoder_start_token_id": 0}),
    "recurrent": ("recurrent_gemma", {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
                                      "num_attention_heads": 4, "vocab_size": 320, "lru_width": 64,
                                      "attention_window_size": 64}),
    "bert": ("bert", {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                      "vocab_size": 320, "max_position_embeddings": 128}),
}  # fmt: skip


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """``small("llama", dtype="bfloat16", shards="60KB")`` is the folder of such a model, made when first asked for."""
    made: dict[tuple[str, str, str], Path] = {}

    def make(name: str, dtype: str = "bfloat16", shards: str = "5GB") -> Path:
        import torch
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

        key = (name, dtype, shards)
        if key not in made:
            model_type, fields = SMALL[name]
            kinds = {"t5": AutoModelForSeq2SeqLM, "bert": AutoModel}
            torch.manual_seed(3)
            model = kinds.get(name, AutoModelForCausalLM).from_config(AutoConfig.for_model(model_type, **fields))
            made[key] = tmp_path_factory.mktemp("small") / name
            model.to(getattr(torch, dtype)).save_pretrained(made[key], max_shard_size=shards)
        return made[key]

    return make
