"""ROUGE-L of two texts: the longest common subsequence of their word stems, as an F measure.

C.-Y. Lin, "ROUGE: A package for automatic evaluation of summaries", 2004, section 3 (with beta = 1), on the words of
the rouge-score package: runs of ASCII letters and digits in lower case, those of more than three letters stemmed.
Other scripts have no words by this rule, so that ROUGE-L says nothing of them (``words`` is empty). Ours, since that
package imports NLTK, which imports scikit-learn and pandas: 2.6 s of CPU for one stemmer.

The stemmer's rules are those of M. F. Porter, "An algorithm for suffix stripping", Program 14(3), 1980, with his own
later changes (``bli``, ``logi``) and NLTK's (irregular forms; ``dies`` -> ``die``; ``y`` becomes ``i`` only behind a
consonant), because the rouge-score package stems with NLTK's default mode. Knows words of lower-case ASCII alone.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence

_IRREGULAR = {
    "skies": "sky",
    "dying": "die",
    "lying": "lie",
    "tying": "tie",
    "innings": "inning",
    "outings": "outing",
    "cannings": "canning",
} | {same: same for same in ("sky", "news", "inning", "outing", "canning", "howe", "proceed", "exceed", "succeed")}

# Of each step the suffixes in the order in which they are looked for: the first that fits decides.
_STEP_2 = {
    "ational": "ate",
    "tional": "tion",
    "enci": "ence",
    "anci": "ance",
    "izer": "ize",
    "bli": "ble",
    "alli": "al",
    "entli": "ent",
    "eli": "e",
    "ousli": "ous",
    "ization": "ize",
    "ation": "ate",
    "ator": "ate",
    "alism": "al",
    "iveness": "ive",
    "fulness": "ful",
    "ousness": "ous",
    "aliti": "al",
    "iviti": "ive",
    "biliti": "ble",
    "fulli": "ful",
}
_STEP_3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
_STEP_4 = (
    *("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion"),
    *("ou", "ism", "ate", "iti", "ous", "ive", "ize"),
)


@functools.lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """The stem of a word in lower case.

    >>> stem("relational"), stem("hopping"), stem("flies"), stem("argued")
    ('relat', 'hop', 'fli', 'argu')
    """
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) <= 2:
        return word
    for step in (_plural, _past, _final_y, _double_suffix, _single_suffix, _long_stem, _final_e, _final_double_l):
        word = step(word)
    return word


def _consonants(word: str) -> list[bool]:
    """Of each letter whether it is a consonant; ``y`` is one at the beginning and behind a vowel."""
    kinds: list[bool] = []
    for letter in word:
        kinds.append((not kinds or not kinds[-1]) if letter == "y" else letter not in "aeiou")
    return kinds


def _measure(word: str) -> int:
    """Porter's m: how often a vowel is followed by a consonant."""
    kinds = _consonants(word)
    return sum(not before and after for before, after in itertools.pairwise(kinds))


def _has_vowel(word: str) -> bool:
    return not all(_consonants(word))


def _ends_double(word: str) -> bool:
    """Porter's *d: ends with the same consonant twice."""
    return len(word) >= 2 and word[-1] == word[-2] and _consonants(word)[-1]


def _ends_short(word: str) -> bool:
    """Porter's *o: ends consonant, vowel, consonant, the last none of w, x, y; or is a vowel and a consonant."""
    kinds = _consonants(word)
    if len(word) == 2:
        return kinds == [False, True]
    return kinds[-3:] == [True, False, True] and word[-1] not in "wxy"


def _replaced(word: str, rules: dict[str, str], fits: Callable[[str], bool]) -> str:
    """The word by the first rule whose suffix it has; unchanged if what stands before that doesn't fit."""
    for suffix, replacement in rules.items():
        if word.endswith(suffix):
            before = word[: len(word) - len(suffix)]
            return before + replacement if fits(before) else word
    return word


def _plural(word: str) -> str:
    if word.endswith("ies"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("sses"):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _past(word: str) -> str:
    if word.endswith("ied"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for suffix in ("ed", "ing"):
        if word.endswith(suffix):
            before = word[: -len(suffix)]
            return _mended(before) if _has_vowel(before) else word
    return word


def _mended(before: str) -> str:
    """What is left of a word in -ed or -ing: hop(p), conflat(e), fil(e)."""
    if before.endswith(("at", "bl", "iz")):
        return before + "e"
    if _ends_double(before):
        return before if before[-1] in "lsz" else before[:-1]
    return before + "e" if _measure(before) == 1 and _ends_short(before) else before


def _final_y(word: str) -> str:
    before = word[:-1]
    return before + "i" if word.endswith("y") and len(before) > 1 and _consonants(before)[-1] else word


def _double_suffix(word: str) -> str:
    if word.endswith("alli") and _measure(word[:-4]) > 0:
        return _double_suffix(word[:-2])
    if word.endswith("logi"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    return _replaced(word, _STEP_2, lambda before: _measure(before) > 0)


def _single_suffix(word: str) -> str:
    return _replaced(word, _STEP_3, lambda before: _measure(before) > 0)


def _long_stem(word: str) -> str:
    for suffix in _STEP_4:
        if word.endswith(suffix):
            before = word[: -len(suffix)]
            fits = _measure(before) > 1 and (suffix != "ion" or before[-1] in "st")
            return before if fits else word
    return word


def _final_e(word: str) -> str:
    if not word.endswith("e"):
        return word
    measure = _measure(word[:-1])
    return word[:-1] if measure > 1 or (measure == 1 and not _ends_short(word[:-1])) else word


def _final_double_l(word: str) -> str:
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word


# --- ROUGE-L ----------------------------------------------------------------------------------------------------------

_WORD = re.compile(r"[a-z0-9]+")
_STEMMED_FROM = 4  # letters


def words(text: str) -> tuple[str, ...]:
    """The words that ROUGE compares.

    >>> words("The Cats' whiskers!")
    ('the', 'cat', 'whisker')
    """
    found = _WORD.findall(text.lower())
    return tuple(stem(word) if len(word) >= _STEMMED_FROM else word for word in found)


def rouge_l(first: str, second: str) -> float:
    """ROUGE-L F1 of two texts, in [0, 1]; symmetric; 0 where one has no words."""
    return rouge_l_of_words(words(first), words(second))


def rouge_l_of_words(first: Sequence[str], second: Sequence[str]) -> float:
    """The same of texts that ``words`` has divided already: 2 LCS / (n + m)."""
    if not first or not second:
        return 0.0
    return 2 * common_subsequence(first, second) / (len(first) + len(second))


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence, in O(n m / w) by words of w bits.

    Bit-parallel: M. Crochemore et al., "A fast and practical bit-vector algorithm for the longest common subsequence
    problem", Information Processing Letters 80(6), 2001. A row of the table is one whole number, a bit a word of
    ``first``; a bit is 0 where the length rises.
    """
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    everywhere = (1 << len(first)) - 1
    row = everywhere
    for word in second:
        here = row & places.get(word, 0)
        row = ((row + here) | (row - here)) & everywhere
    return len(first) - row.bit_count()
