"""Which run a command means: the folder that was named, or else one of the user's own queues.

There is one for each engine. Where none is named (``--engine``) it is that of the settings, by which gpuherd submit
goes too; and where that is not there, the only one that is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpuherd.engines.options import ENGINES, LOCAL, EngineName

if TYPE_CHECKING:
    from gpuherd.jobs.rundir import RunDirectory

_HELP = "the run's folder (default: your own queue)"
_OF_ENGINE = "your own queue for this engine (default: that of your settings, or the only one there is)"


def add_own_queue(parser: argparse.ArgumentParser, help_text: str = _OF_ENGINE) -> None:
    """``--engine``, for commands that know the user's own queues alone. ``args.engine`` is None where it isn't said."""
    parser.add_argument("--engine", choices=ENGINES, metavar="|".join(ENGINES), help=help_text)


def add_folder(parser: argparse.ArgumentParser) -> None:
    """The folder as an argument: ``gpuherd status results``."""
    parser.add_argument("folder", nargs="?", metavar="DIR", help=_HELP)
    add_own_queue(parser)


def add_folder_flag(parser: argparse.ArgumentParser) -> None:
    """The folder as a flag, where the arguments are jobs: ``gpuherd cancel --run results job``."""
    parser.add_argument("--run", dest="folder", metavar="DIR", help=_HELP)
    add_own_queue(parser)


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
        if getattr(args, "engine", None) is not None:
            raise UsageError(f"--engine names a queue of your own, and {named} is a folder; name one of them")
        run = RunDirectory(named)
        if not run.queue.exists():
            raise UsageError(f"there is no queue in {run.root}; name the folder of a run (its --output-dir)")
        return run
    engine = own_engine(args)
    run = RunDirectory(folder(engine))
    if not run.queue.exists():
        flag = "" if engine == LOCAL else f" --engine {engine}"
        raise UsageError(
            f"you have no queue of your own yet ({run.root}); name the folder of a run, or begin one: gpuherd submit"
            + flag
        )
    return run


def own_engine(args: argparse.Namespace) -> EngineName:
    """The engine whose queue is meant where no folder is named. Raises UsageError where it could be several."""
    if args.engine is not None:
        named: EngineName = args.engine
        return named
    from gpuherd.batch.own_queue import in_use
    from gpuherd.errors import UsageError

    usual, there = usual_engine(), in_use()
    if usual in there or not there:
        return usual
    if len(there) > 1:
        raise UsageError(f"you have queues of your own for {' and '.join(there)}; say which: --engine {there[0]}")
    return there[0]


def usual_engine() -> EngineName:
    """What runs jobs where nothing is said: the settings' word, or this machine."""
    from gpuherd.jobs.settings_place import user_file

    try:
        if not user_file().exists():
            return LOCAL
    except RuntimeError:  # a user without a home folder has no settings in it
        return LOCAL
    from gpuherd.jobs.settings import load

    return load().engine
