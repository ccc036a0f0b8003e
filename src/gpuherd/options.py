"""Options exist once: a field of a dataclass carries its own default, help text and spellings.

The command line (``gpuherd.cli.parsing``) turns such a dataclass into flags, a Python caller passes the same names as
keywords. This module only declares; it knows neither argparse nor YAML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Option:
    """What the command line has to know about a field.

    Attributes:
        help: one sentence; the default is appended by the parser.
        flag: the main spelling without dashes when it differs from the field name (``gpu-mem-threshold``).
        aliases: further spellings without dashes. Underscore forms of every spelling are accepted anyway.
        parse: turns one command-line word into a value; raises ValueError with a sentence.
        choices: the words that are allowed.
        metavar: the word for the value in ``--help``.
        many: takes one word or more (``--gpu-list 0 1 2``), giving a tuple.
        group: the heading under which ``--help`` lists it.
    """

    help: str
    flag: str | None = None
    aliases: Sequence[str] = ()
    parse: Callable[[str], Any] | None = None
    choices: Sequence[str] | None = None
    metavar: str | None = None
    many: bool = False
    group: str = "options"


def option(
    default: Any = MISSING,
    *,
    help: str,  # noqa: A002 - the word that argparse and users use
    flag: str | None = None,
    aliases: Sequence[str] = (),
    parse: Callable[[str], Any] | None = None,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    many: bool = False,
    group: str = "options",
) -> Any:
    """A dataclass field with its command-line spelling. Boolean fields with default False become plain flags."""
    spec = Option(
        help=help,
        flag=flag,
        aliases=aliases,
        parse=parse,
        choices=choices,
        metavar=metavar,
        many=many,
        group=group,
    )
    if default is MISSING:
        return field(metadata={"option": spec})
    return field(default=default, metadata={"option": spec})
