"""Options exist once: a field of a dataclass carries its default, help text and spellings, and becomes a flag.

Every spelling is accepted with dashes and with underscores; only the main one is shown in ``--help``. An unknown flag
is answered with the nearest known one. Knows nothing of any one command.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, NoReturn, TypeVar

from gpuherd.errors import ExitCode, UsageError, one_line

# Options exist once: a field of a dataclass carries its own default, help text and spellings.
#
# ``gpuherd.options`` turns such a dataclass into flags, a Python caller passes the same names as keywords. This
# module only declares; it knows neither argparse nor YAML.

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


# Turns option dataclasses into argparse flags and back, for the commands and for the workers that run by hand.
#
# Every spelling is accepted with dashes and with underscores; only the main one is shown in ``--help``. An unknown
# flag is answered with the nearest known one. Knows nothing of any one command.


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that exits with our usage code and names the nearest flag when one is unknown. With --json its
    errors are JSON too, on standard output.

    Attributes:
        intermixed: flags may stand between the arguments (``key=value --dry-run key=value``).
        words: what is parsed: --json among them makes an error JSON.
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
        self.intermixed = False  # argparse's way for such words calls this method again
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.intermixed = True

    def error(self, message: str) -> NoReturn:
        if self._wants_json():
            sys.stdout.write(json.dumps({"error": one_line(message), "exit_code": int(ExitCode.USAGE)}) + "\n")
            sys.stdout.flush()
        self.exit(ExitCode.USAGE, f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")

    def _wants_json(self) -> bool:
        """Whether --json is among our own words, and asks for JSON on standard output, as everywhere but in workers."""
        own = list(itertools.takewhile(lambda word: word != "--", self.words))
        action = self._option_string_actions.get("--json")
        return "--json" in own and (action is None or action.nargs == 0)

    def reject_unknown(self, words: Iterable[str]) -> None:
        """Exits with the nearest known flag for the first unknown word, if there is one."""
        for word in words:
            flag = word.split("=", 1)[0]
            import difflib  # slow to import, and seldom needed

            known = [spelling for spelling in self._option_string_actions if "_" not in spelling]
            nearest = difflib.get_close_matches(flag.replace("_", "-"), known, n=1)
            self.error(f"unknown argument {word!r}" + (f"; did you mean {nearest[0]}?" if nearest else ""))


def option_fields(config_type: type) -> list[tuple[Field[Any], Option]]:
    """The fields of a dataclass that are options, with their declarations, in order."""
    return [(f, f.metadata["option"]) for f in fields(config_type) if "option" in f.metadata]


def spellings(name: str, spec: Option) -> tuple[list[str], list[str]]:
    """The flags shown in ``--help`` and those accepted silently (aliases and underscore forms)."""
    shown = "--" + (spec.flag or name.replace("_", "-"))
    quiet: list[str] = []
    for alias in (shown[2:], name, *spec.aliases):
        for form in ("--" + alias, "--" + alias.replace("-", "_"), "--" + alias.replace("_", "-")):
            if form != shown and form not in quiet:
                quiet.append(form)
    return [shown], quiet


def add_options(parser: argparse.ArgumentParser, config_type: type, only: Collection[str] | None = None) -> None:
    """Adds one flag for each option field of the dataclass, or for those named in ``only``. Absent flags leave no trace
    in the namespace.
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
            common |= {"type": _parse_with(spec), "metavar": spec.metavar or declared.name.upper()}
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


def _parse_with(spec: Option) -> Any:
    parse = spec.parse
    if parse is None:
        return str

    def checked(word: str) -> Any:
        try:
            return parse(word)
        except (ValueError, UsageError) as problem:
            raise argparse.ArgumentTypeError(str(problem)) from None

    return checked


def _help(declared: Field[Any], spec: Option) -> str:
    text = spec.help.replace("%", "%%")
    if declared.default in (MISSING, None, False, ()):
        return text
    return f"{text} (default: {declared.default})"


def build(config_type: type[ConfigT], args: argparse.Namespace) -> ConfigT:
    """The dataclass with what was given on the command line; its own ``__post_init__`` validates.

    Raises UsageError when an option without a default was not given.
    """
    given: dict[str, Any] = {}
    for declared, spec in option_fields(config_type):
        if hasattr(args, declared.name):
            value = getattr(args, declared.name)
            given[declared.name] = tuple(value) if spec.many else value
        elif declared.default is MISSING and declared.default_factory is MISSING:
            raise UsageError(f"{spellings(declared.name, spec)[0][0]} is missing")
    return config_type(**given)


def words_of(values: Any, config_type: type) -> list[str]:
    """The words that give a command these options: what ``build`` reads back as equal. Floats keep every digit.

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
