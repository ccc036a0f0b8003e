"""Which completions gave the same answer: what votes in a majority. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpuherd.qa.judging.math_answers import formula_of, normalised_formula, number_of


def answer_of(text: str) -> str | None:
    """A completion's answer in the form in which answers are compared; None where it says nothing.

    What is marked as the result (``####``, ``\\boxed{}``) or said to be it ("the answer is"), else all of the text.
    Numbers are compared by their value, all else without white space and case.

    >>> answer_of("6 + 6 = 12, so the answer is 12.0"), answer_of("#### $1,200"), answer_of("3, 4,5"), answer_of(" ")
    ('12', '1200', '3,4,5', None)
    """
    formula = formula_of(text)
    number = number_of(formula)
    if number is not None:
        value, percent = number
        return f"{value}%" if percent else str(value)
    return normalised_formula(formula).casefold() or None


def numbered(answers: Sequence[str | None]) -> tuple[int | None, ...]:
    """Equal answers as equal numbers, in the order in which they first came; None stays None.

    >>> numbered(["b", None, "a", "b"])
    (0, None, 1, 0)
    """
    seen: dict[str, int] = {}
    return tuple(None if each is None else seen.setdefault(each, len(seen)) for each in answers)
