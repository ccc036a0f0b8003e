"""What several commands share: their parser, the run they are about, ``--watch``, and tables on the terminal.

The run is a folder, or one of the user's own queues, of which there is one for each engine: where no ``--engine`` is
given, that of the settings, to which ``gpuherd submit`` adds; where that one does not exist, the only one that does.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from gpuherd.cli import COMMANDS
from gpuherd.columns import Column, fitted, window
from gpuherd.engines.options import ENGINES
from gpuherd.engines.registry import LOCAL, specs
from gpuherd.errors import UsageError
from gpuherd.options import Parser

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpuherd.jobs.run_dir import RunDirectory
    from gpuherd.models.plan.drawing import Line, Window


def add_command(subparsers: argparse._SubParsersAction[Parser], name: str, description: str) -> Parser:
    """The parser of a command of ``COMMANDS``, with ``description`` and its examples in its --help; the engines' own
    examples stand behind the others."""
    before, heading, examples = description.partition("examples:\n")
    end = examples.find("\n\n") + 1 or len(examples)
    of_engines = "".join(spec.examples.get(name, "") for spec in specs())
    text = before + heading + examples[:end] + of_engines + examples[end:]
    parser = subparsers.add_parser(name.rpartition(" ")[2], help=COMMANDS[name].summary, description=text)
    parser.set_defaults(parser=parser)
    # Also accepted after the command, where people put it; it must not reset a value given before the command.
    parser.add_argument("--simulate", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def command_words(args: argparse.Namespace) -> list[str]:
    """The command behind ``--``, from a REMAINDER argument named ``words``. Raises UsageError when there is none."""
    words: list[str] = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise UsageError("no command; write it behind --, like: -- python train.py")
    return words


_HELP = "the run's folder (default: your own queue)"
_OF_ENGINE = "your own queue for this engine (default: that of your settings, or the only one there is)"


def add_own_queue(parser: argparse.ArgumentParser, help_text: str = _OF_ENGINE) -> None:
    """``--engine``, for commands that know the user's own queues alone. ``args.engine`` is None where it isn't said."""
    parser.add_argument("--engine", choices=ENGINES, metavar="|".join(ENGINES), help=help_text)


def add_run(
    parser: argparse.ArgumentParser,
    dest: str = "folder",
    *,
    metavar: str = "DIR",
    help_text: str = _HELP,
    required: bool = False,
) -> None:
    """The run, as an argument or by ``--run``: the same for every command. None where it is not given."""
    # An argument that is not given must leave the flag's value alone.
    parser.add_argument(
        dest, nargs="?", metavar=metavar, default=argparse.SUPPRESS, action=_RunArgument, help=help_text
    )
    parser.add_argument("--run", dest=dest, metavar=metavar, action=_RunArgument, help="the same, as a flag")
    parser.set_defaults(check_words=partial(_check_named, dest, required))


class _RunArgument(argparse.Action):
    """Takes the run's name. One that is given twice is an error only when all other words are understood: a word behind
    a misspelt flag looks like a run's name."""

    def __call__(self, _parser: object, namespace: argparse.Namespace, values: object, _flag: object = None) -> None:
        namespace.named = (*getattr(namespace, "named", ()), str(values))
        setattr(namespace, self.dest, values)


def _check_named(dest: str, required: bool, args: argparse.Namespace) -> str | None:
    """An error message where the run is named twice, or not at all and ``required``; else None."""
    named: tuple[str, ...] = getattr(args, "named", ())
    if len(named) > 1:
        return f"name one run, not both {named[0]} and {named[-1]}"
    return "name a run, as an argument or by --run" if required and getattr(args, dest, None) is None else None


def add_folder(parser: argparse.ArgumentParser) -> None:
    """The run's folder, or the engine of the user's own queue: ``gpuherd status results``."""
    add_run(parser)
    add_own_queue(parser)


