"""Words for records, which others may read: a program's name without arguments that may hold secrets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from gpuherd.errors import clean

_INTERPRETERS = ("python", "bash", "sh", "perl", "Rscript", "julia", "node")
_LONGEST = 80


def command_name(argv: Sequence[str]) -> str | None:
    """The program's name, with the script's where an interpreter runs one.

    >>> command_name(["/usr/bin/python3", "-u", "/home/alice/train.py", "--token", "secret"])
    'python3 train.py'
    >>> command_name(["python", "-m", "lab.train", "x"]), command_name(["sh", "-c", "echo secret"])
    ('python -m lab.train', 'sh')
    """
    if not argv or not argv[0]:
        return None
    program = PurePath(argv[0]).name
    words = [program]
    if program.rstrip("0123456789.") in _INTERPRETERS:
        for position, word in enumerate(argv[1:], 1):
            if word == "-m" and position + 1 < len(argv):
                words += ["-m", argv[position + 1]]
                break
            if word.startswith("-"):
                if word in ("-u", "-O", "-OO", "-B", "-E", "-s", "-I"):
                    continue
                break
            words.append(PurePath(word).name)
            break
    return clean(" ".join(words))[:_LONGEST] or None
