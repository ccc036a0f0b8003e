"""``--watch [SECONDS]``, for commands that can look again and again."""

from __future__ import annotations

import argparse

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