def add_folder_and_jobs(parser: argparse.ArgumentParser) -> None:
    """The same where jobs are named too: ``gpuherd cancel results model-3``. ``args.jobs`` has them after
    ``split_jobs``."""
    parser.add_argument(
        "jobs", nargs="*", metavar="JOB", help="names of jobs, as gpuherd status shows them; first the run's folder"
    )
    parser.add_argument("--run", dest="folder", metavar="DIR", help=_HELP)
    add_own_queue(parser)


def split_jobs(args: argparse.Namespace) -> None:
    """Takes the run's folder away from the front of ``args.jobs``, where it stands there and not behind ``--run``.

    Raises UsageError for a word that names a folder and a job of the user's own queue.
    """
    from gpuherd.errors import UsageError
    from gpuherd.jobs.queue.reader import is_there
    from gpuherd.jobs.run_dir import RunDirectory

    if args.folder is not None or args.engine is not None or not args.jobs:
        return
    first = args.jobs[0]
    if not is_there(RunDirectory(first).queue):
        return
    if _is_own_job(first):
        raise UsageError(
            f"{first} is the folder of a run, and also a job of your own queue; for the run write --run {first}, for "
            f"the job --engine {usual_engine()}"
        )
    args.folder, args.jobs = first, args.jobs[1:]


def _is_own_job(name: str) -> bool:
    from gpuherd.batch.user_queue import folder, in_use
    from gpuherd.jobs.monitor.status import opened
    from gpuherd.jobs.run_dir import RunDirectory

    def has_it(engine: str) -> bool:
        with opened(RunDirectory(folder(engine))) as reader:
            return reader.one("SELECT 1 FROM jobs WHERE name = ?", (name,)) is not None

    return any(has_it(engine) for engine in in_use())


@contextmanager
def told_of_folders(args: argparse.Namespace, words: Iterable[str], instead: str) -> Iterator[None]:
    """An error about the user's own queue says so when a word that was taken for a job is the folder of a run.

    ``instead``: how to name a folder, with ``{}`` in its place.
    """
    from gpuherd.errors import UsageError
    from gpuherd.jobs.queue.reader import is_there
    from gpuherd.jobs.run_dir import RunDirectory

    try:
        yield
    except UsageError as problem:
        folders = [] if args.folder is not None else [word for word in words if is_there(RunDirectory(word).queue)]
        if not folders:
            raise
        raise UsageError(f"{problem}; {folders[0]} is the folder of a run: {instead.format(folders[0])}") from None


def meant(args: argparse.Namespace) -> RunDirectory:
    """The run that is meant. Raises UsageError when there is no queue in its folder."""
    from gpuherd.batch.user_queue import folder
    from gpuherd.errors import UsageError
    from gpuherd.jobs.queue.reader import is_there
    from gpuherd.jobs.run_dir import RunDirectory

    named = args.folder
    if named is not None:
        if getattr(args, "engine", None) is not None:
            raise UsageError(f"--engine names a queue of your own, and {named} is a folder; name one of them")
        run = RunDirectory(named)
        if not is_there(run.queue):
            raise UsageError(f"there is no queue in {run.root}; name the folder of a run (its --output-dir)")
        return run
    engine = own_engine(args)
    run = RunDirectory(folder(engine))
    if not is_there(run.queue):
        flag = "" if engine == LOCAL else f" --engine {engine}"
        raise UsageError(
            f"you have no queue of your own yet ({run.root}); name the folder of a run, or begin one: gpuherd submit"
            + flag
        )
    return run


def own_engine(args: argparse.Namespace) -> str:
    """The engine whose queue is meant where no folder is named. Raises UsageError where it could be several."""
    if args.engine is not None:
        named: str = args.engine
        return named
    from gpuherd.batch.user_queue import in_use
    from gpuherd.errors import UsageError

    usual, there = usual_engine(), in_use()
    if usual in there or not there:
        return usual
    if len(there) > 1:
        raise UsageError(f"you have queues of your own for {' and '.join(there)}; say which: --engine {there[0]}")
    return there[0]


