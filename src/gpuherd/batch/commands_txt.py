"""Reads ``commands.txt``: a command a line, with options in a ``#gpuherd`` line above; split as a shell does. Pure.

::

    #gpuherd default mem=20GB retries=2
    python train.py --seed 1
    #gpuherd gpus=2 name=large needs=line-0002
    python train.py --seed 2

A line that ends with a backslash continues in the next. Other lines that begin with ``#`` are comments. No shell sees a
command: what only a shell could act on (a pipe, a redirection, a variable) is an error with its remedy, not a word that
the program gets. All errors of a file are reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gpuherd.batch.assemble import MOST_JOBS, SHELL, BadJobFile, Entry, Problem, merged, option_of, variable
from gpuherd.options import parse

REMEDY = "quote it to hand it on as it is, or use --shell to run the lines by /bin/sh"

_BLANK = " \t"
_OPERATORS = "|&;<>()`*"
# A line without special signs: most lines are plain, and a file may have a million.
_PLAIN = re.compile(r"[A-Za-z0-9 \t_./:=,@%+-]*")
_EXPANSION = re.compile(r"\$(?:[A-Za-z_0-9{(*@#?$!-])")
_HOME = re.compile(r"~[A-Za-z0-9_.-]*(?:/|$|[ \t])")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.ASCII | re.DOTALL)


def split_words(text: str, *, shell_signs: bool = False) -> list[str]:
    """The words of one line; quotes, backslashes and comments (`` #``) mean what they mean to a shell.

    ``shell_signs``: signs that a shell acts on count as letters; else such a sign raises ValueError with a sentence. So
    does an unclosed quote.

    >>> split_words('python a.py "two words" it\\'s\\' # comment')
    ['python', 'a.py', 'two words', 'its']
    """
    if _PLAIN.fullmatch(text):
        return text.split()
    return _Splitter(text, shell_signs).words()


class _Splitter:
    def __init__(self, text: str, shell_signs: bool):
        self.text = text
        self.refuses = not shell_signs
        self.at = 0

    def words(self) -> list[str]:
        found: list[str] = []
        while True:
            while self.at < len(self.text) and self.text[self.at] in _BLANK:
                self.at += 1
            if self.at == len(self.text) or self.text[self.at] == "#":
                return found
            found.append(self._word())

    def _word(self) -> str:
        if self.refuses and _HOME.match(self.text, self.at):
            raise ValueError(f"'~' is for a shell: write the folder in full, or {REMEDY}")
        parts: list[str] = []
        while self.at < len(self.text) and (sign := self.text[self.at]) not in _BLANK:
            if sign == "'":
                parts.append(self._single())
            elif sign == '"':
                parts.append(self._double())
            elif sign == "\\":
                parts.append(self._escaped())
            else:
                self._refuse_shell_sign(_OPERATORS)
                parts.append(sign)
                self.at += 1
        return "".join(parts)

    def _single(self) -> str:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise ValueError("a ' is not closed")
        part, self.at = self.text[self.at + 1 : end], end + 1
        return part

    def _double(self) -> str:
        parts: list[str] = []
        self.at += 1
        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign == '"':
                self.at += 1
                return "".join(parts)
            if sign == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('$`"\\'):
                parts.append(self._escaped())
                continue
            self._refuse_shell_sign("`")
            parts.append(sign)
            self.at += 1
        raise ValueError('a " is not closed')

    def _escaped(self) -> str:
        if self.at + 1 == len(self.text):
            raise ValueError("a backslash at the end, with nothing after it")
        self.at += 2
        return self.text[self.at - 1]

    def _refuse_shell_sign(self, operators: str) -> None:
        if not self.refuses:
            return
        sign = self.text[self.at]
        if sign in operators:
            raise ValueError(f"{sign!r} is for a shell: {REMEDY}")
        expansion = _EXPANSION.match(self.text, self.at)
        if expansion is not None:
            raise ValueError(f"'{expansion[0]}…' is for a shell: put it in single quotes to hand it on, or use --shell")


def leading_variables(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """``A=1 B=2 program x`` as a shell reads it: variables for the program, and the program's words.

    >>> leading_variables(["A=1", "python", "B=2"])
    ({'A': '1'}, ['python', 'B=2'])
    """
    variables: dict[str, str] = {}
    for position, word in enumerate(words):
        assigned = _ASSIGNMENT.fullmatch(word)
        if assigned is None:
            return variables, words[position:]
        variables[assigned[1]] = assigned[2]
    return variables, []


# "#gpuherd", or "# gpuherd" followed by the form of an option; anything else is a comment about gpuherd.
_DIRECTIVE = re.compile(r"\s*#(?:gpuherd(?=\s|$)|\s+gpuherd(?=\s+(?:default\s+)?[\w.-]+=))")


def read_commands(text: str, *, shell: bool = False) -> tuple[Entry, ...]:
    """The commands of a file, in order. ``shell``: /bin/sh runs each line; else it is split into words.

    Raises BadJobFile with everything that is wrong.
    """
    reader = _Reader(shell)
    for line, content in _logical_lines(text, "\\\n" if shell else ""):
        reader.take(line, content)
    reader.end()
    if reader.problems:
        raise BadJobFile(reader.problems)
    return tuple(reader.entries)


def _logical_lines(text: str, joint: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; a line that ends with a backslash is joined with the next, unless it is a comment."""
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
        # The file ends with a backslash: split_words reports it, a shell ignores it.
        yield first, joint.join(begun) + "\\"


class _Reader:
    """The state of reading: entries and problems so far, defaults, and the options of the next command."""

    def __init__(self, shell: bool):
        self.shell = shell
        self.entries: list[Entry] = []
        self.problems: list[Problem] = []
        self._defaults: dict[str, Any] = {}
        self._next: dict[str, Any] = {}
        self._next_line: int | None = None

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
        if self._next_line is not None:
            self.problems.append(Problem(self._next_line, "these options belong to no command: none follows"))

    def _direct(self, line: int, words: str) -> None:
        options = split_words(words, shell_signs=True)
        default = bool(options) and options[0] == "default"
        target = {} if default else self._next
        # Also when an option is wrong: it was meant for the next line, and "none follows" would be false.
        self._next_line = self._next_line if default else line
        for word in options[default:]:
            try:
                _set(target, word)
            except ValueError as problem:
                self.problems.append(Problem(line, str(problem)))
        if default:
            self._defaults = merged(self._defaults, target)
        if not options[default:]:
            raise ValueError("nothing follows #gpuherd; write key=value, for example gpus=2 mem=20GB")

    def _command(self, line: int, content: str) -> None:
        # Commands without options of their own share the mapping of defaults, which is replaced and never changed.
        given = merged(self._defaults, self._next) if self._next else self._defaults
        self._next, self._next_line = {}, None
        if len(self.entries) == MOST_JOBS:
            raise ValueError(f"more than {MOST_JOBS} commands; split the file")
        if self.shell:
            argv: list[str] = [SHELL, "-c", content.strip()]
        else:
            variables, argv = leading_variables(split_words(content))
            if not argv:
                raise ValueError("variables and no command; write env.NAME=value in a #gpuherd line")
            if variables:
                given = merged(given, {"env": {variable(name, value): value for name, value in variables.items()}})
        self.entries.append(Entry(line=line, argv=tuple(argv), given=given, proposed=f"line-{line:04d}"))


def _set(given: dict[str, Any], word: str) -> None:
    """Adds ``key=value`` to the options. Raises ValueError."""
    key, equals, value = word.partition("=")
    if key.startswith("env.") and equals:
        name = variable(key.removeprefix("env."), value)
        given.setdefault("env", {})[name] = value
        return
    field, spec = option_of(key)
    if not equals and not spec.is_switch:
        raise ValueError(f"{key!r} has no value; write {key}=…")
    if field in given:
        raise ValueError(f"{key} is given twice")
    try:
        given[field] = parse(spec, value if equals else "yes")
    except ValueError as problem:
        raise ValueError(f"{key}: {problem}") from None
