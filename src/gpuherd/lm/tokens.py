"""Tokens of a tokenizer: those that end an answer, and those that a word may be written with.

All ends that a model's configs and its tokenizer name count, for one of them is often not enough.

Llama-3.1 ends a turn by ``<|eot_id|>``, a text by ``<|end_of_text|>`` and a tool call by ``<|eom_id|>``; its tokenizer
names only one of these. What follows the first of them is not the answer any more. Gemma's chat template ends a turn by
another token than its tokenizer names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Ends of a turn or a text in the chat formats that are about, where a tokenizer has them as special tokens. What opens
# something (<|im_start|>, <|user|>) is none of them.
ENDINGS = (
    "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>",
    "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<|eot|>", "<|return|>", "<turn|>", "<eos>", "</s>",
)  # fmt: skip

MARKER = "gpuherdmarkerofwords"  # one word that no template changes


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The tokens that end an answer, ascending, and who named each: ``config``, ``generation_config``, ``tokenizer``,
    ``a token's name``, or, where none of them did, ``chat template``."""

    ids: tuple[int, ...]
    named_by: Mapping[int, tuple[str, ...]]

    def values(self) -> dict[str, Any]:
        """For a run's record, as JSON values."""
        return {"ids": list(self.ids), "named_by": {str(each): list(self.named_by[each]) for each in self.ids}}


def end_tokens(
    tokenizer: Any, config: Mapping[str, Any] | None = None, generation_config: Mapping[str, Any] | None = None
) -> EndTokens:
    """All tokens that end an answer. ``config`` and ``generation_config``: the values of the two files, if there."""
    found: dict[int, list[str]] = {}

    def name(ids: Iterable[int], source: str) -> None:
        for each in ids:
            if source not in (sources := found.setdefault(each, [])):
                sources.append(source)

    name(_eos_of(config), "config")
    name(_eos_of(generation_config), "generation_config")
    name(_whole_numbers(getattr(tokenizer, "eos_token_id", None)), "tokenizer")
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    name((special[each] for each in ENDINGS if each in special), "a token's name")
    if (end := template_end(tokenizer)) is not None and end not in found:
        name((end,), "chat template")
    return EndTokens(tuple(sorted(found)), {each: tuple(found[each]) for each in sorted(found)})


def turn_end(tokenizer: Any) -> int | None:
    """The token that ends a turn: by the chat template, else the tokenizer's end token; None where there is none."""
    end = template_end(tokenizer)
    return tokenizer.eos_token_id if end is None else end


def template_end(tokenizer: Any) -> int | None:
    """The special token that the chat template puts after an assistant message; None where there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "user", "content": MARKER}, {"role": "assistant", "content": MARKER}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
        behind = text.rpartition(MARKER)[2].strip()
        ids = tokenizer(behind, add_special_tokens=False, verbose=False)["input_ids"] if behind else []
    except Exception:  # a template raises what it likes
        return None
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return int(ids[0]) if ids and ids[0] in special | {tokenizer.eos_token_id} else None


def end_tokens_in(folder: Path, tokenizer: Any) -> EndTokens:
    """``end_tokens`` of a model's folder; reads its two configs and loads nothing else."""
    return end_tokens(tokenizer, _read(folder / "config.json"), _read(folder / "generation_config.json"))


def _eos_of(config: Mapping[str, Any] | None) -> tuple[int, ...]:
    if config is None:
        return ()
    inner = config.get("text_config")
    named = _whole_numbers(config.get("eos_token_id"))
    return named + _whole_numbers(inner.get("eos_token_id") if isinstance(inner, Mapping) else None)


def _whole_numbers(value: Any) -> tuple[int, ...]:
    """The ids in a config's value: a number, several, or none. -1 is how some configs say none."""
    several = value if isinstance(value, list | tuple) else [value]
    return tuple(each for each in several if isinstance(each, int) and not isinstance(each, bool) and each >= 0)


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


# --- Words as tokens --------------------------------------------------------------------------------------------------


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
