"""``gpuherd status``, ``logs`` and ``top``: how a run stands, what a job writes, and both on the full screen."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpuherd.cli.common import add_command, add_folder, add_watch, meant, print_json, print_tables, told_of_folders
from gpuherd.errors import ExitCode, UsageError
from gpuherd.options import Parser
from gpuherd.units import positive_int

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpuherd.jobs.monitor.job_status import Page
    from gpuherd.jobs.monitor.logs import Part
    from gpuherd.jobs.run_dir import RunDirectory

STATUS = """\
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


def add_status(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "status", STATUS)
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
    parser.set_defaults(run=run_status)


def run_status(args: argparse.Namespace) -> int:
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


LOGS = """\
Prints what a job has written in its latest attempt. With -f it goes on as the job writes, over further attempts, until
the job has ended; while the job waits, standard error says why. On a terminal control characters are left out; a pipe
or a file gets the log as it is.

examples:
  gpuherd logs train-7                         in your own queue
  gpuherd logs results model-3 -f
  gpuherd logs results model-3 --attempt 1 --last-lines 50
"""


def add_logs(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "logs", LOGS)
    add_folder(parser)
    parser.add_argument("job", metavar="JOB", help="name of the job, as gpuherd status tells it")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as the job writes, until it has ended")
    parser.add_argument("--attempt", type=_number, metavar="N", help="which attempt, from 1 (default: the latest)")
    parser.add_argument("--last-lines", type=_number, metavar="N", help="only the last lines (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON: with -f a line for each line of the log")
    parser.set_defaults(run=run_logs)


def _number(word: str) -> int:
    try:
        return positive_int(word)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def run_logs(args: argparse.Namespace) -> int:
    """Prints the log. Ctrl-C ends following, and nothing else."""
    from gpuherd.jobs.monitor.logs import follow, read

    try:
        with told_of_folders(args, [args.job], "gpuherd logs {} JOB"):
            run, which = meant(args), (args.job, args.attempt, args.last_lines)
            parts = follow(run, *which, on_wait=_print_note) if args.follow else read(run, *which)
            if args.json and not args.follow:
                _print_whole(list(parts))
            else:
                whole = True
                for part in parts:
                    _print_part(part, as_json=args.json, after_whole_line=whole)
                    whole = part.ended_line
    except KeyboardInterrupt:
        if not args.follow:
            raise
    return ExitCode.OK


def _print_note(sentence: str) -> None:
    """On standard error: standard output is the log's."""
    print(f"gpuherd: {sentence}", file=sys.stderr, flush=True)


def _print_whole(parts: list[Part]) -> None:
    first = parts[0]
    lines = [_as_text(line) for part in parts for line in part.lines]
    told = {"job": first.job, "attempt": first.attempt, "state": first.state, "log": first.path, "lines": lines}
    print(json.dumps(told, indent=2))


def _print_part(part: Part, *, as_json: bool, after_whole_line: bool) -> None:
    from gpuherd.jobs.attempts.log_file import shown

    if as_json:
        for line in part.lines:
            print(json.dumps({"job": part.job, "attempt": part.attempt, "line": _as_text(line)}))
    elif sys.stdout.isatty():
        if part.begins and part.attempt > 1:
            print(f"--- attempt {part.attempt} ---")
        for line in part.lines:
            print(shown(line))
    else:
        # Byte for byte as the job wrote it; only an attempt begins on a line of its own.
        start = "\n" if part.begins and not after_whole_line else ""
        end = "\n" if part.ended_line and part.lines else ""
        sys.stdout.buffer.write((start + "\n".join(part.lines) + end).encode("utf-8", "surrogateescape"))
    sys.stdout.flush()


def _as_text(line: str) -> str:
    return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


TOP = """\
Shows a run on the full screen: each GPU with its memory and use over time, the jobs, and the log of the chosen one.
Keys cancel, retry and pause jobs; ? lists them. Leaving changes nothing.

examples:
  gpuherd top                                  your own queue
  gpuherd top results                          a run's folder
"""


def add_top(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "top", TOP)
    add_folder(parser)
    parser.set_defaults(run=run_top)


def run_top(args: argparse.Namespace) -> int:
    """Shows it until the user leaves. A user without a queue sees the GPUs."""
    from gpuherd.batch.user_queue import folder, in_use
    from gpuherd.cli.common import meant
    from gpuherd.jobs.run_dir import RunDirectory
    from gpuherd.top import show

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top needs a terminal; for a pipe or a file use: gpuherd status")
    show(meant(args) if args.folder is not None or in_use() else RunDirectory(folder()))
    return ExitCode.OK
