"""The commands that change a run while it is active: cancel, retry, pause, resume, drain and set.

``gpuherd.jobs.control.client`` sends the request and waits for the response; here are the flags and the output.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from gpuherd.cli.common import add_folder, add_folder_and_jobs, add_json, hint_at_folder, run_of, split_jobs
from gpuherd.cli.output import print_json, print_note
from gpuherd.errors import ExitCode, UsageError, printable
from gpuherd.options import Option, Parser, option_fields, spellings

CANCEL = """\
Ends jobs for good: waiting ones never start, running ones get SIGTERM and, 10 seconds later, SIGKILL. Jobs that need
them are cancelled with them. gpuherd retry runs them again.

examples:
  gpuherd cancel train-7                       in your own queue
  gpuherd cancel --run results model-3 model-4
  gpuherd cancel --run results --all
"""
RETRY = """\
Puts failed and cancelled jobs back into the queue with a full number of retries, together with the jobs that were
cancelled because of them.

examples:
  gpuherd retry train-7                        in your own queue
  gpuherd retry --run results model-3
  gpuherd retry --run results --all            all failed and cancelled jobs
"""
PAUSE = """\
Pauses jobs: waiting ones are not started, the processes of running ones are stopped (SIGSTOP). Stopped processes keep
their GPUs and their memory, and their time limits do not run.

examples:
  gpuherd pause train-7                        in your own queue
  gpuherd pause --run results --all
"""
RESUME = """\
Resumes paused jobs.

examples:
  gpuherd resume train-7                       in your own queue
  gpuherd resume --run results --all
"""
DRAIN = """\
Makes the gpuherd that works on a run start no more jobs and exit when its running jobs have ended, as Ctrl-C does.
Waiting jobs stay in the queue for the next time.

examples:
  gpuherd drain                                your own queue
  gpuherd drain results                        or --run results
"""
SET = """\
Changes options of a run while it is active. Running jobs keep what they have; jobs that start from now on follow the
new options. The options hold until the run ends.

examples:
  gpuherd set --gpus 4,5 --max-checks 3        your own queue
  gpuherd set --run results --max-gpus 2
  gpuherd set --run results --gpus all --max-concurrent none
"""


def _add_for_jobs(parser: Parser) -> None:
    """The arguments of a request about some jobs of a run, or about all."""
    add_folder_and_jobs(parser)
    parser.add_argument("--all", action="store_true", dest="all_jobs", help="all jobs to which this applies")
    add_json(parser, "the response")


add_cancel = add_retry = add_pause = add_resume = _add_for_jobs


def add_drain(parser: Parser) -> None:
    add_folder(parser)
    add_json(parser, "the response")


def add_set(parser: Parser) -> None:
    """A flag for each dispatch option that can be changed."""
    from gpuherd.jobs.options import SETTABLE, DispatchOptions

    add_drain(parser)
    group = parser.add_argument_group("what to set")
    for field, spec in option_fields(DispatchOptions):
        if field.name not in SETTABLE:
            continue
        visible, aliases = spellings(field.name, spec)
        # The dispatcher parses the words, as it parsed those of its own command line.
        common = {"dest": field.name, "default": argparse.SUPPRESS, "nargs": "+" if spec.many else None}
        group.add_argument(*visible, help=spec.help.replace("%", "%%"), metavar=_metavar(spec), **common)  # type: ignore[arg-type]
        if aliases:
            group.add_argument(*aliases, help=argparse.SUPPRESS, **common)  # type: ignore[arg-type]


def _metavar(spec: Option) -> str:
    if spec.choices is not None:
        return "|".join(spec.choices)
    return spec.metavar or "yes|no"


def run_set(args: argparse.Namespace) -> int:
    """Sends the options that are given. Raises UsageError if there are none."""
    from gpuherd.jobs.options import SETTABLE

    given = {name: getattr(args, name) for name in SETTABLE if hasattr(args, name)}
    if not given:
        raise UsageError("set: say what to set, for example --max-gpus 2")
    return _request(args, settings={name: w if isinstance(w, str) else ",".join(w) for name, w in given.items()})


def run_drain(args: argparse.Namespace) -> int:
    """Sends the request."""
    return _request(args)


def _run_for_jobs(args: argparse.Namespace) -> int:
    """Sends the request for the named jobs, or for all. Raises UsageError if both or neither are given."""
    split_jobs(args)
    if bool(args.jobs) == args.all_jobs:
        raise UsageError(f"{args.command}: name the jobs, or say --all" + (", not both" if args.jobs else ""))
    return _request(args, tuple(dict.fromkeys(args.jobs)))


run_cancel = run_retry = run_pause = run_resume = _run_for_jobs


def _request(args: argparse.Namespace, jobs: tuple[str, ...] = (), settings: Mapping[str, str] | None = None) -> int:
    """Sends the request of this command and prints the response.

    Returns 0 if all of it was carried out, 1 if not, and 75 if no response came in time: then it stays in the queue.
    """
    from gpuherd.jobs.control.client import send
    from gpuherd.jobs.control.messages import ControlKind, Request

    with hint_at_folder(args, jobs, "write --run {}"):
        answer = send(run_of(args), Request(ControlKind(args.command), jobs, settings or {}))
    if args.json:
        print_json(
            {"ok": answer.ok, "text": answer.text, "applied_by": answer.applied_by, "changed": list(answer.changed)}
        )
    elif answer.ok:
        print(printable(answer.text))
    else:
        print_note(printable(answer.text))
    if answer.applied_by is None:
        return ExitCode.BUSY
    return ExitCode.OK if answer.ok else ExitCode.FAILED
