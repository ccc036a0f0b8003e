"""Tiny models of one vocabulary for the tests of post-training: each ASCII character a token, nothing is trained."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from tests.qa.small_models import seeded

from gpuherd.posttrain.data.generated import characters as tokenizer_of


def character_tokenizer(folder: Path, *, characters: str = string.printable) -> Any:
    """A tokenizer of characters, saved into the folder; it adds no special tokens. ``</s>`` is 0, ``<pad>`` 1."""
    return tokenizer_of(folder, dict.fromkeys(characters))


def tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    width: int = 32,
    layers: int = 2,
    characters: str = string.printable,
    spread: float = 0.2,
    positions: int = 256,
) -> Path:
    """A random llama of this width with such a tokenizer, in float32; ``spread`` of its weights makes its logits large
    enough that rounding decides nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = character_tokenizer(folder, characters=characters)
    with seeded(seed):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=positions,
                initializer_range=spread,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=None,
                tie_word_embeddings=False,
            )
        )
    model.save_pretrained(folder)
    return folder
