"""What the readers of job files share: entries, problems with their lines, and the keys of a job. Plain data.

The readers (``commands_txt``, ``jobs_yaml``) make entries, ``assemble`` makes jobs of them. Keys are the options that
``Job`` and ``ModelUse`` declare, and ``env``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuherd.errors import ExitCode, GpuherdError, one_line, printable
from gpuherd.jobs.job import Given, Job, ModelUse
from gpuherd.options import Option, by_spelling, did_you_mean, option_fields

MOST_JOBS = 1_000_000
SHELL = "/bin/sh"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A command of a job file, and the options that the file gives it.

    Attributes:
        line: its line in the file, counted from 1.
        argv: the command as an argument list.
        given: values of its options.
        proposed: the name that it gets if it has none of its own; it never reveals the command.
        group: a name for all jobs that the same entry of the file expands to; ``needs`` may use it.
    """

    line: int
    argv: tuple[str, ...]
    given: Given = field(default_factory=dict)
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
    """A job file can't be used; no job was started. ``problems``: all that were found, in order."""

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


_BY_KEY = {**by_spelling(Job), **by_spelling(ModelUse)}
_ALL = (*option_fields(Job), *option_fields(ModelUse))
KEYS = (*((spec.key or spec.name or declared.name).replace("_", "-") for declared, spec in _ALL), "env.NAME")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def option_of(key: str, known: Collection[str] = KEYS) -> tuple[str, Option]:
    """The field that a key of a job file sets, and its option. Raises ValueError, which names the nearest known key."""
    found = _BY_KEY.get(key.replace("-", "_"))
    if found is None:
        raise ValueError(unknown(key, known))
    declared, spec = found
    return declared.name, spec


def unknown(key: str, known: Collection[str]) -> str:
    """The message about an unknown key, with the nearest known one."""
    hint = did_you_mean(key.replace("_", "-"), known, f"possible: {', '.join(known)}", cutoff=0.5)
    return f"unknown key {key!r}{hint}"


def variable(name: str, value: str) -> str:
    """The name of a variable, checked. Raises ValueError for one that a job's environment can't have."""
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"{name!r} is no name of an environment variable")
    if name in GPU_VARIABLES:
        raise ValueError(f"{name} is set by gpuherd when it knows the job's GPUs; choose GPUs by --gpu-list")
    if name.startswith("GPUHERD_"):
        raise ValueError(f"{name} is gpuherd's own; a job can't set it")
    if "\0" in value:
        raise ValueError(f"the value of {name} has a NUL byte in it")
    return name


def merged(earlier: Given, later: Given) -> dict[str, Any]:
    """Both sets of options: the later value counts, except for ``env``, whose variables are joined.

    >>> merged({"mem": 1, "env": {"A": "1"}}, {"mem": 2, "env": {"B": "2"}})
    {'mem': 2, 'env': {'A': '1', 'B': '2'}}
    """
    both = {**earlier, **later}
    if "env" in earlier and "env" in later:
        both["env"] = {**earlier["env"], **later["env"]}
    return both
