"""Cards out of words: ``4x40GB``, ``2x80GB+4x24GB``, ``8xH100``; and words out of cards. Pure.

A gigabyte is 2^30 bytes. A size means a card that has all of it; a kind of GPU has what CUDA really gives out there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from gpuherd.errors import UsageError
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.kinds import kind_named, nearest_kinds
from gpuherd.units import size_mb

MIB = 1 << 20
MOST_CARDS = 1024
# Two thousand gigabytes on one card: a slip of the unit, for years to come.
_MOST_MB = 2 << 20

GRAMMAR = "write 4x40GB, 2x80GB+4x24GB, 4xA100-40 or 8xH100"

_COUNTED = re.compile(r"([+-]?\d{1,9})\s*[x×*]\s*(.+)", re.ASCII | re.IGNORECASE)
_SIZE = re.compile(r"\d{1,15}(?:\.\d{1,9})?\s*[mgt]i?b?", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?", re.ASCII)


def parse_cards(text: str, flag: str = "--gpus") -> tuple[Card, ...]:
    """The cards that these words describe, labelled 0, 1, ... in that order.

    Raises UsageError with a sentence that says what to write: no unit, no or too many GPUs, an unknown kind (the
    nearest are named). ``flag``: what it calls the words.

    >>> [(card.label, card.name, card.total >> 20) for card in parse_cards("2x40GB+RTX4090")]
    [('0', '40GB', 40960), ('1', '40GB', 40960), ('2', 'RTX4090', 24064)]
    """
    cards: list[Card] = []
    said = f"{flag} {text!r}"
    for group in text.split("+"):
        count, word = _counted(group.strip(), said)
        name, total, capability = _described(word, count, said)
        if len(cards) + count > MOST_CARDS:
            raise UsageError(f"{said}: {len(cards) + count} GPUs; a plan is made for at most {MOST_CARDS}")
        cards += [Card(str(len(cards) + place), name, total, total, capability) for place in range(count)]
    return tuple(cards)


def _counted(group: str, said: str) -> tuple[int, str]:
    """How many, and of what."""
    found = _COUNTED.fullmatch(group)
    if found is None:
        # A minus sign is a count that somebody got wrong, not part of a name.
        if not group or group.startswith("-"):
            raise UsageError(f"{said}: {group!r} describes no GPUs; {GRAMMAR}")
        return 1, group
    count = int(found[1])
    if count < 1:
        raise UsageError(f"{said}: {count} GPUs; a plan needs at least 1")
    return count, found[2].strip()


def _described(word: str, count: int, said: str) -> tuple[str, int, tuple[int, int] | None]:
    """Name, bytes and capability of the GPUs that a word means."""
    if _NUMBER.fullmatch(word):
        kinds = [name for name in nearest_kinds(word) if word in name and len(word) > 2]
        meant = f"{count}x{word}GB" if not kinds else f"{count}x{kinds[0]} (or {count}x{word}MB)"
        raise UsageError(f"{said}: {word} of what? A size needs its unit: write {meant}")
    if _SIZE.fullmatch(word):
        try:
            mb = size_mb(word)
        except ValueError as problem:
            raise UsageError(f"{said}: {problem}") from problem
        if mb > _MOST_MB:
            raise UsageError(f"{said}: no GPU has {word}; {GRAMMAR}")
        return _size_word(mb), mb * MIB, None
    kind = kind_named(word)
    if kind is None:
        near = nearest_kinds(word)
        hint = f"did you mean {' or '.join(near)}?" if near else "give its memory: 4x40GB"
        raise UsageError(f"{said}: no kind of GPU {word!r} is known here; {hint}")
    return kind.name, kind.memory, kind.capability


def _size_word(mb: int) -> str:
    """``40GB``, or ``1500MB`` where that is no whole number of them."""
    return f"{mb // 1024}GB" if mb % 1024 == 0 else f"{mb}MB"


def words_for(cards: Sequence[Card]) -> str:
    """These cards as ``--gpus`` takes them. Of GPUs that are really there the kind is told, else their memory.

    >>> words_for(parse_cards("2x80GB+4x24GB"))
    '2x80GB+4x24GB'
    """
    groups = [(name, len(list(same))) for name, same in groupby(cards, key=_word_for)]
    return "+".join(f"{count}x{name}" for name, count in groups)


def _word_for(card: Card) -> str:
    kind = kind_named(card.name)
    # What is asked for by size has that size as its name; a real card of an unknown kind gets its whole gigabytes.
    return kind.name if kind is not None else _size_word(max(1, card.total // MIB))
