"""Options exist once: a field of a dataclass carries its own default, help text and spellings.

``gpuherd.flags`` turns such a dataclass into flags, a Python caller passes the same names as
keywords. This module only declares; it knows neither argparse nor YAML.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

ConfigT = TypeVar("ConfigT")


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
        alone: the word that is meant where the flag stands without one (``--lora``, ``--lora 8``).
        yes_or_no: True by ``--name``, False by ``--no-name``, and the default where neither is given.
        group: the heading under which ``--help`` lists it.
    """

    help: str
    flag: str | None = None
    aliases: Sequence[str] = ()
    parse: Callable[[str], Any] | None = None
    choices: Sequence[str] | None = None
    metavar: str | None = None
    many: bool = False
    alone: str | None = None
    yes_or_no: bool = False
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
    alone: str | None = None,
    yes_or_no: bool = False,
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
        alone=alone,
        yes_or_no=yes_or_no,
        group=group,
    )
    if default is MISSING:
        return field(metadata={"option": spec})
    return field(default=default, metadata={"option": spec})


def accepts_aliases(config_type: type[ConfigT]) -> type[ConfigT]:
    """Class decorator for an option dataclass: its constructor then takes every alias as a keyword too.

    ``ExperimentConfig(num_gpus_per_job=2)`` is ``ExperimentConfig(gpus_per_job=2)``. Naming one option twice is a
    TypeError, as for any keyword.
    """
    names: dict[str, str] = {}
    for declared in fields(config_type):  # type: ignore[arg-type]
        spec = declared.metadata.get("option")
        if spec is not None:
            for alias in (spec.flag, *spec.aliases):
                if alias is not None:
                    names[alias.replace("-", "_")] = declared.name
    plain_init = config_type.__init__

    @functools.wraps(plain_init)
    def init(self: ConfigT, **given: Any) -> None:
        for alias in given.keys() & names.keys():
            if names[alias] == alias:
                continue
            if names[alias] in given:
                raise TypeError(f"{alias} and {names[alias]} are the same option; give one of them")
            given[names[alias]] = given.pop(alias)
        plain_init(self, **given)

    config_type.__init__ = init  # type: ignore[method-assign,assignment]
    return config_type
