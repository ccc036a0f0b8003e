"""``gpuherd resume``: let paused jobs go on."""

from __future__ import annotations

import argparse

from gpuherd.cli.steering import add_steering_command, ask, jobs_meant
from gpuherd.options import Parser

DESCRIPTION = """\
Lets paused jobs go on.

examples:
  gpuherd resume train-7                       in your own queue
  gpuherd resume --run results --all
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    add_steering_command(subparsers, "resume", DESCRIPTION, of_jobs=True).set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Asks for it."""
    return ask(args, "resume", jobs_meant(args))
