r"""The judge of numbers and formulas: finds the answer's result and compares it, not its words.

The result is, in this order: what stands behind the last ``####``; what is in the last ``\boxed{}``; the number that
follows the last "answer is" or "answer:", behind the equals signs of a sum that stands there; the last number. Numbers
are compared exactly, as fractions (``qa.numbers``); formulas (``formula_process``) by math-verify.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from gpuherd.qa.judging.rules import Ruling, attempts_nothing, normalised
from gpuherd.qa.judging.verdicts import Verdict
from gpuherd.qa.numbers import number_of, numbers_in, same_number
from gpuherd.qa.record import Question

# Whether two formulas are equal; None: it could not be decided.
Equivalence = Callable[[str, str], bool | None]

_CALCULATION = re.compile(r"(?:(?:[\d\s$€£¥%*/x×÷·^+−–-]|[.,](?=\d))+=)+")
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_SAID = re.compile(r"\banswer(?:\s+(?:is|was|equals)\b|\s*[:=])[ \t]*(?:\n[ \t]*)?([^\n]*)", re.IGNORECASE)
_DOLLARS = re.compile(r"\$([^$\n]+)\$")
_BOX = re.compile(r"\\f?boxed\s*\{")
_BRACE = re.compile(r"[{}]")
_MATHEMATICAL = re.compile(r"[\\^_=+*/<>|\d]|^[A-Za-z]$")


def math_judge(answer: str, question: Question, equal: Equivalence) -> Ruling:
    """Whether the answer's result is that of a reference.

    A reference that is neither number nor formula is compared by its words. Unparsed where a formula could not be
    compared and no other reference fits.
    """
    if attempts_nothing(answer, question):
        return Ruling(Verdict.NOT_ATTEMPTED)
    references = [_marked(reference) or reference.strip() for reference in question.answers]
    undecided = False
    for reference in sorted(references, key=lambda each: number_of(each) is None):  # formulas may take long
        same = _same(answer, reference, equal)
        if same:
            return Ruling(Verdict.CORRECT)
        undecided = undecided or same is None
    if undecided:
        return Ruling(Verdict.UNPARSED, None, "the formulas could not be compared: not LaTeX, too long, or out of time")
    return Ruling(Verdict.INCORRECT)


def result_of(text: str) -> str | None:
    """The number, or marked formula, that a text ends with, as it is written there; None where it has none.

    >>> result_of("2 + 2 = 4, so the answer is $1,200.50. Or 7?"), result_of("no idea")
    ('$1,200.50', None)
    """
    marked = _marked(text)
    if marked is not None:
        return marked
    for said in reversed(_SAID.findall(text)):
        calculation = _CALCULATION.match(said)
        first = next(numbers_in(said, calculation.end() if calculation else 0), None)
        if first is not None:
            return first[0]
    numbers = [found[0] for found in numbers_in(text)]
    return numbers[-1] if numbers else None


def formula_of(text: str) -> str:
    """The formula that a text ends with: what is marked as the result, else said to be it, else the last ``$...$``,
    else all of it."""
    marked = _marked(text)
    if marked is not None:
        return marked
    said = [each for each in _SAID.findall(text) if each.strip()]
    last = said[-1] if said else text
    between = _DOLLARS.findall(last)
    return str(between[-1] if between else last).strip().rstrip(".").strip()


def same_results(texts: Sequence[str]) -> Callable[[int, int], bool]:
    """Whether two of these texts have one result, by their places: numbers by value, formulas as they are written,
    texts without a result by their words."""
    results = [result_of(text) for text in texts]
    numbers = [None if result is None else number_of(result) for result in results]
    written = [
        (False, normalised(text)) if result is None else (True, normalised_formula(result))
        for text, result in zip(texts, results, strict=True)
    ]

    def same(one: int, other: int) -> bool:
        first, second = numbers[one], numbers[other]
        if first is not None and second is not None:
            return same_number(first, second)
        return written[one] == written[other]

    return same


def _same(answer: str, reference: str, equal: Equivalence) -> bool | None:
    wanted = number_of(reference)
    if wanted is None and _MATHEMATICAL.search(reference) is None:
        return normalised(reference) in (normalised(answer), normalised(formula_of(answer)))
    own = formula_of(answer) if wanted is None else result_of(answer)
    if own is None:
        return False
    got = number_of(own)
    if wanted is not None and got is not None:
        return same_number(wanted, got)
    if normalised_formula(own) == normalised_formula(reference):
        return True
    return equal(reference.strip("$"), own.strip("$")) if _MATHEMATICAL.search(own) is not None else False


def _marked(text: str) -> str | None:
    r"""What stands behind the last ``####``, else in the last ``\boxed{}``; None where nothing does."""
    hashes = _HASHES.findall(text)
    return _number_or_all(hashes[-1]) if hashes and hashes[-1].strip() else _last_box(text)


def normalised_formula(text: str) -> str:
    """A formula without white space, dollar signs around it and the dot behind it."""
    return "".join(text.strip().rstrip(".").strip("$").split())


def _number_or_all(text: str) -> str:
    """The only number of a text, or all of it."""
    found = list(numbers_in(text))
    return found[0][0] if len(found) == 1 else text.strip()


def _last_box(text: str) -> str | None:
    r"""What is in the last ``\boxed{}`` whose braces close."""
    opened: list[int] = []
    closed: dict[int, int] = {}
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closed[opened.pop()] = brace.start()
    boxes = [box.end() for box in _BOX.finditer(text) if box.end() - 1 in closed]
    return text[boxes[-1] : closed[boxes[-1] - 1]].strip() or None if boxes else None
