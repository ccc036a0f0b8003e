"""Reads ``commands.txt``: a line a command, with what is to be said of it in a ``#gpuherd`` line above. Pure.

::

    #gpuherd default mem=20GB retries=2
    python train.py --seed 1
    #gpuherd gpus=2 name=large needs=line-0002
    python train.py --seed 2

A line that ends with a backslash goes on in the next. Other lines that begin with ``#`` are comments. All that is
wrong in a file is told at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gpuherd.batch.draft import MOST_JOBS, BadJobFile, Draft, Problem
from gpuherd.batch.job_options import field_of, merged, value_of, variable
from gpuherd.batch.words import leading_variables, split_words

# "#gpuherd", or "# gpuherd" if what follows has the form of a setting: else that is a comment about gpuherd.
_DIRECTIVE = re.compile(r"\s*#(?:gpuherd(?=\s|$)|\s+gpuherd(?=\s+(?:default\s+)?[\w.-]+=))")
_SHELL = "/bin/sh"


def read_commands(text: str, *, shell: bool = False) -> tuple[Draft, ...]:
    """The commands of a file, in order. ``shell``: each line is run by /bin/sh in place of being split into words.

    Raises BadJobFile with everything that is wrong.
    """
    reader = _Reader(shell)
    for line, content in _logical_lines(text, "\\\n" if shell else ""):
        reader.take(line, content)
    reader.end()
    if reader.problems:
        raise BadJobFile(reader.problems)
    return tuple(reader.drafts)


def _logical_lines(text: str, joint: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, those that end with a backslash joined with the next. Comments are never joined."""
    begun: list[str] = []
    first = 0
    for number, physical in enumerate(text.split("\n"), start=1):
        line = physical.removesuffix("\r")
        if not begun:
            first = number
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2 and (begun or not line.lstrip().startswith("#")):
            begun.append(line[:-1])
            continue
        yield first, joint.join([*begun, line])
        begun = []
    if begun:
        # The last line of all ended with a backslash: split_words says so, a shell ignores it.
        yield first, joint.join(begun) + "\\"


class _Reader:
    """What has been read so far: defaults, what is said of the next command, and what is wrong."""

    def __init__(self, shell: bool):
        self.shell = shell
        self.drafts: list[Draft] = []
        self.problems: list[Problem] = []
        self._defaults: dict[str, Any] = {}
        self._next: dict[str, Any] = {}
        self._said_at: int | None = None

    def take(self, line: int, content: str) -> None:
        directive = _DIRECTIVE.match(content)
        try:
            if "\0" in content:
                raise ValueError("a NUL byte; is this a text file?")
            if directive is not None:
                self._direct(line, content[directive.end() :])
            elif content.strip() and not content.lstrip().startswith("#"):
                self._command(line, content)
        except ValueError as problem:
            self.problems.append(Problem(line, str(problem)))

    def end(self) -> None:
        if self._said_at is not None:
            self.problems.append(Problem(self._said_at, "this is said of no command: none follows"))

    def _direct(self, line: int, words: str) -> None:
        settings = split_words(words, shell_signs=True)
        default = bool(settings) and settings[0] == "default"
        target = {} if default else self._next
        # Even when a setting is wrong: the next line is what it was meant for, and "none follows" would be false.
        self._said_at = self._said_at if default else line
        for word in settings[default:]:
            try:
                _set(target, word)
            except ValueError as problem:
                self.problems.append(Problem(line, str(problem)))
        if default:
            self._defaults = merged(self._defaults, target)
        if not settings[default:]:
            raise ValueError("nothing is said after #gpuherd; write key=value, for example gpus=2 mem=20GB")

    def _command(self, line: int, content: str) -> None:
        # Commands of which nothing else is said share the defaults, which are replaced and never changed.
        said = merged(self._defaults, self._next) if self._next else self._defaults
        self._next, self._said_at = {}, None
        if len(self.drafts) == MOST_JOBS:
            raise ValueError(f"more than {MOST_JOBS} commands; split the file")
        if self.shell:
            argv: list[str] = [_SHELL, "-c", content.strip()]
        else:
            variables, argv = leading_variables(split_words(content))
            if not argv:
                raise ValueError("variables and no command; write env.NAME=value in a #gpuherd line")
            if variables:
                said = merged(said, {"env": {variable(name, value): value for name, value in variables.items()}})
        self.drafts.append(Draft(line=line, argv=tuple(argv), said=said, proposed=f"line-{line:04d}"))


def _set(settings: dict[str, Any], word: str) -> None:
    """Adds ``key=value`` to the settings. Raises ValueError."""
    key, equals, value = word.partition("=")
    if key.startswith("env.") and equals:
        name = variable(key.removeprefix("env."), value)
        settings.setdefault("env", {})[name] = value
        return
    field = field_of(key)
    if not equals and field != "share":
        raise ValueError(f"{key!r} has no value; write {key}=…")
    if field in settings:
        raise ValueError(f"{key} is said twice")
    try:
        settings[field] = value_of(field, value if equals else "yes")
    except ValueError as problem:
        raise ValueError(f"{key}: {problem}") from None
