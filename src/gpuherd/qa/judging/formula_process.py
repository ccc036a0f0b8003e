"""Whether two formulas are equal, by math-verify, in a process of its own with little time and memory.

An answer is a stranger's: ``9^{9^{9^9}}`` keeps a computer-algebra system busy for ever, in places where no signal
handler of Python's runs. So the process has a limit of CPU time for each comparison, which the kernel holds it to (also
when whoever started it is dead), and then the comparison is undecided. Only LaTeX is parsed, by a grammar;
math-verify's parser of plain expressions ends in Python's ``eval``, and is never used.

    $ echo '["x+x", "2x"]' | python -m gpuherd.qa.judging.formula_process
    null
    true
"""

from __future__ import annotations

import json
import math
import re
import select
import subprocess
import sys
from types import TracebackType
from typing import IO, Self

from gpuherd.errors import GpuherdError, naming_extras

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
    """Answers pairs of formulas, a line of JSON each, until nobody asks any more."""
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
