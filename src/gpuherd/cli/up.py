"""``gpuherd up``: begins to work off the user's own queue."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from gpuherd.cli.parsing import add_command, load_for
from gpuherd.cli.planning import on_stderr
from gpuherd.errors import ExitCode
from gpuherd.jobs.options import DispatchOptions
from gpuherd.options import Parser, add_options, build, option

DESCRIPTION = """\
Begins to work off your own queue, to which gpuherd submit adds, in the background. It goes on when the terminal is
closed and after logout, also while the queue is empty, until gpuherd down.

examples:
  gpuherd up --max-gpus 4
  gpuherd up --gpu-list 4 5 6 7 --yield requeue
  gpuherd up --foreground                          for systemd, or to look on
  gpuherd up --engine slurm --partition gpu        your queue for SLURM, to which gpuherd submit --engine slurm adds
  salloc --gres=gpu:4, and in it: gpuherd up --engine local     your queue of this machine, on the GPUs of that job
  gpuherd status                                   how it stands
  gpuherd set --max-gpus 2                         other options while it works
  gpuherd down

Exit codes: 0 it is at work, 75 another one is already; with --foreground 130 and 143 when a signal left jobs undone.
"""


@dataclass(frozen=True, kw_only=True)
class UpOptions(DispatchOptions):
    """How the queue is worked off."""

    # No flag: a job shares its GPU when it was submitted so (gpuherd submit --share).
    share: bool = True
    foreground: bool = option(False, help="stay in the foreground and show what happens")

    def dispatch_options(self) -> DispatchOptions:
        """The part that a dispatcher knows."""
        values = {name: value for name, value in vars(self).items() if name != "foreground"}
        return DispatchOptions(**values)


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "up", DESCRIPTION)
    add_options(parser, UpOptions)
    parser.add_argument("--json", action="store_true", help="print the dispatcher's pid and folder as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Starts the dispatcher, or is it."""
    from gpuherd.batch.daemon import forget_environment, log_file, serve, up
    from gpuherd.batch.user_queue import open_folder

    load_for(args, UpOptions, stays=False)
    options = build(UpOptions, args)
    notice = options.spec.queue_notice(options)
    if notice is not None:
        on_stderr(notice)
    directory = open_folder(engine=options.engine)
    if options.foreground:
        from rich.console import Console

        from gpuherd.jobs.monitor.display import display

        console = Console(highlight=False, stderr=args.json)
        forget_environment(options.engine)
        with display(console) as shown:
            return serve(options.dispatch_options(), directory, display=shown).exit_code
    pid = up(options.dispatch_options(), directory)
    if args.json:
        told = {"pid": pid, "queue": str(directory.root), "log": str(log_file(directory))}
        print(json.dumps(told, indent=2))
    else:
        print(f"gpuherd (pid {pid}) works off {directory.root}; log: {log_file(directory)}")
    return ExitCode.OK
