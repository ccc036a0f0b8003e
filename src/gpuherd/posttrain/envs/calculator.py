"""A calculator for expressions that a model wrote, bounded in depth, length and size. Pure.

No ``eval``: numbers, ``+ - * / // % ** ^``, brackets, constants and the functions in ``FUNCTIONS`` are all there is.
Other tokens never reach Python's parser, and other nodes of its tree have no value.
"""

from __future__ import annotations

import ast
import math
import operator
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
    try:
        value = _value(ast.parse(" ".join(_tokens(expression)), mode="eval").body)
    except SyntaxError as problem:
        raise BadExpression(f"it is no expression: {problem.msg}") from None
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
    """The expression as tokens of Python's grammar. Raises BadExpression for others, and where they nest too deeply."""
    found: list[str] = []
    place = depth = signs = 0
    text = expression.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise BadExpression(f"nothing is known that begins with {text[place : place + 10].strip()!r}")
        token = match[0].strip()
        place = match.end()
        depth += (token == "(") - (token == ")")  # noqa: S105 - a bracket
        signs = signs + 1 if token in ("+", "-") else 0
        if depth + signs > _DEEPEST:
            raise BadExpression(f"brackets and signs go deeper than {_DEEPEST}")
        found.append("**" if token == "^" else str(int(token)) if token.isdigit() else token)  # noqa: S105
    if depth > 0:
        raise BadExpression("')' is missing")
    return found


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=number) if type(number) in (int, float):
            return number  # type: ignore[return-value]
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=inner):
            value = _value(inner)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _bounded(_OPERATIONS[type(operation)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as arguments, keywords=[]) if name in FUNCTIONS:
            return _bounded(FUNCTIONS[name](*map(_value, arguments)))
    raise BadExpression(f"{ast.unparse(node)!r} is no number, constant or function")


def _divided(one: Number, other: Number) -> Number:
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


_OPERATIONS: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divided,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _raised,
}
