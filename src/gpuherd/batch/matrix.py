"""A matrix of values and the combinations that it stands for; placeholders like ``{lr}`` in words. Pure.

A value goes into a word as it is, after the command was split into words: it is never split or read by a shell.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from gpuherd.jobs.rundir import safe_name

Combination = Mapping[str, str]

KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][A-Za-z0-9_]*)\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}", re.ASCII)
# What a shell reads as plain letters: a value of other signs in a line for a shell would be read as a part of it.
_PLAIN = re.compile(r"[A-Za-z0-9._+=@:,/%-]*", re.ASCII)


def size(axes: Mapping[str, Sequence[str]]) -> int:
    """How many combinations there are, without making them."""
    return math.prod(len(values) for values in axes.values())


def combinations(
    axes: Mapping[str, Sequence[str]], include: Sequence[Combination], exclude: Sequence[Combination]
) -> Iterator[Combination]:
    """Every combination, the last axis fastest, without those that an entry of ``exclude`` is a part of; then the
    entries of ``include``, those that came already left out.

    >>> [c["lr"] + c["seed"] for c in combinations({"lr": ["a", "b"], "seed": ["1", "2"]}, [], [{"seed": "2"}])]
    ['a1', 'b1']
    """
    made = set()
    for values in product(*axes.values()) if axes else ():
        found = dict(zip(axes, values, strict=True))
        if not any(part.items() <= found.items() for part in exclude):
            made.add(frozenset(found.items()))
            yield found
    for extra in include:
        if frozenset(extra.items()) not in made:
            made.add(frozenset(extra.items()))
            yield {key: extra[key] for key in axes} if axes else extra


def filled(text: str, values: Combination, *, for_shell: bool = False) -> str:
    """The text with each ``{key}`` replaced; ``{{key}}`` is ``{key}`` itself. All other braces are mere letters.

    Raises ValueError for a key that is not there, with the nearest, and with ``for_shell`` for a value that a shell
    would not take as one plain word.

    >>> filled("--lr={lr} {{x}}", {"lr": "0.1"})
    '--lr=0.1 {x}'
    """

    def value(found: re.Match[str]) -> str:
        if found[1] is not None:
            return f"{{{found[1]}}}"
        key = found[2]
        if key not in values:
            nearest = difflib.get_close_matches(key, values, n=1)
            hint = f"did you mean {{{nearest[0]}}}?" if nearest else f"write {{{{{key}}}}} for the word itself"
            raise ValueError(f"{{{key}}} is no key of the matrix; {hint}")
        if for_shell and not _PLAIN.fullmatch(values[key]):
            raise ValueError(
                f"the value {values[key]!r} of {key} can't be put into a line for a shell; give command as a list"
            )
        return values[key]

    return _PLACEHOLDER.sub(value, text)


def has_placeholder(text: str) -> bool:
    """Whether the text has a place to fill."""
    return any(found[2] is not None for found in _PLACEHOLDER.finditer(text))


def name_part(values: Combination) -> str:
    """What tells the jobs of a matrix apart in their names.

    >>> name_part({"lr": "0.1", "seed": "2"})
    'lr0.1-seed2'
    """
    return "-".join(key + (safe_name(value) if value else "") for key, value in values.items())
