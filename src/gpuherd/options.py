"""The one option system: a dataclass field declares an option once, for every place where people write it.

The declaration (``Option``) is the argparse flag, the key in TOML and YAML, the word in a job file, and what
``gpuherd set`` may change. ``parse`` reads a word of any of these, ``parse_value`` a value that TOML or YAML has typed,
``did_you_mean`` ends every message about an unknown name. Knows no single command.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any, NamedTuple, NoReturn, TypeVar

from gpuherd.errors import ExitCode, UsageError, one_line

ConfigT = TypeVar("ConfigT")


class Option(NamedTuple):
    """How people write the value of a field.

    Attributes:
        help: one sentence; the parser appends the default.
        name: what people call the option, where that isn't the field's name (``mem`` for ``memory_mb``).
        key: its name in job files, where that isn't ``name``.
        flag: the main spelling on the command line, without dashes, where it isn't the name (``gpu-mem-threshold``).
        aliases: further spellings without dashes. Every spelling also has an underscore form.
        parse: turns one word into a value; raises ValueError with a sentence.
        choices: the allowed words.
        metavar: the name of the value in ``--help``.
        many: takes one or more words (``--gpu-list 0 1 2``); the value is a tuple.
        alone: the word that the bare flag stands for (``--lora`` for ``--lora 8``).
        yes_or_no: True by ``--name``, False by ``--no-name``, the default without either.
        group: the heading under which ``--help`` lists it.
        settable: ``gpuherd set`` may change it while a run goes on.
        unset: words with which ``gpuherd set`` restores the default (``all``, ``none``).
        is_switch: the value is True or False.
    """

    help: str
    name: str | None = None
    key: str | None = None
    flag: str | None = None
    aliases: Sequence[str] = ()
    parse: Callable[[str], Any] | None = None
    choices: Sequence[str] | None = None
    metavar: str | None = None
    many: bool = False
    alone: str | None = None
    yes_or_no: bool = False
    group: str = "options"
    settable: bool = False
    unset: Sequence[str] = ()
    is_switch: bool = False


def option(default: Any = MISSING, **declared: Any) -> Any:
    """A dataclass field that is an option, declared as ``Option`` says; a default of False makes it a plain flag."""
    spec = Option(is_switch=default is False or declared.get("yes_or_no", False), **declared)
    if default is MISSING:
        return field(metadata={"option": spec})
    return field(default=default, metadata={"option": spec})


def same_option(config_type: type, name: str) -> Any:
    """An option of another dataclass as a field of this one: the same spelling, parser and help, and the same default,
    or None where it has none."""
    known = next(each for each in fields(config_type) if each.name == name)
    return field(default=None if known.default is MISSING else known.default, metadata=known.metadata)


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


# --- words and values ---------------------------------------------------------------------------------------------

_YES_NO = {"yes": True, "true": True, "on": True, "1": True, "no": False, "false": False, "off": False, "0": False}


def yes_no(word: str) -> bool:
    """The only table of words for True and False. Raises ValueError with a sentence."""
    if word.lower() not in _YES_NO:
        raise ValueError(f"{word!r} is neither on nor off; write yes or no")
    return _YES_NO[word.lower()]


def parse(spec: Option, word: str) -> Any:
    """The value that one word gives an option: flag, job file, ``gpuherd set``. Raises ValueError with a sentence.

    >>> parse(Option(help="", choices=("age", "longest")), "age"), parse(Option(help="", parse=int, many=True), "3")
    ('age', (3,))
    """
    value = _parse_one(spec, word)
    return (value,) if spec.many else value


class WrongType(ValueError):
    """A typed file gives a value of another type than the option has; the message begins with the value."""


def parse_value(spec: Option, value: Any) -> Any:
    """The value of an option that a file gives typed (TOML, YAML, JSON).

    Raises WrongType for a value of another type, ValueError for a wrong value, each with a sentence.

    A switch takes true or false, an option of many words a list or a single value.

    >>> parse_value(Option(help="", parse=int), 3), parse_value(Option(help="", is_switch=True), True)
    (3, True)
    """
    if spec.is_switch:
        if not isinstance(value, bool) and value not in ("true", "false"):
            raise WrongType(f"{value!r} should be true or false")
        return value in (True, "true")
    values = value if spec.many and isinstance(value, list) else [value]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            raise WrongType(f"{each!r} should be a number or a text in quotes")
    found = tuple(_parse_one(spec, str(each)) for each in values)
    return found if spec.many else found[0]


def _parse_one(spec: Option, word: str) -> Any:
    if spec.is_switch:
        return yes_no(word)
    try:
        value = word if spec.parse is None else spec.parse(word)
    except UsageError as problem:
        raise ValueError(str(problem)) from None
    # After the parser, which may take other words for a choice (4bit for nf4).
    if spec.choices is not None and value not in spec.choices:
        near = nearest(word, spec.choices)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{word!r} is not possible; possible: {', '.join(spec.choices)}{hint}")
    return value


def nearest(word: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Up to ``most`` of the known names that are most like the word, best first.

    >>> nearest("lerning_rate", ["seed", "learning_rate"])
    ['learning_rate']
    """
    import difflib  # slow to import, and seldom needed

    return difflib.get_close_matches(word, list(known), most, cutoff)