def usual_engine(*, starts_jobs: bool = False) -> str:
    """The engine where none is named: that of the settings, or this machine.

    Wrong settings do not prevent looking at a run or ending it: the command prints a warning and uses this machine.
    Raises UsageError for wrong settings where the command starts or adds jobs (``starts_jobs``).
    """
    from gpuherd.errors import UsageError
    from gpuherd.jobs.settings import load, user_file

    try:
        if not user_file().exists():
            return LOCAL
    except RuntimeError:  # a user without a home folder has no settings in it
        return LOCAL
    try:
        return load().engine
    except UsageError as problem:
        if starts_jobs:
            raise
        print(f"gpuherd: warning: {problem}. Until then no job can be added or started", file=sys.stderr)
        return LOCAL


WATCH_SECONDS = 2.0
SHORTEST_S, LONGEST_S = 0.1, 86_400


def add_watch(parser: argparse.ArgumentParser) -> None:
    """The flag; ``args.watch`` is a number of seconds, or None."""
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"look again every so many seconds (default: {WATCH_SECONDS:g}) until Ctrl-C",
    )


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of seconds from {SHORTEST_S} to {LONGEST_S}")
    return seconds


def print_json(look: Callable[[], Iterable[str]], every_s: float | None) -> None:
    """Prints what is seen, a JSON text in pieces, once or again and again."""
    while True:
        for piece in look():
            sys.stdout.write(piece)
        print(flush=True)
        if every_s is None:
            return
        time.sleep(every_s)


def print_tables(look: Callable[[], Iterable[RenderableType]], every_s: float | None) -> None:
    """Prints the tables once; or again and again, on a terminal each time in the place of the last."""
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False)
    if every_s is None or not console.is_terminal:
        while True:
            for part in look():
                # What is to stay in one line is not cut either.
                console.print(part, crop=False)
            if every_s is None:
                return
            time.sleep(every_s)
    with Live(_watched(Group(*look()), every_s), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(_watched(Group(*look()), every_s), refresh=True)


def _watched(table: RenderableType, every_s: float) -> RenderableType:
    """The table, and when it was made. The short last line leaves room for the terminal's own ``^C``, which would else
    move the cursor to a line of its own and spoil the last picture.
    """
    from rich.console import Group
    from rich.text import Text

    at = time.strftime("%H:%M:%S")
    return Group(table, Text(f"{at}, every {every_s:g} s; Ctrl-C ends it", style="dim"))


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Prints the heading and a line a row; each row has a word a column, all of them printable."""
    from rich.console import Console

    for line in fitted(columns, rows, window(Console())).lines:
        print(line)


def plan_window() -> Window:
    """The terminal's size (or COLUMNS), and what its encoding can show."""
    from gpuherd.models.plan.drawing import Window

    try:
        "█░…·".encode(sys.stdout.encoding or "utf-8")
        unicode = True
    except (UnicodeEncodeError, LookupError):
        unicode = False
    return Window(shutil.get_terminal_size((100, 24)).columns, unicode)


_STYLES = {
    "good": "bold green",
    "bad": "bold red",
    "weak": "dim",
    "head": "bold",
    "note": "yellow",
    "weights": "blue",
    "state": "cyan",
    "cache": "magenta",
    "work": "yellow",
    "kept": "dim",
    "others": "red",
}


def print_lines(lines: Sequence[Line]) -> None:
    """Prints the lines, on a terminal in colours."""
    from gpuherd.models.plan.drawing import plain

    if not sys.stdout.isatty():
        encoding = sys.stdout.encoding or "utf-8"
        for line in lines:
            print(plain(line).encode(encoding, "backslashreplace").decode(encoding))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        text = Text.assemble(*[(span.text, _STYLES.get(span.meaning, "")) for span in line])
        text.rstrip()
        console.print(text, soft_wrap=True)
