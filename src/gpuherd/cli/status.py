"""``gpuherd status``: how a run stands: its counts, what runs, what has failed and why, what waits and for what."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpuherd.cli.parsing import add_command
from gpuherd.cli.run_folder import add_folder, meant
from gpuherd.cli.watching import add_watch, print_json, print_tables
from gpuherd.errors import ExitCode
from gpuherd.options import Parser

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpuherd.jobs.monitor.job_status import Page
    from gpuherd.jobs.run_dir import RunDirectory

DESCRIPTION = """\
Shows how a run stands, while gpuherd works on it or after: counts, running jobs with their progress, failures with the
reason, and what the next jobs wait for.

examples:
  gpuherd status                               your own queue
  gpuherd status results                       a run's folder
  gpuherd status results --state failed        all that have failed
  gpuherd status results --watch               renewed every 2 seconds; Ctrl-C ends it
  gpuherd status results --json                for scripts: every job
"""
# Of each state but the running; a screen's worth in all.
EACH = 8
STATES = ("waiting", "running", "done", "failed", "cancelled")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "status", DESCRIPTION)
    add_folder(parser)
    parser.add_argument(
        "--state",
        nargs="+",
        choices=STATES,
        default=[],
        metavar="STATE",
        help=f"all jobs in these states, and no others: {', '.join(STATES)}",
    )
    parser.add_argument("--match", metavar="TEXT", default="", help="only jobs with this in their name")
    parser.add_argument("--all", action="store_true", dest="everything", help="all jobs, not the first of each state")
    add_watch(parser)
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch one line a look")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints it once, or again and again until Ctrl-C."""
    from gpuherd.jobs.monitor.format import json_text

    try:
        where = meant(args)
        page = _page(args)
        if args.json:
            print_json(lambda: json_text(where, page, lines=args.watch is None), args.watch)
        else:
            print_tables(lambda: _tables(where, page, _height(args.watch)), args.watch)
    except KeyboardInterrupt:
        if args.watch is None:
            raise
    return ExitCode.OK


def _tables(where: RunDirectory, page: Page, height: int | None) -> Iterator[RenderableType]:
    from gpuherd.jobs.monitor.format import as_tables
    from gpuherd.jobs.monitor.status import by_pages

    return as_tables(*by_pages(where, page), height)


def _height(watch: float | None) -> int | None:
    """Lines of the screen in which the table must fit: None where it is printed and may scroll."""
    return shutil.get_terminal_size().lines if watch is not None and sys.stdout.isatty() else None


def _page(args: argparse.Namespace) -> Page:
    from gpuherd.jobs.job import JobState
    from gpuherd.jobs.monitor.job_status import EVERYTHING, Page

    states = tuple(JobState(word) for word in args.state)
    every = args.everything or args.json or states or args.match
    return Page(states=states, text=args.match, limit=EVERYTHING.limit, each=None if every else EACH)
