"""``gpuherd down``: ends the dispatcher of the user's own queue."""

from __future__ import annotations

import argparse
import json

from gpuherd.cli.parsing import add_command
from gpuherd.cli.run_folder import add_own_queue, usual_engine
from gpuherd.engines.options import ENGINES
from gpuherd.errors import ExitCode, UsageError
from gpuherd.options import Parser

DESCRIPTION = """\
Ends what gpuherd up has begun. Jobs that run go on to their end; with --now they are stopped and put back into the
queue. What waits, waits for the next gpuherd up. What a cluster has goes on there, too, unless --now is said.

examples:
  gpuherd down
  gpuherd down --now
  gpuherd down --engine slurm
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "down", DESCRIPTION)
    parser.add_argument("--now", action="store_true", help="stop the jobs that run and put them back into the queue")
    add_own_queue(parser, "the queue for this engine (default: the one that is worked off)")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Asks the dispatcher to end. Returns 0 also when there is none."""
    from gpuherd.batch.daemon import down

    answer = down(now=args.now, engine=_engine_at_work(args))
    ok, text = (True, "nothing works your queue off") if answer is None else (answer.ok, answer.text)
    print(json.dumps({"ok": ok, "was_up": answer is not None, "text": text}, indent=2) if args.json else text)
    return ExitCode.OK if ok else ExitCode.FAILED


def _engine_at_work(args: argparse.Namespace) -> str:
    """The engine of the queue that is meant: the one that somebody works off, where none is named."""
    from gpuherd.batch.user_queue import folder
    from gpuherd.jobs.lock import DispatcherLock
    from gpuherd.jobs.run_dir import RunDirectory

    if args.engine is not None:
        named: str = args.engine
        return named
    usual = usual_engine()
    at_work = [each for each in ENGINES if DispatcherLock.holder(RunDirectory(folder(each)).lock) is not None]
    if len(at_work) > 1 and usual not in at_work:
        raise UsageError(f"your queues for {' and '.join(at_work)} are worked off; say which: --engine {at_work[0]}")
    return usual if usual in at_work or not at_work else at_work[0]
