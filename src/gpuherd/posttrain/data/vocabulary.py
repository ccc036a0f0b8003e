"""Tokenizers of a fixed list of tokens, for tasks that small models learn from scratch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

EOS, PAD, UNKNOWN = "</s>", "<pad>", "<unk>"


def write_tokenizer(folder: Path, words: Iterable[str], split: Any, *, spaced: bool = True) -> Any:
    """A tokenizer of one token a word, saved into the folder and returned; it adds none by itself. ``</s>`` is 0,
    ``<pad>`` 1, ``<unk>`` 2.

    Args:
        split: the pre-tokenizer (of ``tokenizers``) that parts a text into words.
        spaced: a text is decoded with spaces between its tokens.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    numbered = {word: number for number, word in enumerate([EOS, PAD, UNKNOWN, *words])}
    tokenizer = Tokenizer(models.WordLevel(numbered, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    if not spaced:
        tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(folder)
    return fast


def characters(folder: Path, words: Iterable[str]) -> Any:
    """One whose words are single characters, decoded without spaces."""
    from tokenizers import Regex, pre_tokenizers

    return write_tokenizer(folder, words, pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), spaced=False)
