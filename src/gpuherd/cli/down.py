"""``gpuherd down``: ends the dispatcher of the user's own queue."""

from __future__ import annotations

import argparse
import json

from gpuherd.cli.parsing import add_command
from gpuherd.errors import ExitCode
from gpuherd.flags import Parser

DESCRIPTION = """\
Ends what gpuherd up has begun. Jobs that run go on to their end; with --now they are stopped and put back into the
queue. What waits, waits for the next gpuherd up.

examples:
  gpuherd down
  gpuherd down --now
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "down", DESCRIPTION)
    parser.add_argument("--now", action="store_true", help="stop the jobs that run and put them back into the queue")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Asks the dispatcher to end. Returns 0 also when there is none."""
    from gpuherd.batch.background import down

    answer = down(now=args.now)
    ok, text = (True, "nothing works your queue off") if answer is None else (answer.ok, answer.text)
    print(json.dumps({"ok": ok, "was_up": answer is not None, "text": text}, indent=2) if args.json else text)
    return ExitCode.OK if ok else ExitCode.FAILED
