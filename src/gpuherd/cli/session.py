"""``gpuherd session``: GPUs for interactive work, given back when they are not used any more."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from gpuherd.cli.common import (
    add_command_words,
    add_json,
    command_words,
    print_json,
    print_note,
    print_table,
)
from gpuherd.cli.job_start import load_for
from gpuherd.errors import ExitCode, UsageError, printable
from gpuherd.options import Parser, add_options, build
from gpuherd.units import duration, duration_s, positive_int

if TYPE_CHECKING:
    from gpuherd.batch.sessions import SessionRecord

SESSION = """\
Waits until GPUs are free, takes them, and becomes the command, as gpuherd run does. When neither the GPUs nor the
terminal have been used for 50 minutes, a warning is printed on the terminal; ten minutes later the session is ended
(SIGTERM to all its processes, SIGKILL after 30 s), and the GPUs are free for others. What counts as use is work of the
GPUs themselves, a model that is loaded, and what is typed on the terminal: not a notebook that is only open.

examples:
  gpuherd session -- jupyter lab
  gpuherd session --num-gpus 2 --mem 30GB -- bash        a shell with two GPUs
  gpuherd session --idle-after 2h --for 8h -- python     ends after 8 hours in any case
  gpuherd session list                                   your sessions, and when they end
  gpuherd session extend 4711 1h                         keep one for another hour, used or not

Exit codes: the command's own; 75 GPUs not free in time; 126 and 127 if the command can't be run, as in a shell.
"""


def add_session(parser: Parser) -> None:
    from gpuherd.batch.options import SessionOptions

    add_options(parser, SessionOptions)
    add_command_words(parser)


def run_session(args: argparse.Namespace) -> int:
    """Becomes the command. Returns only if that is impossible."""
    from gpuherd.batch import session
    from gpuherd.batch.options import SessionOptions
    from gpuherd.batch.run import CannotBecome, open_descriptors

    inherited = open_descriptors()
    argv = command_words(args)
    settings = load_for(args, SessionOptions, stays=False)
    options = build(SessionOptions, args)

    def report(sentence: str) -> None:
        if not options.quiet:
            print_note(sentence)

    for warning in settings.warnings:
        report(warning)
    try:
        session.run(options, argv, inherited, report, settings)
    except CannotBecome as problem:
        print_note(str(problem))
        return problem.code


# ---- gpuherd session list --------------------------------------------------------------------------------------------

SESSION_LIST = """\
Lists your sessions on this machine, and when each ends if it is not used.

examples:
  gpuherd session list
  gpuherd session list --json
"""


def add_session_list(parser: Parser) -> None:
    add_json(parser, "the sessions")


def run_session_list(args: argparse.Namespace) -> int:
    """Prints the sessions."""
    from gpuherd.batch import session, sessions
    from gpuherd.columns import Column

    if args.json:
        print_json({"sessions": session.listed()})
        return ExitCode.OK
    records = sessions.read(sessions.folder())
    if not records:
        print("no sessions on this machine")
        return ExitCode.OK
    columns = [
        Column("PID", 0),
        Column("GPU", 1),
        Column("ENDS", 0),
        Column("IDLE", 2, right=True),
        Column("RUNS", 3, right=True),
        Column("NAME", 4, least=6),
        Column("COMMAND", 1, least=12),
    ]
    print_table(columns, [_row(record, time.time()) for record in records])
    return ExitCode.OK


def _row(record: SessionRecord, now: float) -> list[str]:
    idle_s = record.idle_s + (now - record.looked_at if record.idle_s else 0.0)
    words = [
        str(record.pid),
        ",".join(record.gpus),
        _ends(record, now),
        duration(max(0.0, idle_s), parts=1),
        duration(max(0.0, now - record.since), parts=1),
        record.name,
        record.command,
    ]
    return [printable(word) for word in words]


def _ends(record: SessionRecord, now: float) -> str:
    if not record.is_watched:
        return "never: its watcher was killed"
    left = duration(max(0.0, record.looked_at + record.ends_in_s - now), parts=1)
    return f"in {left}" + (", unless it is used" if record.ending == "idle" else "")


# ---- gpuherd session extend ------------------------------------------------------------------------------------------

SESSION_EXTEND = """\
Keeps a session for some more time from now on, whether it is used or not, and beyond its --for.

examples:
  gpuherd session extend 4711 1h       the session whose command has pid 4711
  gpuherd session extend               the only one, or the one in which this is typed: by its --idle-after
"""


def add_session_extend(parser: Parser) -> None:
    parser.add_argument("pid", nargs="?", metavar="PID", help="the session, as session list names it")
    parser.add_argument("time", nargs="?", metavar="TIME", help="how long, like 1h (default: its --idle-after)")


def run_session_extend(args: argparse.Namespace) -> int:
    """Writes the request."""
    from gpuherd.batch import sessions
    from gpuherd.jobs import clock

    try:
        pid = None if args.pid is None else positive_int(args.pid)
        given = None if args.time is None else duration_s(args.time)
    except ValueError as problem:
        raise UsageError(str(problem)) from None
    place = sessions.folder()
    record = sessions.chosen(sessions.read(place), pid)
    if not record.is_watched:
        raise UsageError(f"session {record.pid} needs no more time: its watcher was killed, and nobody ends it")
    length = record.idle_after_s if given is None else given
    sessions.keep(place, record, clock.mono() + length)
    print(printable(f"session {record.pid} ({record.command}) is kept for {duration(length)}"))
    return ExitCode.OK
