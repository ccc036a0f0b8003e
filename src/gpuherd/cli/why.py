"""``gpuherd why``: why a job waits, who waits for the same GPUs, and when it is expected to start."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import add_folder, hint_at_folder, print_json, run_of
from gpuherd.errors import ExitCode, UsageError, clean
from gpuherd.options import Parser

if TYPE_CHECKING:
    from gpuherd.jobs.monitor.why import Why

WHY = """\
Says why a job waits: what must change first, which jobs of its queue are before it, which users of this machine wait
for GPUs in which order, and when the job is expected to start. A prediction supposes that jobs take as long as those
before them, and that no other user comes.

examples:
  gpuherd why train-7                          in your own queue
  gpuherd why results model-3                  in a run's folder
  gpuherd why train-7 --json                   for scripts
"""


def add_why(parser: Parser) -> None:
    add_folder(parser)
    parser.add_argument("job", metavar="JOB", help="name of the job, as gpuherd status shows it")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_why(args: argparse.Namespace) -> int:
    """Prints the explanation. Raises UsageError for a job that is not there."""
    from gpuherd.jobs.monitor.why import why

    with hint_at_folder(args, [args.job], "gpuherd why {} JOB"):
        found = why(run_of(args), args.job)
        if found is None:
            raise UsageError(f"there is no job {clean(args.job)}; gpuherd status --all lists them")
    if args.json:
        print_json(_as_json(found))
    else:
        print("\n".join(_lines(found, time.time())))
    return ExitCode.OK


def _as_json(found: Why) -> dict[str, Any]:
    return {
        "job": found.job.name,
        "state": found.job.state.value,
        "reason": found.job.reason,
        "jobs_ahead": found.ahead,
        "turn": None if found.turn is None else found.turn.as_json(),
    }


def _lines(found: Why, now: float) -> list[str]:
    from gpuherd.jobs.job import JobState
    from gpuherd.units import counted

    job, turn = found.job, found.turn
    name = clean(job.title or job.name)
    if job.state is not JobState.WAITING:
        why = f": {clean(job.reason)}" if job.reason else ""
        return [f"{name} does not wait, it is {job.state.value}{why}"]
    lines = [f"{name} waits: {clean(job.reason or 'no reason is known')}"]
    if found.ahead:
        lines.append(
            f"{counted(found.ahead, 'waiting job')} of its queue {'is' if found.ahead == 1 else 'are'} before it"
        )
    if turn is not None:
        lines.append("users who wait for GPUs of this machine, in the order of their turns:")
        for number, user in enumerate(turn.users, start=1):
            whose = " - this queue's" if user.uid == turn.uid else ""
            lines.append(f"  {number}. {user.sentence}{whose}")
        lines.append(f"it {turn.start_sentence(now)}" if turn.starts_at is not None else turn.start_sentence(now))
    return lines
