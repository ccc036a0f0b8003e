"""Numbers as people write them: found in texts and compared by exact value. Standard library alone.

Numbers can't be compared as words: without punctuation 1.5 is 15, -3 is 3, and 1500 is not 1500.00.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fractions import Fraction

from gpuherd.qa.record import Question

_LONGEST_NUMBER = 1000  # digits; Python's own limit is 4300
_NUMBER = re.compile(
    r"""(?:(?<![\w.)\]}])(?P<sign>−\s?|[-+–])|(?<==)\s?(?P<apart>[-–])\s)?(?:[$€£¥]\s?(?P<inner>[-−–])?)?(?<!\w)(?<!\d\.)(?=\\[dt]?frac|\.?\d)
    (?: (?P<mixed>\d+)\s(?P<top>\d+)\s?/\s?(?P<bottom>\d+)(?![\d/])
      | (?P<over>\d+)\s?/\s?(?P<under>\d+)(?![\d/])
      | \\[dt]?frac\s?\{\s?(?P<latex_over>-?\d+)\s?\}\s?\{\s?(?P<latex_under>\d+)\s?\}
      | \\[dt]?frac\s?(?P<digit_over>\d)\s?(?P<digit_under>\d)
      | (?P<whole>\d{1,3}(?:(?:,(?:\\!)?|\{,\}|\\[,!]|[\u00a0\u2009\u202f])\d{3})+(?!\d)|\d+)?
        (?P<decimals>\.\d+)?(?:[eE](?P<exponent>[-+]?\d{1,3})(?!\w))?
    )(?P<percent>\s?\\?%)?""",
    re.VERBOSE,
)
_NO_DIGIT = re.compile(r"\D")


def number_of(text: str) -> tuple[Fraction, bool] | None:
    """The value of a text that is a number, with currency or percent sign, and whether it is a percentage; else None.

    >>> number_of("$1,200.50"), number_of("50 %"), number_of("1 1/2"), number_of("12 apples")
    ((Fraction(2401, 2), False), (Fraction(50, 1), True), (Fraction(3, 2), False), None)
    """
    text = text.strip().strip("$").strip().rstrip(".").strip()
    found = list(numbers_in(text))
    return (found[0][1], found[0][2]) if len(found) == 1 and found[0][0] == text.strip() else None


def same_number(one: tuple[Fraction, bool], other: tuple[Fraction, bool]) -> bool:
    """Whether they are equal; a percentage also equals its hundredth if the other is no percentage."""
    if one[0] == other[0]:
        return True
    if one[1] == other[1]:
        return False
    percent, share = (one[0], other[0]) if one[1] else (other[0], one[0])
    return percent / 100 == share


def spelt(text: str) -> str:
    """The text with each number as one word of letters and digits, the same for equal numbers.

    >>> spelt("1,500.00 or -1.5%"), spelt("1500")
    (' 1500  or  minus3over2 ', ' 1500 ')
    """
    parts: list[str] = []
    end = 0
    for found in _NUMBER.finditer(text):
        value = _value(found)
        # "1990s" is another word than 1990.
        if value is not None and not text[found.end() : found.end() + 1].isalpha():
            parts += [text[end : found.start()], f" {_word(value)} "]
            end = found.end()
    return "".join((*parts, text[end:]))


def mostly_numbers(questions: Iterable[Question]) -> bool:
    """Whether most of these questions have a number as a reference, so that answers are compared by value."""
    of_each = [any(number_of(answer) is not None for answer in question.answers) for question in questions]
    return 2 * sum(of_each) > len(of_each)


def rule_for(questions: Iterable[Question]) -> str:
    """The rule for judging that suits the references of these questions."""
    return "math" if mostly_numbers(questions) else "exact"


def numbers_in(text: str, start: int = 0) -> Iterator[tuple[str, Fraction, bool]]:
    """The numbers of a text from an index on, in order: as written, value, whether a percent sign follows."""
    for found in _NUMBER.finditer(text, start):
        value = _value(found)
        if value is not None:
            yield found[0].strip(), value, found["percent"] is not None


def _value(found: re.Match[str]) -> Fraction | None:
    """The value of a match; None if it has no digit or no value."""
    part = found.groupdict()
    if max((len(each) for each in part.values() if each), default=0) > _LONGEST_NUMBER:
        return None
    try:
        if part["mixed"]:
            size = int(part["mixed"]) + Fraction(int(part["top"]), int(part["bottom"]))
        elif over := part["over"] or part["latex_over"] or part["digit_over"]:
            size = Fraction(int(over), int(part["under"] or part["latex_under"] or part["digit_under"]))
        elif part["whole"] or part["decimals"]:
            whole = _NO_DIGIT.sub("", part["whole"] or "0")
            size = Fraction(f"{whole}{part['decimals'] or ''}e{part['exponent'] or 0}")
        else:
            return None
    except ZeroDivisionError:
        return None
    negative = (part["sign"] or part["apart"] or "+")[0] != "+" or part["inner"] is not None
    return -size if negative else size


def _word(value: Fraction) -> str:
    size = abs(value)
    return f"{'minus' if value < 0 else ''}{size.numerator}{f'over{size.denominator}' if size.denominator > 1 else ''}"
