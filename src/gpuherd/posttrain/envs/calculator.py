"""A calculator for expressions that a model wrote: a parser of its own, bounded in depth, length and size. Pure.

No ``eval``: numbers, ``+ - * / // % ** ^``, brackets, constants and the functions in ``FUNCTIONS`` are all there is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

Number = int | float

_LONGEST, _DEEPEST, _MOST_BITS, _MOST_DIGITS = 500, 50, 4096, 1000
_TOKEN = re.compile(
    r"\s*(?:(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)|([A-Za-z_]\w*)|(\*\*|//|[-+*/%^(),]))"
)


class BadExpression(ValueError):
    """An expression has no value; the text says why."""


def _rounded(value: Number, digits: Number = 0) -> Number:
    """Rounded to digits behind the point, before it where below 0. Raises BadExpression for what Python would make a
    number of all these digits for."""
    if not isinstance(digits, int) or abs(digits) > _MOST_DIGITS:
        raise BadExpression(f"round rounds to a whole number of digits, {_MOST_DIGITS} at most")
    return round(value, digits) if digits else round(value)


FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "sqrt": math.sqrt,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
    "exp": math.exp,
    "ln": math.log,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": _rounded,
    "min": min,
    "max": max,
    "gcd": math.gcd,
}
_CONSTANTS: Mapping[str, float] = {"pi": math.pi, "e": math.e, "tau": math.tau}


def calculate(expression: str) -> str:
    """The value of an expression, in as many digits as it needs. Raises BadExpression.

    Whole numbers are exact, up to some 1,200 digits; a division that comes out even stays whole.

    >>> calculate("2*(3+4)^2"), calculate("sqrt(2)"), calculate("7/2"), calculate("-2**2")
    ('98', '1.4142135623730951', '3.5', '-4')
    """
    if len(expression) > _LONGEST:
        raise BadExpression(f"an expression has at most {_LONGEST} characters")
    parser = _Parser(_tokens(expression))
    try:
        value = parser.sum()
        parser.end()
    except ZeroDivisionError:
        raise BadExpression("a division by zero") from None
    except (OverflowError, TypeError) as problem:
        raise BadExpression(str(problem)) from None
    except ValueError as problem:
        raise problem if isinstance(problem, BadExpression) else BadExpression(str(problem)) from None
    if isinstance(value, float) and not math.isfinite(value):
        raise BadExpression("the value is no finite number")
    return str(value)


def _tokens(expression: str) -> list[str]:
    found, place = [], 0
    text = expression.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise BadExpression(f"nothing is known that begins with {text[place : place + 10].strip()!r}")
        found.append(match[0].strip())
        place = match.end()
    return found


class _Parser:
    """Recursive descent: sum, product, sign, power, value; each as usual, powers from the right."""

    def __init__(self, tokens: list[str]):
        self._tokens, self._place, self._depth = tokens, 0, 0

    def sum(self) -> Number:
        value = self._product()
        while (sign := self._one_of("+", "-")) is not None:
            other = self._product()
            value = _bounded(value + other if sign == "+" else value - other)
        return value

    def end(self) -> None:
        if self._place < len(self._tokens):
            raise BadExpression(f"{self._tokens[self._place]!r} stands where the expression should end")

    def _product(self) -> Number:
        value = self._signed()
        while (sign := self._one_of("*", "/", "//", "%")) is not None:
            value = _bounded(_applied(sign, value, self._signed()))
        return value

    def _signed(self) -> Number:
        self._deeper()
        sign = self._one_of("+", "-")
        value = self._power() if sign is None else self._signed()
        self._depth -= 1
        return -value if sign == "-" else value

    def _power(self) -> Number:
        base = self._value()
        if self._one_of("**", "^") is None:
            return base
        return _bounded(_raised(base, self._signed()))

    def _value(self) -> Number:
        token = self._next()
        if token == "(":  # noqa: S105 - a bracket
            value = self.sum()
            self._expect(")")
            return value
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if token in FUNCTIONS:
            self._expect("(")
            arguments = [self.sum()]
            while self._one_of(",") is not None:
                arguments.append(self.sum())
            self._expect(")")
            return _bounded(FUNCTIONS[token](*arguments))
        if token[0].isdigit() or token[0] == ".":
            return int(token) if token.isdigit() else float(token)
        raise BadExpression(f"{token!r} is no number, constant or function")

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise BadExpression(f"brackets and signs go deeper than {_DEEPEST}")

    def _one_of(self, *tokens: str) -> str | None:
        if self._place < len(self._tokens) and self._tokens[self._place] in tokens:
            return self._next()
        return None

    def _expect(self, token: str) -> None:
        if self._one_of(token) is None:
            raise BadExpression(f"{token!r} is missing")

    def _next(self) -> str:
        if self._place == len(self._tokens):
            raise BadExpression("it ends in the middle")
        self._place += 1
        return self._tokens[self._place - 1]


def _applied(sign: str, one: Number, other: Number) -> Number:
    if sign == "*":
        return one * other
    if sign == "//":
        return one // other
    if sign == "%":
        return one % other
    if isinstance(one, int) and isinstance(other, int) and one % other == 0:
        return one // other
    return one / other


def _raised(base: Number, exponent: Number) -> Number:
    """A power. Raises BadExpression where it has too many digits, or is no real number."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        if abs(base) > 1 and exponent * base.bit_length() > _MOST_BITS:
            raise BadExpression("a power has too many digits")
        return int(base**exponent)
    value = float(base) ** exponent
    if isinstance(value, complex):
        raise BadExpression("a power is no real number")
    return float(value)


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise BadExpression("a number has too many digits")
    return value
