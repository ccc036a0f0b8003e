"""The judge of numbers and formulas: finds the answer's result and compares it, not its words.

The result is, in this order: what stands behind the last ``####``; what is in the last ``\boxed{}``; the number that
follows the last "answer is" or "answer:", behind the equals signs of a sum that stands there; the last number. Numbers
are compared exactly, as fractions (``qa.numbers``); formulas (``formula_process``) by math-verify.
"""

from __future__ import annotations

import json
import math
import re
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO, Self

from gpuherd.errors import GpuherdError, naming_extras
from gpuherd.qa.grading.rules import attempts_nothing, normalised
from gpuherd.qa.grading.verdicts import Ruling, Verdict
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
    expected = number_of(reference)
    if expected is None and _MATHEMATICAL.search(reference) is None:
        return normalised(reference) in (normalised(answer), normalised(formula_of(answer)))
    own = formula_of(answer) if expected is None else result_of(answer)
    if own is None:
        return False
    given = number_of(own)
    if expected is not None and given is not None:
        return same_number(expected, given)
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


# Whether two formulas are equal, by math-verify, in a process of its own with little time and memory.
#
# An answer is a stranger's: ``9^{9^{9^9}}`` keeps a computer-algebra system busy for ever, in places where no signal
# handler of Python's runs. So the process has a limit of CPU time for each comparison, which the kernel holds it to
# (also when whoever started it is dead), and then the comparison is undecided. Only LaTeX is parsed, by a grammar;
# math-verify's parser of plain expressions ends in Python's ``eval``, and is never used.
#
#     $ echo '["x+x", "2x"]' | python -m gpuherd.qa.grading.formulas
#     null
#     true

_CPU_SECONDS = 2  # for a comparison
_PATIENCE = 12  # so many times as long is waited on a busy machine
_STARTING_SECONDS = 300.0  # for the imports
_MEMORY = 2 << 30  # bytes of address space
_LONGEST = 2000  # characters of a formula
_MOST_DIGITS = 100_000  # of a number that a formula comes to
_POWER = re.compile(r"(?<![\d.])(\d+)\s*\^\s*(?:\{\s*-?\s*(\d+)\s*\}|(\d))")
_FACTORIAL = re.compile(r"(\d+)\s*!")
_PLAIN_FACTORIAL = re.compile(r"(\d+)\s*!(?!\s*!)")  # no double one
_BRACKETS = re.compile(r"(?:\\left)?\(\s*(\d+)\s*(?:\\right)?\)|\{\s*\{\s*(\d+)\s*\}\s*\}")


