"""How the commands that ask something of a run are made, and how they tell what came of it.

``gpuherd.jobs.control.client`` decides what a request means; here are its words on the command line, and the
answer's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpuherd.cli.parsing import add_command
from gpuherd.cli.run_folder import add_folder, add_folder_and_jobs, meant, split_jobs, told_of_folders
from gpuherd.errors import ExitCode, UsageError
from gpuherd.options import Parser

if TYPE_CHECKING:
    from gpuherd.jobs.control.messages import Response


def add_steering_command(
    subparsers: argparse._SubParsersAction[Parser], name: str, description: str, *, of_jobs: bool
) -> Parser:
    """A command that asks something of a run: of some of its jobs (``of_jobs``), or of the run as a whole."""
    parser = add_command(subparsers, name, description)
    if of_jobs:
        add_folder_and_jobs(parser)
        parser.add_argument("--all", action="store_true", dest="all_jobs", help="all jobs that it can be done to")
    else:
        add_folder(parser)
    parser.add_argument("--json", action="store_true", help="print what came of it as JSON")
    return parser


def jobs_meant(args: argparse.Namespace) -> tuple[str, ...]:
    """The named jobs, () for all. Raises UsageError for neither or both."""
    split_jobs(args)
    if bool(args.jobs) == args.all_jobs:
        raise UsageError(f"{args.command}: name the jobs, or say --all" + (", not both" if args.jobs else ""))
    return tuple(dict.fromkeys(args.jobs))


def ask(
    args: argparse.Namespace, kind: str, jobs: tuple[str, ...] = (), settings: Mapping[str, str] | None = None
) -> int:
    """Asks it of the run that is meant and prints the answer. Returns 0 when all of it was done, 1 when not, and 75
    when no answer came in time: the request then waits in the queue.
    """
    from gpuherd.jobs.control.client import send
    from gpuherd.jobs.control.messages import ControlKind, Request

    with told_of_folders(args, jobs, "write --run {}"):
        answer = send(meant(args), Request(ControlKind(kind), jobs, settings or {}))
    _tell(answer, as_json=args.json)
    if answer.applied_by is None:
        return ExitCode.BUSY
    return ExitCode.OK if answer.ok else ExitCode.FAILED


def _tell(answer: Response, *, as_json: bool) -> None:
    from gpuherd.errors import printable

    if as_json:
        told = {
            "ok": answer.ok,
            "text": answer.text,
            "applied_by": answer.applied_by,
            "changed": list(answer.changed),
        }
        print(json.dumps(told, indent=2))
    elif answer.ok:
        print(printable(answer.text))
    else:
        print(f"gpuherd: {printable(answer.text)}", file=sys.stderr)
