"""A command as a job file asks for it, before it is a job; and what can be wrong with such a file.

Plain data. The readers (``commands``, ``document``) make drafts, ``assemble`` makes jobs of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuherd.errors import ExitCode, GpuherdError, one_line, printable

MOST_JOBS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A command and what its file says of it.

    Attributes:
        line: where it stands in the file, counted from 1.
        argv: the command as an argument list.
        said: settings by field name of ``JobOptions``; what is not in it was not said.
        proposed: a neutral name for it if it has none of its own; it never tells the command.
        group: a name that stands for all jobs which the same entry of the file made; ``needs`` may use it.
    """

    line: int
    argv: tuple[str, ...]
    said: Mapping[str, Any] = field(default_factory=dict)
    proposed: str
    group: str | None = None


@dataclass(frozen=True, order=True, slots=True)
class Problem:
    """Something wrong in a job file: the line (0 where no single line is at fault) and a sentence."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {one_line(self.text)}" if self.line else one_line(self.text)


class BadJobFile(GpuherdError):
    """A job file can't be used. ``problems`` are all that was found, in order; nothing has been started."""

    exit_code = ExitCode.BAD_INPUT

    def __init__(self, problems: Sequence[Problem], source: str = ""):
        self.problems = tuple(sorted(problems))
        self.source = source
        more = len(self.problems) - 1
        where = f"{source}: " if source else ""
        super().__init__(f"{where}{self.problems[0]}" + (f" (and {more} more)" if more else ""))

    def lines(self) -> list[str]:
        """Each problem as one printable line, with the file's name in front."""
        where = f"{printable(self.source)}: " if self.source else ""
        return [f"{where}{problem}" for problem in self.problems]

    def of(self, source: str) -> BadJobFile:
        """The same with the name of the file."""
        return BadJobFile(self.problems, source)
