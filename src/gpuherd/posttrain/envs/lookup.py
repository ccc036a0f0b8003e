"""Looks texts up in a local file, by their words: a small library for a policy that uses tools."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuherd.errors import UsageError
from gpuherd.qa.data.files import rows_of_lines
from gpuherd.qa.data.questions import MissingQuestions

_WORD = re.compile(r"\w+")
_SATURATION, _LENGTHS = 1.5, 0.75  # k1 and b


@dataclass(frozen=True, slots=True)
class Entry:
    """A text and what it is called."""

    title: str
    text: str


class Library:
    """Entries, found by BM25 (Robertson and Zaragoza 2009) with k1 = 1.5 and b = 0.75 over title and text."""

    def __init__(self, entries: Sequence[Entry]):
        """Raises UsageError without any."""
        if not entries:
            raise UsageError("a library to look things up in has no entries")
        self._entries = tuple(entries)
        self._words = [Counter(_words(f"{each.title} {each.text}")) for each in entries]
        self._lengths = [sum(words.values()) for words in self._words]
        self._mean = max(1.0, sum(self._lengths) / len(entries))
        self._holding = Counter(word for words in self._words for word in words)

    def find(self, query: str, count: int = 1) -> list[Entry]:
        """The entries that fit best, the best first; none that shares no word with the query."""
        wanted = set(_words(query))
        scores = [(self._score(wanted, place), -place) for place in range(len(self._entries))]
        best = sorted((each for each in scores if each[0] > 0), reverse=True)[:count]
        return [self._entries[-place] for _, place in best]

    def _score(self, wanted: set[str], place: int) -> float:
        words, share = self._words[place], self._lengths[place] / self._mean
        total = 0.0
        for word in sorted(wanted & words.keys()):
            rarity = math.log(1 + (len(self._entries) - self._holding[word] + 0.5) / (self._holding[word] + 0.5))
            often = words[word]
            total += rarity * often * (_SATURATION + 1) / (often + _SATURATION * (1 - _LENGTHS + _LENGTHS * share))
        return total


def read_library(path: Path) -> Library:
    """The entries of a JSONL file with ``title`` and ``text``. Raises UsageError, MissingQuestions."""
    entries = []
    try:
        for row in rows_of_lines(path):
            values = row.values or {}
            title, text = values.get("title", ""), values.get("text")
            if not isinstance(title, str) or not isinstance(text, str):
                raise UsageError(f"{path}, {row.place}: {row.problem or 'title and text should be texts'}")
            entries.append(Entry(title, text))
    except OSError as problem:
        raise MissingQuestions(f"{path} can't be read: {problem.strerror}") from None
    return Library(entries)


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]