class FormulaProcess:
    """Compares formulas; the process starts when it is first needed. A context manager that ends it."""

    def __init__(self, cpu_seconds: int = _CPU_SECONDS):
        self._cpu_seconds = cpu_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def equal(self, reference: str, answer: str) -> bool | None:
        """Whether two formulas, in LaTeX without dollar signs, are equal; None where that wasn't found out.

        Raises MissingExtra where math-verify is not installed, GpuherdError where the process does not start.
        """
        if any(len(each) > _LONGEST or astronomical(each) for each in (reference, answer)):
            return None
        process = self._started()
        try:
            _pipe(process.stdin).write(json.dumps([reference, answer]).encode() + b"\n")
            found: bool | None = json.loads(_line(process, self._cpu_seconds * _PATIENCE))
        except (BrokenPipeError, TimeoutError, ValueError):  # it took too long or too much, or crashed in a library
            self.close()
            return None
        return found

    def close(self) -> None:
        """Ends the process, however busy it is."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            _look_for_library()
            # -P: no file of the folder that somebody works in is taken for a library
            command = [sys.executable, "-P", "-m", __spec__.name, str(self._cpu_seconds)]
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
            try:
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, bufsize=0)
            except OSError as problem:
                raise GpuherdError(f"the process that compares formulas can't be started: {problem}") from None
            try:
                ready = _line(self._process, _STARTING_SECONDS)
            except TimeoutError:
                ready = b""
            if not ready:
                self.close()
                raise GpuherdError(
                    f"the process that compares formulas does not start; {sys.executable} -m {__spec__.name} tells why"
                )
        return self._process


def astronomical(formula: str) -> bool:
    r"""Whether a power or factorial of plain numbers in a formula has more digits than can be worked with.

    A computer-algebra system writes it out before it compares anything. What this misses ends with its time.

    >>> astronomical("10^{10^{10}}"), astronomical("2^{2^{3}}"), astronomical("x^{10^{10}}"), astronomical("10000000!")
    (True, False, False, True)
    """
    before = ""
    while before != formula:  # from the inside out
        before = formula
        formula = _BRACKETS.sub(lambda found: found[1] or f"{{{found[2]}}}", formula)
        for power in _POWER.finditer(formula):
            if _digits(power) > _MOST_DIGITS:
                return True
        # A factorial has fewer digits than its number times theirs.
        if any(int(each[1]) * len(each[1]) > _MOST_DIGITS for each in _FACTORIAL.finditer(formula)):
            return True
        formula = _PLAIN_FACTORIAL.sub(_factorial, _POWER.sub(_power, formula))
    return False


def _digits(power: re.Match[str]) -> float:
    """How many digits a power has, about."""
    base, exponent = int(power[1]), power[2] or power[3]
    each = math.log10(base) if base > 1 else 0.0
    return each and each * (float(exponent) if len(exponent) < 100 else math.inf)


def _power(power: re.Match[str]) -> str:
    """A power as a number; in place of a long one another that is too large for an exponent, too."""
    if _digits(power) > len(str(_MOST_DIGITS)):
        return str(10 * _MOST_DIGITS)
    base, exponent = int(power[1]), int(power[2] or power[3])
    return str(base ** (exponent if base > 1 else min(exponent, 1)))


def _factorial(factorial: re.Match[str]) -> str:
    """A factorial as a number; in place of a long one another that is too large for an exponent, too."""
    number = int(factorial[1])
    return str(math.factorial(number) if number < 10 else 10 * _MOST_DIGITS)


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The next line that the process says. Raises TimeoutError; empty where it has ended."""
    pipe = _pipe(process.stdout)
    if not select.select([pipe], [], [], seconds)[0]:
        raise TimeoutError
    return pipe.readline()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise ValueError("the process was started without pipes")
    return pipe


def _look_for_library() -> None:
    import importlib.util

    with naming_extras({"math_verify": "qa"}, "the judge of formulas compares them with"):
        if importlib.util.find_spec("math_verify") is None:
            raise ModuleNotFoundError(name="math_verify")


# ---- the process -----------------------------------------------------------------------------------------------------


def main(cpu_seconds: int) -> None:
    """Answers pairs of formulas, a line of JSON each, until standard input ends."""
    import logging
    import resource

    logging.disable(logging.CRITICAL)
    import math_verify  # noqa: F401 - slow: now, and not within the first comparison

    _limit(resource.RLIMIT_AS, _MEMORY)
    _say(None)
    for line in sys.stdin.buffer:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + cpu_seconds)
        _say(_equal(*json.loads(line)))


def _limit(what: int, most: int) -> None:
    """Sets a soft limit; the hard one, which an administrator or ulimit may have set lower, stays and is kept to."""
    import resource

    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _equal(reference: str, answer: str) -> bool | None:
    from math_verify import LatexExtractionConfig, parse, verify

    latex = (LatexExtractionConfig(),)
    try:
        gold, own = (parse(f"$\\boxed{{{text}}}$", latex, parsing_timeout=None) for text in (reference, answer))
        return bool(own and verify(gold, own, timeout_seconds=None)) if gold else None
    except (Exception, RecursionError):  # whatever a computer-algebra system says of a stranger's formula
        return None


def _say(found: bool | None) -> None:
    sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else _CPU_SECONDS)
