"""From the text of a prompt to token ids, with the special tokens that belong there and none that end it."""

from __future__ import annotations

from typing import Any


def token_ids(tokenizer: Any, text: str, *, conversation: bool) -> tuple[int, ...]:
    """The ids of a text: a conversation brings its special tokens; plain text gets a beginning, and no end."""
    ids = list(tokenizer(text, add_special_tokens=not conversation, verbose=False)["input_ids"])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        del ids[0]
    ended = eos is not None and ids[-1:] == [eos]
    if ended and not conversation and len(ids) > 1 and not text.rstrip().endswith(str(tokenizer.eos_token)):
        del ids[-1]  # a tokenizer that closes every text: the model would take the question for answered
    return tuple(ids)
