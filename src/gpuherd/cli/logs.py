"""``gpuherd logs``: what a job has written, and what it goes on to write."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from gpuherd.cli.parsing import add_command
from gpuherd.cli.run_folder import add_folder, meant, told_of_folders
from gpuherd.errors import ExitCode
from gpuherd.options import Parser
from gpuherd.units import positive_int

if TYPE_CHECKING:
    from gpuherd.jobs.monitor.logs import Part

DESCRIPTION = """\
Prints what a job has written in its latest attempt. With -f it goes on as the job writes, over further attempts, until
the job has ended; while the job waits, standard error says why. On a terminal control characters are left out; a pipe
or a file gets the log as it is.

examples:
  gpuherd logs train-7                         in your own queue
  gpuherd logs results model-3 -f
  gpuherd logs results model-3 --attempt 1 --last-lines 50
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "logs", DESCRIPTION)
    add_folder(parser)
    parser.add_argument("job", metavar="JOB", help="name of the job, as gpuherd status tells it")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as the job writes, until it has ended")
    parser.add_argument("--attempt", type=_number, metavar="N", help="which attempt, from 1 (default: the latest)")
    parser.add_argument("--last-lines", type=_number, metavar="N", help="only the last lines (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON: with -f a line for each line of the log")
    parser.set_defaults(run=run)


def _number(word: str) -> int:
    try:
        return positive_int(word)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def run(args: argparse.Namespace) -> int:
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
