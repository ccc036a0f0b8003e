"""The tokens that a word may be written with: with a space before it or none, and in upper or lower case."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def spellings(tokenizer: Any, word: str) -> tuple[tuple[int, ...], ...]:
    """The token ids of each way to write a word, for ``LanguageModel.weigh``: their probabilities may be added up.

    `` Yes``, ``Yes``, and the same in lower and upper case. A way that goes on where another ends is left out, since
    the other's probability has it already: " yes" has that of " yesterday" too, if it is written as " yes" + "terday".
    """
    cased = dict.fromkeys((word, word.capitalize(), word.lower(), word.upper()))
    texts = [f"{space}{each}" for space in (" ", "") for each in cased]
    ids = dict.fromkeys(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
    return without_longer(each for each in ids if each)


def without_longer(sequences: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Those of the sequences that begin with no other of them, in their order. Events that exclude each other.

    >>> without_longer([(1,), (2, 3), (1, 4), (2, 3)])
    ((1,), (2, 3))
    """
    known = tuple(dict.fromkeys(sequences))
    return tuple(each for each in known if not any(each[: len(other)] == other for other in known if other != each))
