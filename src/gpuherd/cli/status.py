"""``gpuherd status``, ``logs`` and ``top``: the state of a run, the log of a job, and both on the full screen."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import TYPE_CHECKING

from gpuherd.cli.common import add_folder, add_watch, hint_at_folder, print_json, print_note, print_view, run_of
from gpuherd.errors import ExitCode, UsageError
from gpuherd.options import Parser
from gpuherd.units import positive_int

if TYPE_CHECKING:
    from gpuherd.jobs.monitor.job_status import JobSelection
    from gpuherd.jobs.monitor.logs import Part

STATUS = """\
Shows the state of a run, while gpuherd works on it or afterwards: counts, running jobs with their progress, failures
with the reason, and what the next jobs wait for.

examples:
  gpuherd status                               your own queue
  gpuherd status results                       a run's folder
  gpuherd status results --state failed        all failed jobs
  gpuherd status results --watch               updated every 2 seconds; Ctrl-C ends it
  gpuherd status results --json                for scripts: every job
"""
# Jobs of each state but the running one: about one screen in all.
_JOBS_PER_STATE = 8
_STATES = ("waiting", "running", "done", "failed", "cancelled")


def add_status(parser: Parser) -> None:
    add_folder(parser)
    parser.add_argument(
        "--state",
        nargs="+",
        choices=_STATES,
        default=[],
        metavar="STATE",
        help=f"all jobs in these states, and no others: {', '.join(_STATES)}",
    )
    parser.add_argument("--match", metavar="TEXT", default="", help="only jobs with this text in their name")
    parser.add_argument("--all", action="store_true", dest="everything", help="all jobs, not the first of each state")
    add_watch(parser)
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch one line per update")


def run_status(args: argparse.Namespace) -> int:
    """Prints the state once, or by ``--watch`` until Ctrl-C."""
    from gpuherd.jobs.monitor.format import as_tables, json_text
    from gpuherd.jobs.monitor.status import by_pages

    run, page = run_of(args), _page(args)
    # Lines of the screen in which the tables must fit; None if they are printed once and may scroll.
    height = shutil.get_terminal_size().lines if args.watch is not None and sys.stdout.isatty() else None
    return print_view(
        args, lambda: json_text(run, page, lines=args.watch is None), lambda: as_tables(*by_pages(run, page), height)
    )


def _page(args: argparse.Namespace) -> JobSelection:
    from gpuherd.jobs.job import JobState
    from gpuherd.jobs.monitor.job_status import EVERYTHING, JobSelection

    states = tuple(JobState(word) for word in args.state)
    every = args.everything or args.json or states or args.match
    return JobSelection(states=states, text=args.match, limit=EVERYTHING.limit, each=None if every else _JOBS_PER_STATE)


LOGS = """\
Prints the log of the latest attempt of a job. With -f it follows the log while the job writes, over further attempts,
until the job has ended; while the job waits, standard error says why. On a terminal control characters are left out; a
pipe or a file gets the log unchanged.

examples:
  gpuherd logs train-7                         in your own queue
  gpuherd logs results model-3 -f
  gpuherd logs results model-3 --attempt 1 --last-lines 50
"""


def add_logs(parser: Parser) -> None:
    add_folder(parser)
    parser.add_argument("job", metavar="JOB", help="name of the job, as gpuherd status shows it")
    parser.add_argument("-f", "--follow", action="store_true", help="follow the log until the job has ended")
    parser.add_argument("--attempt", type=_number, metavar="N", help="which attempt, from 1 (default: the latest)")
    parser.add_argument("--last-lines", type=_number, metavar="N", help="only the last lines (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON; with -f one object per line of the log")


def _number(word: str) -> int:
    try:
        return positive_int(word)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def run_logs(args: argparse.Namespace) -> int:
    """Prints the log. Ctrl-C ends following it, with success."""
    from gpuherd.jobs.monitor.logs import follow, read

    try:
        with hint_at_folder(args, [args.job], "gpuherd logs {} JOB"):
            log = run_of(args), args.job, args.attempt, args.last_lines
            parts = follow(*log, on_wait=print_note) if args.follow else read(*log)
            if args.json and not args.follow:
                _print_log_json(list(parts))
            else:
                after_newline = True
                for part in parts:
                    _print_part(part, as_json=args.json, after_newline=after_newline)
                    after_newline = part.ended_line
    except KeyboardInterrupt:
        if not args.follow:
            raise
    return ExitCode.OK


def _print_log_json(parts: list[Part]) -> None:
    first = parts[0]
    lines = [_as_text(line) for part in parts for line in part.lines]
    print_json({"job": first.job, "attempt": first.attempt, "state": first.state, "log": first.path, "lines": lines})


def _print_part(part: Part, *, as_json: bool, after_newline: bool) -> None:
    from gpuherd.jobs.monitor.logs import terminal_line

    if as_json:
        for line in part.lines:
            print(json.dumps({"job": part.job, "attempt": part.attempt, "line": _as_text(line)}))
    elif sys.stdout.isatty():
        if part.begins and part.attempt > 1:
            print(f"--- attempt {part.attempt} ---")
        for line in part.lines:
            print(terminal_line(line))
    else:
        # Byte for byte as the job wrote it, except that each attempt begins on a line of its own.
        start = "\n" if part.begins and not after_newline else ""
        end = "\n" if part.ended_line and part.lines else ""
        sys.stdout.buffer.write((start + "\n".join(part.lines) + end).encode("utf-8", "surrogateescape"))
    sys.stdout.flush()


def _as_text(line: str) -> str:
    """The line as valid UTF-8; bytes that are not become replacement characters."""
    return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


TOP = """\
Shows a run on the full screen: each GPU with its memory and utilisation over time, the jobs, and the log of the
selected job. Keys cancel, retry and pause jobs; ? lists them. Leaving changes nothing.

examples:
  gpuherd top                                  your own queue
  gpuherd top results                          a run's folder
"""


def add_top(parser: Parser) -> None:
    add_folder(parser)


def run_top(args: argparse.Namespace) -> int:
    """Shows the screen until the user leaves it. A user without a queue sees the GPUs."""
    from gpuherd.batch.user_queue import folder, in_use
    from gpuherd.jobs.run_dir import RunDirectory
    from gpuherd.top import show

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top needs a terminal; for a pipe or a file use: gpuherd status")
    show(run_of(args) if args.folder is not None or in_use() else RunDirectory(folder()))
    return ExitCode.OK
