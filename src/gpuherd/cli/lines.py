"""Lines of ``models.plan.drawing`` on standard output: in colours on a terminal, plain elsewhere."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuherd.models.plan.drawing import Line, Window


def window() -> Window:
    """The terminal's size (or COLUMNS), and what its encoding can show."""
    from gpuherd.models.plan.drawing import Window

    try:
        "█░…·".encode(sys.stdout.encoding or "utf-8")
        unicode = True
    except (UnicodeEncodeError, LookupError):
        unicode = False
    return Window(shutil.get_terminal_size((100, 24)).columns, unicode)


_STYLES = {
    "good": "bold green",
    "bad": "bold red",
    "weak": "dim",
    "head": "bold",
    "note": "yellow",
    "weights": "blue",
    "state": "cyan",
    "cache": "magenta",
    "work": "yellow",
    "kept": "dim",
    "others": "red",
}


def print_lines(lines: Sequence[Line]) -> None:
    """Prints the lines, on a terminal in colours."""
    from gpuherd.models.plan.drawing import plain

    if not sys.stdout.isatty():
        encoding = sys.stdout.encoding or "utf-8"
        for line in lines:
            print(plain(line).encode(encoding, "backslashreplace").decode(encoding))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        text = Text.assemble(*[(span.text, _STYLES.get(span.meaning, "")) for span in line])
        text.rstrip()
        console.print(text, soft_wrap=True)
