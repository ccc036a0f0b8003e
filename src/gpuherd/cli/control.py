"""The commands that change a run while it goes on: cancel, retry, pause, resume, drain and set.

``gpuherd.jobs.control.client`` decides what a request means. Here are its flags and the output of its answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial

from gpuherd.cli.common import add_command, add_folder, add_folder_and_jobs, meant, split_jobs, told_of_folders
from gpuherd.errors import ExitCode, UsageError, printable
from gpuherd.options import Option, Parser, option_fields, spellings

CANCEL = """\
Ends jobs for good: waiting ones never start, running ones get SIGTERM and, 10 seconds later, SIGKILL. Jobs that need
them are cancelled with them. gpuherd retry takes it back.

examples:
  gpuherd cancel train-7                       in your own queue
  gpuherd cancel --run results model-3 model-4
  gpuherd cancel --run results --all
"""
RETRY = """\
Puts failed and cancelled jobs back into the queue, with fresh tries, and those that were cancelled because of them.

examples:
  gpuherd retry train-7                        in your own queue
  gpuherd retry --run results model-3
  gpuherd retry --run results --all            everything that has failed or was cancelled
"""
PAUSE = """\
Lets jobs stand still: waiting ones are held back, the processes of running ones are stopped (SIGSTOP). Those keep
their GPUs and their memory; their time limits stand still too.

examples:
  gpuherd pause train-7                        in your own queue
  gpuherd pause --run results --all
"""
RESUME = """\
Lets paused jobs go on.

examples:
  gpuherd resume train-7                       in your own queue
  gpuherd resume --run results --all
"""
DRAIN = """\
Lets the gpuherd that works on a run start nothing new and end when its running jobs have ended, as Ctrl-C would. What
waits stays in the queue for the next time.

examples:
  gpuherd drain                                your own queue
  gpuherd drain results                        or --run results
"""
SET = """\
Gives a run that goes on other options. Running jobs keep what they have; what is started from now on follows the new
ones. They hold until the run ends.

examples:
  gpuherd set --gpus 4,5 --max-checks 3        your own queue
  gpuherd set --run results --max-gpus 2
  gpuherd set --run results --gpus all --max-concurrent none
"""


def _add_control_command(
    subparsers: argparse._SubParsersAction[Parser], name: str, description: str, *, of_jobs: bool
) -> Parser:
    """Adds a command that sends a request to a run: about some of its jobs (``of_jobs``), or about the whole run."""
    parser = add_command(subparsers, name, description)
    if of_jobs:
        add_folder_and_jobs(parser)
        parser.add_argument("--all", action="store_true", dest="all_jobs", help="all jobs that it can be done to")
    else:
        add_folder(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.set_defaults(run=_run_for_jobs if of_jobs else _request)
    return parser


add_cancel = partial(_add_control_command, name="cancel", description=CANCEL, of_jobs=True)
add_retry = partial(_add_control_command, name="retry", description=RETRY, of_jobs=True)
add_pause = partial(_add_control_command, name="pause", description=PAUSE, of_jobs=True)
add_resume = partial(_add_control_command, name="resume", description=RESUME, of_jobs=True)
add_drain = partial(_add_control_command, name="drain", description=DRAIN, of_jobs=False)


def add_set(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Adds ``gpuherd set``, with a flag for each dispatch option that can be changed."""
    from gpuherd.jobs.options import SETTABLE, DispatchOptions

    parser = _add_control_command(subparsers, "set", SET, of_jobs=False)
    group = parser.add_argument_group("what to set")
    for field, spec in option_fields(DispatchOptions):
        if field.name not in SETTABLE:
            continue
        shown, quiet = spellings(field.name, spec)
        # The dispatcher parses the words, as it parsed those of its own command line.
        taken = {"dest": field.name, "default": argparse.SUPPRESS, "nargs": "+" if spec.many else None}
        group.add_argument(*shown, help=spec.help.replace("%", "%%"), metavar=_metavar(spec), **taken)  # type: ignore[arg-type]
        if quiet:
            group.add_argument(*quiet, help=argparse.SUPPRESS, **taken)  # type: ignore[arg-type]
    parser.set_defaults(run=_run_set)


def _metavar(spec: Option) -> str:
    if spec.choices is not None:
        return "|".join(spec.choices)
    return spec.metavar or "yes|no"


def _run_set(args: argparse.Namespace) -> int:
    from gpuherd.jobs.options import SETTABLE

    given = {name: getattr(args, name) for name in SETTABLE if hasattr(args, name)}
    if not given:
        raise UsageError("set: say what to set, for example --max-gpus 2")
    return _request(args, settings={name: w if isinstance(w, str) else ",".join(w) for name, w in given.items()})


def _run_for_jobs(args: argparse.Namespace) -> int:
    """Sends the request for the named jobs, or for all. Raises UsageError where both or neither are given."""
    split_jobs(args)
    if bool(args.jobs) == args.all_jobs:
        raise UsageError(f"{args.command}: name the jobs, or say --all" + (", not both" if args.jobs else ""))
    return _request(args, tuple(dict.fromkeys(args.jobs)))


def _request(args: argparse.Namespace, jobs: tuple[str, ...] = (), settings: Mapping[str, str] | None = None) -> int:
    """Sends the request of this command and prints the answer.

    Returns 0 when all of it was done, 1 when not, and 75 when no answer came in time: it stays queued then.
    """
    from gpuherd.jobs.control.client import send
    from gpuherd.jobs.control.messages import ControlKind, Request

    with told_of_folders(args, jobs, "write --run {}"):
        answer = send(meant(args), Request(ControlKind(args.command), jobs, settings or {}))
    if args.json:
        content = {
            "ok": answer.ok,
            "text": answer.text,
            "applied_by": answer.applied_by,
            "changed": list(answer.changed),
        }
        print(json.dumps(content, indent=2))
    elif answer.ok:
        print(printable(answer.text))
    else:
        print(f"gpuherd: {printable(answer.text)}", file=sys.stderr)
    if answer.applied_by is None:
        return ExitCode.BUSY
    return ExitCode.OK if answer.ok else ExitCode.FAILED
