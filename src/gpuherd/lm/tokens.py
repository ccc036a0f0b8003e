"""Tokens of a tokenizer: those that end an answer, those that a word may be written with, and the text that token ids
stand for, divided among the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

# ---- tokens that end an answer ---------------------------------------------------------------------------------------
#
# All ends that a model's configs and its tokenizer name count, for one of them is often not enough.
#
# Llama-3.1 ends a turn by ``<|eot_id|>``, a text by ``<|end_of_text|>`` and a tool call by ``<|eom_id|>``; its
# tokenizer names only one of these. What follows the first of them is not the answer any more. Gemma's chat template
# ends a turn by another token than its tokenizer names.

# Ends of a turn or a text in the chat formats that are about, where a tokenizer has them as special tokens. What opens
# something (<|im_start|>, <|user|>) is none of them.
ENDINGS = (
    "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>",
    "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<|eot|>", "<|return|>", "<turn|>", "<eos>", "</s>",
)  # fmt: skip

MARKER = "gpuherdmarkerofwords"  # one word that no template changes
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_NO_BOUND = 1 << 30  # configs without a maximum length may have a number above this


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
    name(_integers(getattr(tokenizer, "eos_token_id", None)), "tokenizer")
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


def positions_in(folder: Path) -> int | None:
    """The most tokens of prompt and answer together, by a model's config.json, of which the text part comes first; None
    where it does not say."""
    config = _read(folder / "config.json") or {}
    for values in (config.get("text_config"), config):
        for name in _POSITIONS:
            value = values.get(name) if isinstance(values, Mapping) else None
            if found := [each for each in _integers(value) if 0 < each < _NO_BOUND]:
                return found[0]
    return None


def _eos_of(config: Mapping[str, Any] | None) -> tuple[int, ...]:
    if config is None:
        return ()
    inner = config.get("text_config")
    named = _integers(config.get("eos_token_id"))
    return named + _integers(inner.get("eos_token_id") if isinstance(inner, Mapping) else None)


def _integers(value: Any) -> tuple[int, ...]:
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


# ---- from token ids to text: which characters belong to which token --------------------------------------------------
#
# Works on any tokenizer through its ``decode``. A byte of half a character brings nothing; the token that completes
# the character brings it whole. What a tokenizer does at the beginning of a text (SentencePiece takes a space away)
# happens here at the beginning of the answer alone.
#
# Special tokens bring no text, but for those that mark thoughts (``THOUGHT_TAGS``, ``CHANNEL_TOKENS``): without them
# a thought can't be distinguished from the answer.


# Tags before and behind a thought.
THOUGHT_TAGS = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen, GLM, Phi-4 and most others
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<reasoning>", "</reasoning>"),  # Reka Flash 3
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("[THINK]", "[/THINK]"),  # Magistral
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    ("<|channel>thought", "<channel|>"),  # Gemma 4
)
# gpt-oss's format (harmony): <|start|>assistant<|channel|>analysis<|message|> … <|end|>, the answer in channel final.
CHANNEL_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")

_TAG_TOKENS = frozenset({"<|channel>", *(tag for pair in THOUGHT_TAGS for tag in pair)})
_skipped: WeakKeyDictionary[Any, frozenset[int] | None] = WeakKeyDictionary()

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are no character, or not yet


class Detokenizer:
    """An answer's text as its tokens come.

    Attributes:
        token_ids: the tokens.
        text: what they bring, but for characters that are not complete.
        ends: for each token the place in ``text`` behind its last character.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.token_ids: list[int] = []
        self.text = ""
        self.ends: list[int] = []
        self._pending = ""
        # Tokens from ``_whole`` on bring characters that are not in ``text``; those from ``_before`` on are decoded
        # with them, so that a decoder that treats the beginning of a text in a way of its own does it to neither.
        self._before = self._whole = 0

    def add(self, token_id: int) -> None:
        """The next token."""
        self.token_ids.append(token_id)
        known = decode_tokens(self._tokenizer, self.token_ids[self._before : self._whole])
        now = decode_tokens(self._tokenizer, self.token_ids[self._before :])
        if now.endswith(_UNFINISHED):
            self._pending = now[len(known) :]
        else:
            self.text += now[len(known) :]
            self._pending = ""
            if len(now) > len(known):
                self._before = self._whole
            self._whole = len(self.token_ids)
        self.ends.append(len(self.text))

    def find(self, strings: Sequence[str]) -> int | None:
        """Where the first of these strings begins that the last token completed; None where none is there.

        Also in what it brought before a character that is not complete.
        """
        if not strings:
            return None
        shown = self.text + self._pending
        before = self.ends[-2] if len(self.ends) > 1 else 0
        start = max(0, before - max(map(len, strings)) + 1)
        places = [place for each in strings if (place := shown.find(each, start)) >= 0]
        return min(places, default=None)

    def divided(self) -> tuple[str, tuple[int, ...]]:
        """The whole text as the tokenizer decodes all tokens together, and each token's end in it; the last is its
        length."""
        whole = decode_tokens(self._tokenizer, self.token_ids)
        if not self.token_ids:
            return "", ()
        if whole == self.text + self._pending:
            return whole, (*self.ends[:-1], len(whole))
        return whole, _ends_by_prefixes(self._tokenizer, self.token_ids, whole)


def cut(text: str, ends: Sequence[int], length: int) -> tuple[str, tuple[int, ...]]:
    """The first so many characters, divided among the tokens that have any before that place: the others are left out.

    >>> cut("Paris.\\n\\nQuestion", (5, 8, 16), 6)
    ('Paris.', (5, 6))
    """
    kept = [min(end, length) for start, end in zip((0, *ends), ends, strict=False) if start < length]
    return text[:length], tuple(kept)


def decode_tokens(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of these tokens without special ones, but for tags of thoughts, and with its spaces as they are."""
    skipped = _skipped_ids(tokenizer)
    kept = list(token_ids) if skipped is None else [each for each in token_ids if each not in skipped]
    text: str = tokenizer.decode(kept, skip_special_tokens=skipped is None, clean_up_tokenization_spaces=False)
    return text


def _skipped_ids(tokenizer: Any) -> frozenset[int] | None:
    """The special tokens that bring no text, where others mark thoughts; None where the tokenizer skips all itself."""
    if tokenizer not in _skipped:
        ids = getattr(tokenizer, "all_special_ids", ())
        special = {each: str(tokenizer.convert_ids_to_tokens(each)) for each in ids}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special |= {number: each.content for number, each in added.items() if each.special}
        texts = frozenset(special.values())
        staying = _TAG_TOKENS | (frozenset(CHANNEL_TOKENS) if texts.issuperset(CHANNEL_TOKENS) else frozenset())
        skipped = frozenset(number for number, text in special.items() if text not in staying)
        _skipped[tokenizer] = skipped if len(skipped) < len(special) else None
    return _skipped[tokenizer]


def _ends_by_prefixes(tokenizer: Any, token_ids: Sequence[int], whole: str) -> tuple[int, ...]:
    """Ends by decoding every beginning of the answer: slow, and right for any decoder."""
    ends: list[int] = []
    for count in range(1, len(token_ids)):
        beginning = decode_tokens(tokenizer, token_ids[:count]).rstrip(_UNFINISHED)
        same = 0
        while same < min(len(beginning), len(whole)) and beginning[same] == whole[same]:
            same += 1
        ends.append(max(same, ends[-1] if ends else 0))
    return (*ends, len(whole))
