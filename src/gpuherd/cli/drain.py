"""``gpuherd drain``: let what runs end, start nothing new."""

from __future__ import annotations

import argparse

from gpuherd.cli.steering import add_steering_command, ask
from gpuherd.options import Parser

DESCRIPTION = """\
Lets the gpuherd that works on a run start nothing new and end when its running jobs have ended, as Ctrl-C would. What
waits stays in the queue for the next time.

examples:
  gpuherd drain                                your own queue
  gpuherd drain results                        or --run results
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_steering_command(subparsers, "drain", DESCRIPTION, of_jobs=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Asks for it."""
    return ask(args, "drain")
