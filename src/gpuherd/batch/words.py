"""Splits a line into words as a shell does, and refuses what only a shell could do with it. Pure.

A command of a job file is never seen by a shell. What a shell would act on (a pipe, a redirection, a variable) is
therefore an error with its remedy, not a word that the program is silently given.
"""

from __future__ import annotations

import re

REMEDY = "quote it to hand it on as it is, or use --shell to run the lines by /bin/sh"

_BLANK = " \t"
_OPERATORS = "|&;<>()`*"
# A line in which no sign means anything: most are so, and a file may have a million.
_PLAIN = re.compile(r"[A-Za-z0-9 \t_./:=,@%+-]*")
_EXPANSION = re.compile(r"\$(?:[A-Za-z_0-9{(*@#?$!-])")
_HOME = re.compile(r"~[A-Za-z0-9_.-]*(?:/|$|[ \t])")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.ASCII | re.DOTALL)


def split_words(text: str, *, shell_signs: bool = False) -> list[str]:
    """The words of one line; quotes and backslashes mean what they mean to a shell, and `` #`` begins a comment.

    ``shell_signs``: take signs that a shell acts on as letters. Raises ValueError with a sentence for such a sign
    otherwise, and for a quote that is not closed.

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
