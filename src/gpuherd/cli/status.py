"""``gpuherd status``: how a run stands: its counts, what runs, what has failed and why, what waits and for what."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from gpuherd.cli.parsing import add_command
from gpuherd.cli.run_folder import add_folder, meant
from gpuherd.cli.seconds import add_watch
from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.flags import Parser

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpuherd.jobs.rundir import RunDirectory
    from gpuherd.jobs.runstatus import Page, RunStatus

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
    parser = add_command(subparsers, "status", "how a run stands: what runs, waits, failed, and why", DESCRIPTION)
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
    try:
        where = meant(args)
        if args.json:
            _print_json(where, _page(args), args.watch)
        else:
            _print_tables(where, _page(args), args.watch)
    except KeyboardInterrupt:
        if args.watch is None:
            raise
    except GpuherdError as problem:
        if args.json:
            print(json.dumps({"error": str(problem), "exit_code": int(problem.exit_code)}))
        raise
    return ExitCode.OK


def _page(args: argparse.Namespace) -> Page:
    from gpuherd.jobs.job import JobState
    from gpuherd.jobs.runstatus import EVERYTHING, Page

    states = tuple(JobState(word) for word in args.state)
    every = args.everything or args.json or states or args.match
    return Page(states=states, text=args.match, limit=EVERYTHING.limit, each=None if every else EACH)


def _print_json(run: RunDirectory, page: Page, watch: float | None) -> None:
    from gpuherd.jobs.status import read_status
    from gpuherd.jobs.statustext import as_json

    while True:
        told = as_json(read_status(run, page))
        print(json.dumps(told, indent=2 if watch is None else None), flush=True)
        if watch is None:
            return
        time.sleep(watch)


def _print_tables(run: RunDirectory, page: Page, watch: float | None) -> None:
    from rich.console import Console
    from rich.live import Live

    from gpuherd.jobs.status import read_status
    from gpuherd.jobs.statustext import as_table

    console = Console(highlight=False)
    if watch is None or not console.is_terminal:
        console.print(as_table(read_status(run, page)))
        while watch is not None:
            time.sleep(watch)
            console.print(as_table(read_status(run, page)))
        return
    with Live(_watched(read_status(run, page), watch), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(watch)
            live.update(_watched(read_status(run, page), watch), refresh=True)


def _watched(status: RunStatus, watch: float) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from gpuherd.jobs.statustext import as_table

    at = time.strftime("%H:%M:%S", time.localtime(status.at))
    return Group(as_table(status), Text(f"{at}, every {watch:g} s; Ctrl-C ends it", style="dim"))