def did_you_mean(
    word: str,
    known: Iterable[str],
    otherwise: str = "",
    *,
    most: int = 1,
    cutoff: float = 0.6,
    show: Callable[[str], str] = str,
) -> str:
    """The end of a message about an unknown word: the nearest known names, or ``otherwise``; empty without either.

    >>> did_you_mean("oder", ["order", "share"]), did_you_mean("x", ["order"], "possible: order")
    ('; did you mean order?', '; possible: order')
    """
    near = nearest(word, known, most, cutoff)
    if near:
        return f"; did you mean {' or '.join(map(show, near))}?"
    return f"; {otherwise}" if otherwise else ""


def by_spelling(config_type: type, only: Collection[str] | None = None) -> Mapping[str, tuple[Field[Any], Option]]:
    """Fields and their options by every spelling, written with underscores; ``only``: of these fields.

    Look a person's word up as ``word.replace("-", "_")``.
    """
    found: dict[str, tuple[Field[Any], Option]] = {}
    for declared, spec in option_fields(config_type):
        if only is None or declared.name in only:
            for spelling in (spec.name or declared.name, spec.flag, spec.key, *spec.aliases):
                if spelling is not None:
                    found[spelling.replace("-", "_")] = (declared, spec)
    return found


# --- flags --------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that exits with our usage code and names the nearest flag when one is unknown.

    With --json it prints errors as JSON on standard output, too.

    Attributes:
        intermixed: flags may stand between the arguments (``key=value --dry-run key=value``).
        words: the command line; --json in it makes an error JSON.
    """

    intermixed = False

    def __init__(self, **kwargs: Any) -> None:
        self.words: list[str] = []
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.words = list(sys.argv[1:] if args is None else args)
        if not self.intermixed:
            return super().parse_known_args(args, namespace)
        self.intermixed = False  # argparse calls this method again from parse_known_intermixed_args
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.intermixed = True

    def error(self, message: str) -> NoReturn:
        if self._wants_json():
            import json

            sys.stdout.write(json.dumps({"error": one_line(message), "exit_code": int(ExitCode.USAGE)}) + "\n")
            sys.stdout.flush()
        self.exit(ExitCode.USAGE, f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")

    def _wants_json(self) -> bool:
        """Whether our own words hold --json, and it is the flag for JSON output (a worker's --json takes a value)."""
        own = list(itertools.takewhile(lambda word: word != "--", self.words))
        action = self._option_string_actions.get("--json")
        return "--json" in own and (action is None or action.nargs == 0)

    def reject_unknown(self, words: Iterable[str]) -> None:
        """Exits with an error about the first of these words, which names the nearest flag; returns without any."""
        for word in words:
            flag = word.split("=", 1)[0].replace("_", "-")
            known = [spelling for spelling in self._option_string_actions if "_" not in spelling]
            self.error(f"unknown argument {word!r}{did_you_mean(flag, known)}")


def option_fields(config_type: type) -> list[tuple[Field[Any], Option]]:
    """The fields of a dataclass that are options, with their declarations, in order."""
    return [(f, f.metadata["option"]) for f in fields(config_type) if "option" in f.metadata]


def spellings(name: str, spec: Option) -> tuple[list[str], list[str]]:
    """The flag that ``--help`` shows, and those that are accepted without being shown (aliases, underscore forms)."""
    name = spec.name or name
    shown = "--" + (spec.flag or name.replace("_", "-"))
    quiet: list[str] = []
    for alias in (shown[2:], name, *spec.aliases):
        for form in ("--" + alias, "--" + alias.replace("-", "_"), "--" + alias.replace("_", "-")):
            if form != shown and form not in quiet:
                quiet.append(form)
    return [shown], quiet


def add_options(parser: argparse.ArgumentParser, config_type: type, only: Collection[str] | None = None) -> None:
    """Adds one flag for each option field of the dataclass, or for those named in ``only``.

    A flag that is not given sets nothing in the namespace.
    """
    groups: dict[str, Any] = {}
    for declared, spec in option_fields(config_type):
        if only is not None and declared.name not in only:
            continue
        if spec.group not in groups:
            groups[spec.group] = parser if spec.group == "options" else parser.add_argument_group(spec.group)
        group = groups[spec.group]
        shown, quiet = spellings(declared.name, spec)
        common: dict[str, Any] = {"dest": declared.name, "default": argparse.SUPPRESS}
        if declared.default is False:
            common["action"] = "store_true"
        elif spec.yes_or_no:
            common["action"] = argparse.BooleanOptionalAction
        else:
            common |= {"type": _argparse_type(spec), "metavar": spec.metavar or declared.name.upper()}
            if spec.choices is not None:
                common |= {"choices": tuple(spec.choices)}
                common["metavar"] = spec.metavar or "|".join(spec.choices)
            if spec.many:
                common["nargs"] = "+"
            elif spec.alone is not None:
                common |= {"nargs": "?", "const": common["type"](spec.alone)}
        group.add_argument(*shown, help=_help(declared, spec), **common)
        if quiet:
            group.add_argument(*quiet, help=argparse.SUPPRESS, **common)


def _argparse_type(spec: Option) -> Callable[[str], Any]:
    """One word's parser for argparse, which itself checks the choices."""
    if spec.parse is None:
        return str

    def checked(word: str) -> Any:
        try:
            return _parse_one(spec, word)
        except ValueError as problem:
            raise argparse.ArgumentTypeError(str(problem)) from None

    return checked


def _help(declared: Field[Any], spec: Option) -> str:
    text = spec.help.replace("%", "%%")
    if declared.default in (MISSING, None, False, ()):
        return text
    return f"{text} (default: {declared.default})"


def build(config_type: type[ConfigT], args: argparse.Namespace) -> ConfigT:
    """The dataclass with the values from the command line; its own ``__post_init__`` validates.

    Raises UsageError when an option without a default is missing.
    """
    values = given(config_type, args)
    for declared, spec in option_fields(config_type):
        if declared.name not in values and declared.default is MISSING and declared.default_factory is MISSING:
            raise UsageError(f"{spellings(declared.name, spec)[0][0]} is missing")
    return config_type(**values)


def given(config_type: type, args: argparse.Namespace) -> dict[str, Any]:
    """The options of the dataclass that the command line gives, by field name."""
    return {
        declared.name: tuple(value) if spec.many else value
        for declared, spec in option_fields(config_type)
        if (value := getattr(args, declared.name, MISSING)) is not MISSING
    }


def words_of(values: Any, config_type: type) -> list[str]:
    """The words that give a command these options: ``build`` reads back an equal object. Floats keep all digits.

    Args:
        values: an object that has the options of ``config_type`` as attributes.
    """
    words: list[str] = []
    for declared, spec in option_fields(config_type):
        value, flag = getattr(values, declared.name), spellings(declared.name, spec)[0][0]
        if declared.default is False:
            words += [flag] if value else []
        elif spec.yes_or_no:
            words += [] if value is None else [flag if value else f"--no-{flag[2:]}"]
        elif spec.many:
            words += [flag, *value] if value else []
        elif value is not None:
            words.append(f"{flag}={value!r}" if isinstance(value, float) else f"{flag}={value}")
    return words
