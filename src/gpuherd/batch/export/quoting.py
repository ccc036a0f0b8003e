"""A job as one line of bash, whatever its words hold; and names as comments. Pure."""

from __future__ import annotations

import math
import re
import shlex

from gpuherd.errors import UsageError, printable
from gpuherd.jobs.job import Job

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_KILL_AFTER_S = 10


def quoted(word: str) -> str:
    r"""The word for bash, in one line: ``shlex.quote``, with line ends written as bash's own escapes.

    >>> print(quoted("a b\n$(c)"))
    'a b'$'\n''$(c)'
    """
    # A line end in what shlex has quoted always stands between single quotes.
    return shlex.quote(word).replace("\n", "'$'\\n''")


def comment(text: str) -> str:
    """Words for a comment: one line, nothing that a terminal would act on."""
    return printable(text)


def line_of(job: Job, folder: str) -> str:
    """What runs the job, as one line of bash: in its folder, with its variables, within its time, and it has succeeded
    only when its result is there. ``folder``: for a job that names none.

    Raises UsageError for a variable that bash can't set.
    """
    parts = [f"cd -- {quoted(job.cwd or folder)}"]
    for name, value in job.env.items():
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f"job {job.name!r} sets the variable {name!r}, which a shell can't set; rename it")
        parts.append(f"export {name}={quoted(value)}")
    command = " ".join(quoted(word) for word in job.argv)
    if job.timeout_s is not None:
        command = f"timeout --kill-after={_KILL_AFTER_S} {math.ceil(job.timeout_s)} {command}"
    # By exec a program is run whatever bash itself has of that name (echo, time, test).
    if job.result is None:
        parts.append(f"exec -- {command}")
    else:
        parts += [f"(exec -- {command})", f"test -e {quoted(job.result)}"]
    return " && ".join(parts)
