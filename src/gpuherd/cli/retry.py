"""``gpuherd retry``: run failed or cancelled jobs again."""

from __future__ import annotations

import argparse

from gpuherd.cli.steering import add_steering_command, ask, jobs_meant
from gpuherd.options import Parser

DESCRIPTION = """\
Puts failed and cancelled jobs back into the queue, with fresh tries, and those that were cancelled because of them.

examples:
  gpuherd retry train-7                        in your own queue
  gpuherd retry --run results model-3
  gpuherd retry --run results --all            everything that has failed or was cancelled
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    add_steering_command(subparsers, "retry", DESCRIPTION, of_jobs=True).set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Asks for it."""
    return ask(args, "retry", jobs_meant(args))
