"""Turns option dataclasses into argparse flags and back, for the commands and for the workers that run by hand.

Every spelling is accepted with dashes and with underscores; only the main one is shown in ``--help``. An unknown flag
is answered with the nearest known one. Knows nothing of any one command.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Collection, Iterable
from dataclasses import MISSING, Field, fields
from typing import Any, NoReturn, TypeVar

from gpuherd.errors import ExitCode, UsageError, one_line
from gpuherd.options import Option

ConfigT = TypeVar("ConfigT")


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
    for field, spec in option_fields(config_type):
        if only is not None and field.name not in only:
            continue
        if spec.group not in groups:
            groups[spec.group] = parser if spec.group == "options" else parser.add_argument_group(spec.group)
        group = groups[spec.group]
        shown, quiet = spellings(field.name, spec)
        common: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        if field.default is False:
            common["action"] = "store_true"
        elif spec.yes_or_no:
            common["action"] = argparse.BooleanOptionalAction
        else:
            common |= {"type": _parse_with(spec), "metavar": spec.metavar or field.name.upper()}
            if spec.choices is not None:
                common |= {"choices": tuple(spec.choices)}
                common["metavar"] = spec.metavar or "|".join(spec.choices)
            if spec.many:
                common["nargs"] = "+"
            elif spec.alone is not None:
                common |= {"nargs": "?", "const": common["type"](spec.alone)}
        group.add_argument(*shown, help=_help(field, spec), **common)
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


def _help(field: Field[Any], spec: Option) -> str:
    text = spec.help.replace("%", "%%")
    if field.default in (MISSING, None, False, ()):
        return text
    return f"{text} (default: {field.default})"


def build(config_type: type[ConfigT], args: argparse.Namespace) -> ConfigT:
    """The dataclass with what was given on the command line; its own ``__post_init__`` validates.

    Raises UsageError when an option without a default was not given.
    """
    given: dict[str, Any] = {}
    for field, spec in option_fields(config_type):
        if hasattr(args, field.name):
            value = getattr(args, field.name)
            given[field.name] = tuple(value) if spec.many else value
        elif field.default is MISSING and field.default_factory is MISSING:
            raise UsageError(f"{spellings(field.name, spec)[0][0]} is missing")
    return config_type(**given)


def words_of(values: Any, config_type: type) -> list[str]:
    """The words that give a command these options: what ``build`` reads back as equal. Floats keep every digit.

    Args:
        values: an object that has the options of ``config_type`` as attributes.
    """
    words: list[str] = []
    for field, spec in option_fields(config_type):
        value, flag = getattr(values, field.name), spellings(field.name, spec)[0][0]
        if field.default is False:
            words += [flag] if value else []
        elif spec.yes_or_no:
            words += [] if value is None else [flag if value else f"--no-{flag[2:]}"]
        elif spec.many:
            words += [flag, *value] if value else []
        elif value is not None:
            words.append(f"{flag}={value!r}" if isinstance(value, float) else f"{flag}={value}")
    return words
