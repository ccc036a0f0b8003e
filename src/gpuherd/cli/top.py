"""``gpuherd top``: GPUs, jobs and logs on the full screen, with keys to steer the run."""

from __future__ import annotations

import argparse
import sys

from gpuherd.cli.parsing import add_command
from gpuherd.cli.run_folder import add_folder
from gpuherd.errors import ExitCode, UsageError
from gpuherd.options import Parser

DESCRIPTION = """\
Shows a run on the full screen: each GPU with its memory and use over time, the jobs, and the log of the chosen one.
Keys cancel, retry and pause jobs; ? lists them. Leaving changes nothing.

examples:
  gpuherd top                                  your own queue
  gpuherd top results                          a run's folder
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "top", DESCRIPTION)
    add_folder(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Shows it until the user leaves. A user without a queue sees the GPUs."""
    from gpuherd.batch.user_queue import folder, in_use
    from gpuherd.cli.run_folder import meant
    from gpuherd.jobs.run_dir import RunDirectory
    from gpuherd.top import show

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top needs a terminal; for a pipe or a file use: gpuherd status")
    show(meant(args) if args.folder is not None or in_use() else RunDirectory(folder()))
    return ExitCode.OK
