"""Output of the commands: JSON, tables and lines on the terminal, ``--watch``, progress bars, and files.

With ``--json`` standard output holds JSON alone; all other output goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import CannotWrite, ExitCode, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress

    from gpuherd.columns import Column
    from gpuherd.models.plan.drawing import Line, Window


def print_json(value: Any, *, allow_nan: bool = False) -> None:
    """Prints a value as indented JSON. Raises ValueError for NaN and infinities, which are no JSON, unless
    ``allow_nan``."""
    print(json.dumps(value, indent=2, allow_nan=allow_nan))


def print_note(sentence: str) -> None:
    """Prints a message for people on standard error, which leaves standard output to the command's result."""
    print(f"gpuherd: {sentence}", file=sys.stderr, flush=True)


def console_for(args: argparse.Namespace, *, highlight: bool = True) -> Console:
    """The console for people: standard error with ``--json``, else standard output."""
    from rich.console import Console

    return Console(stderr=args.json, highlight=highlight)


def print_verbatim(console: Console, lines: Iterable[str]) -> None:
    """Prints lines without markup, wrapping or control characters: they may hold names of files from strangers."""
    for line in lines:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def write_file(path: Path, data: bytes, flag: str) -> None:
    """Writes a file atomically. Raises CannotWrite, which names the flag that chooses another file."""
    from gpuherd.atomic import atomic_write

    try:
        atomic_write(path, data)
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}; name another file with {flag}") from None


@contextmanager
def progress_bar(*, in_bytes: bool = False) -> Iterator[Progress | None]:
    """A progress bar on standard error that disappears at the end; None if standard error is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    amount = DownloadColumn(binary_units=True) if in_bytes else TaskProgressColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield bar


# ---- once, or again and again by --watch -----------------------------------------------------------------------------


def print_view(
    args: argparse.Namespace, as_json: Callable[[], Iterable[str]], as_tables: Callable[[], Iterable[RenderableType]]
) -> ExitCode:
    """Prints the current state by ``--json`` (a JSON text in pieces) or as tables, once; with ``--watch`` every
    ``args.watch`` seconds until Ctrl-C, which then ends the command with success."""
    try:
        if args.json:
            for _ in _ticks(args.watch):
                for piece in as_json():
                    sys.stdout.write(piece)
                print(flush=True)
        else:
            print_tables(as_tables, args.watch)
    except KeyboardInterrupt:
        if args.watch is None:
            raise
    return ExitCode.OK


def _ticks(every_s: float | None) -> Iterator[None]:
    """One tick now; with a period further ones without end."""
    yield
    while every_s is not None:
        time.sleep(every_s)
        yield


def print_tables(look: Callable[[], Iterable[RenderableType]], every_s: float | None) -> None:
    """Prints the tables once, or every so many seconds; on a terminal each time in place of the last."""
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False)
    if every_s is None or not console.is_terminal:
        for _ in _ticks(every_s):
            for part in look():
                # A part that must stay on one line is not cut at the edge of the window.
                console.print(part, crop=False)
        return
    with Live(_with_time(Group(*look()), every_s), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(_with_time(Group(*look()), every_s), refresh=True)


def _with_time(table: RenderableType, every_s: float) -> RenderableType:
    """The table above the time of its data. That last line is short, which leaves room for the ``^C`` that the terminal
    prints: on a full line it would move the cursor to the next one and spoil the last picture."""
    from rich.console import Group
    from rich.text import Text

    at = time.strftime("%H:%M:%S")
    return Group(table, Text(f"{at}, every {every_s:g} s; Ctrl-C ends it", style="dim"))


# ---- tables and plans ------------------------------------------------------------------------------------------------


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Prints a heading and one line per row; each row has one printable word per column."""
    from rich.console import Console

    from gpuherd.columns import fitted, window

    for line in fitted(columns, rows, window(Console())).lines:
        print(line)


def plan_window() -> Window:
    """The width of the terminal (or COLUMNS), and whether the encoding of the output has block characters."""
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
    """Prints the lines of a plan; on a terminal in colours."""
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
