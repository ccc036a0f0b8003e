"""Which run a command means: the folder that was named, or else the user's own queue."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuherd.jobs.rundir import RunDirectory

_HELP = "the run's folder (default: your own queue)"


def add_folder(parser: argparse.ArgumentParser) -> None:
    """The folder as an argument: ``gpuherd status results``."""
    parser.add_argument("folder", nargs="?", metavar="DIR", help=_HELP)


def add_folder_flag(parser: argparse.ArgumentParser) -> None:
    """The folder as a flag, where the arguments are jobs: ``gpuherd cancel --run results job``."""
    parser.add_argument("--run", dest="folder", metavar="DIR", help=_HELP)


def meant(args: argparse.Namespace) -> RunDirectory:
    """The run that is meant. Raises UsageError when there is no queue in its folder."""
    from gpuherd.batch.own_queue import folder
    from gpuherd.errors import UsageError
    from gpuherd.jobs.rundir import RunDirectory

    if args.folder is not None:
        run = RunDirectory(args.folder)
        if not run.queue.exists():
            raise UsageError(f"there is no queue in {run.root}; name the folder of a run (its --output-dir)")
        return run
    run = RunDirectory(folder())
    if not run.queue.exists():
        raise UsageError(
            f"you have no queue of your own yet ({run.root}); name the folder of a run, or begin one: gpuherd submit"
        )
    return run
