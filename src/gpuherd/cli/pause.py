"""``gpuherd pause``: let jobs stand still for a while."""

from __future__ import annotations

import argparse

from gpuherd.cli.steering import add_steering_command, ask, jobs_meant
from gpuherd.options import Parser

DESCRIPTION = """\
Lets jobs stand still: waiting ones are held back, the processes of running ones are stopped (SIGSTOP). Those keep
their GPUs and their memory; their time limits stand still too.

examples:
  gpuherd pause train-7                        in your own queue
  gpuherd pause --run results --all
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    add_steering_command(subparsers, "pause", DESCRIPTION, of_jobs=True).set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Asks for it."""
    return ask(args, "pause", jobs_meant(args))
