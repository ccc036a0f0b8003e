"""Which completions gave the same answer: what votes in a majority. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpuherd.posttrain.rewards.math import VALUE
from gpuherd.posttrain.types import Problem
from gpuherd.qa.grading.formulas import formula_of, normalised_formula, result_of
from gpuherd.qa.numbers import number_of
from gpuherd.qa.span import answer_in

_CONFIDENCE = re.compile(r"<confidence>.*?</confidence>", re.IGNORECASE | re.DOTALL)  # stated beside an answer


def asks_for_number(problem: Problem) -> bool:
    """Whether the right result of a problem is a number, so that answers to it are compared by theirs.

    >>> asks_for_number(Problem("a", "1+1=", ("2",))), asks_for_number(Problem("b", "path", ("3,4,5",)))
    (True, False)
    """
    first = problem.answers[0] if problem.answers else ""
    return number_of(problem.hidden.get(VALUE, first)) is not None


def answer_of(text: str, *, number: bool = False) -> str | None:
    """A completion's answer in the form in which answers are compared; None where it says nothing, or thinks alone.

    What is marked as the result (``####``, ``\\boxed{}``) or said to be it ("the answer is"); else all of the text, or,
    where a number is asked for, the last one in it, as math answers are judged. Numbers are compared by their value,
    all else without white space and case. A confidence that is stated in its tag is no part of it.

    >>> answer_of("6 + 6 = 12, so the answer is 12.0"), answer_of("#### $1,200"), answer_of("3, 4,5"), answer_of(" ")
    ('12', '1200', '3,4,5', None)
    >>> answer_of("That makes 4 + 5 = 9 apples", number=True), answer_of("no idea", number=True)
    ('9', 'noidea')
    >>> answer_of("9 <confidence>0.7</confidence>", number=True)
    '9'
    """
    text = _CONFIDENCE.sub("", answer_in(text))
    result = result_of(text) if number else None
    formula = formula_of(text) if result is None else result
    value = number_of(formula)
    if value is not None:
        return f"{value[0]}%" if value[1] else str(value[0])
    return normalised_formula(formula).casefold() or None


def numbered(answers: Sequence[str | None]) -> tuple[int | None, ...]:
    """Equal answers as equal numbers, in the order in which they first came; None stays None.

    >>> numbered(["b", None, "a", "b"])
    (0, None, 1, 0)
    """
    seen: dict[str, int] = {}
    return tuple(None if each is None else seen.setdefault(each, len(seen)) for each in answers)
