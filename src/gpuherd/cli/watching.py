"""``--watch [SECONDS]``, for commands that can look again and again, and the looking itself."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

WATCH_SECONDS = 2.0
SHORTEST_S, LONGEST_S = 0.1, 86_400


def add_watch(parser: argparse.ArgumentParser) -> None:
    """The flag; ``args.watch`` is a number of seconds, or None."""
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"look again every so many seconds (default: {WATCH_SECONDS:g}) until Ctrl-C",
    )


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of seconds from {SHORTEST_S} to {LONGEST_S}")
    return seconds


def print_json(look: Callable[[], Iterable[str]], every_s: float | None) -> None:
    """Prints what is seen, a JSON text in pieces, once or again and again."""
    while True:
        for piece in look():
            sys.stdout.write(piece)
        print(flush=True)
        if every_s is None:
            return
        time.sleep(every_s)


def print_tables(look: Callable[[], Iterable[RenderableType]], every_s: float | None) -> None:
    """Prints the tables once; or again and again, on a terminal each time in the place of the last."""
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False)
    if every_s is None or not console.is_terminal:
        while True:
            for part in look():
                # What is to stay in one line is not cut either.
                console.print(part, crop=False)
            if every_s is None:
                return
            time.sleep(every_s)
    with Live(_watched(Group(*look()), every_s), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(_watched(Group(*look()), every_s), refresh=True)


def _watched(table: RenderableType, every_s: float) -> RenderableType:
    """The table, and when it was made. The short last line leaves room for the terminal's own ``^C``, which would else
    move the cursor to a line of its own and spoil the last picture.
    """
    from rich.console import Group
    from rich.text import Text

    at = time.strftime("%H:%M:%S")
    return Group(table, Text(f"{at}, every {every_s:g} s; Ctrl-C ends it", style="dim"))
