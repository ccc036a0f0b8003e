"""``gpuherd cancel``: end jobs for good."""

from __future__ import annotations

import argparse

from gpuherd.cli.steering import add_steering_command, ask, jobs_meant
from gpuherd.options import Parser

DESCRIPTION = """\
Ends jobs for good: waiting ones never start, running ones get SIGTERM and, 10 seconds later, SIGKILL. Jobs that need
them are cancelled with them. gpuherd retry takes it back.

examples:
  gpuherd cancel train-7                       in your own queue
  gpuherd cancel --run results model-3 model-4
  gpuherd cancel --run results --all
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    add_steering_command(subparsers, "cancel", DESCRIPTION, of_jobs=True).set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Asks for it."""
    return ask(args, "cancel", jobs_meant(args))
