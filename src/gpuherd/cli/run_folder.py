"""Which run a command means: the folder that was named, or else the user's own queue."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


def add_either(parser: argparse.ArgumentParser) -> None:
    """The folder as an argument or as a flag, where there are no other arguments: both are what people type."""
    add_folder_flag(parser)
    # Not the flag's own name: an argument that is not given would take the flag's value away.
    parser.add_argument("place", nargs="?", metavar="DIR", help=argparse.SUPPRESS)


@contextmanager
def told_of_folders(args: argparse.Namespace, words: Iterable[str], instead: str) -> Iterator[None]:
    """An error about the user's own queue says so when a word that was taken for a job is the folder of a run.

    ``instead``: how to name a folder, with ``{}`` in its place.
    """
    from gpuherd.errors import UsageError
    from gpuherd.jobs.rundir import RunDirectory

    try:
        yield
    except UsageError as problem:
        folders = [] if args.folder is not None else [word for word in words if RunDirectory(word).queue.is_file()]
        if not folders:
            raise
        raise UsageError(f"{problem}; {folders[0]} is the folder of a run: {instead.format(folders[0])}") from None


def meant(args: argparse.Namespace) -> RunDirectory:
    """The run that is meant. Raises UsageError when there is no queue in its folder."""
    from gpuherd.batch.own_queue import folder
    from gpuherd.errors import UsageError
    from gpuherd.jobs.rundir import RunDirectory

    named = args.folder if args.folder is not None else getattr(args, "place", None)
    if args.folder is not None and getattr(args, "place", None) is not None:
        raise UsageError(f"name one folder, not both {args.folder} and {args.place}")
    if named is not None:
        run = RunDirectory(named)
        if not run.queue.exists():
            raise UsageError(f"there is no queue in {run.root}; name the folder of a run (its --output-dir)")
        return run
    run = RunDirectory(folder())
    if not run.queue.exists():
        raise UsageError(
            f"you have no queue of your own yet ({run.root}); name the folder of a run, or begin one: gpuherd submit"
        )
    return run
