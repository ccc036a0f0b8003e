"""From token ids to text, divided among the tokens: which characters belong to which token, without the tokenizer.

Works on any tokenizer through its ``decode``. A byte of half a character brings nothing; the token that completes the
character brings it whole. What a tokenizer does at the beginning of a text (SentencePiece takes a space away) happens
here at the beginning of the answer alone.

Special tokens bring no text, but for those that mark thoughts (``THOUGHT_TAGS``, ``CHANNEL_TOKENS``): without them a
thought can't be told from the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    pass


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


class Growing:
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
        known = decoded(self._tokenizer, self.token_ids[self._before : self._whole])
        now = decoded(self._tokenizer, self.token_ids[self._before :])
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
        whole = decoded(self._tokenizer, self.token_ids)
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


def decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
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
        beginning = decoded(tokenizer, token_ids[:count]).rstrip(_UNFINISHED)
        same = 0
        while same < min(len(beginning), len(whole)) and beginning[same] == whole[same]:
            same += 1
        ends.append(max(same, ends[-1] if ends else 0))
    return (*ends, len(whole))
