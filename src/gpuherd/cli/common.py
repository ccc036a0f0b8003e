"""What commands share: arguments, the run that they name, and output (JSON, tables, ``--watch``, progress, files).

With ``--json`` standard output holds JSON alone; all other output goes to standard error.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuherd.engines.registry import LOCAL, names
from gpuherd.errors import CannotWrite, ExitCode, UsageError, printable

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, RenderableType
    from rich.progress import Progress

    from gpuherd.columns import Column
    from gpuherd.jobs.run_dir import RunDirectory
    from gpuherd.models.place.page import Line, Window


def print_json(value: Any, *, allow_nan: bool = False) -> None:
    """Prints a value as indented JSON. Raises ValueError for NaN and infinities, which are no JSON, unless
    ``allow_nan``."""
    import json

    print(json.dumps(value, indent=2, allow_nan=allow_nan))


def print_note(sentence: str) -> None:
    """Prints a message for people on standard error, which leaves standard output to the command's result."""
    print(f"gpuherd: {sentence}", file=sys.stderr, flush=True)


def console_for(args: argparse.Namespace, *, highlight: bool = True) -> Console:
    """The console for people: standard error with ``--json``, else standard output."""
    from rich.console import Console

    return Console(stderr=args.json, highlight=highlight)


def print_verbatim(console: Console, lines: Iterable[str]) -> None:
    """Prints lines without markup, wrapping or control characters: they may hold names of files from strangers."""
    for line in lines:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def write_file(path: Path, data: bytes, flag: str) -> None:
    """Writes a file atomically. Raises CannotWrite, which names the flag that chooses another file."""
    from gpuherd.atomic import atomic_write

    try:
        atomic_write(path, data)
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}; name another file with {flag}") from None


@contextmanager
def progress_bar(*, in_bytes: bool = False) -> Iterator[Progress | None]:
    """A progress bar on standard error that disappears at the end; None if standard error is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    amount = DownloadColumn(binary_units=True) if in_bytes else TaskProgressColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield bar


def progress_of(bar: Progress | None, what: str) -> Callable[..., None] | None:
    """A new task of the bar, as a callback for the work done, the total and, if it changes, what is being done; None
    without a bar."""
    if bar is None:
        return None
    task = bar.add_task(what, total=None)

    def update(done: float, total: float, now: str = what) -> None:
        bar.update(task, completed=done, total=total, description=printable(now)[-60:])

    return update


# ---- once, or again and again by --watch -----------------------------------------------------------------------------


def print_view(
    args: argparse.Namespace, as_json: Callable[[], Iterable[str]], as_tables: Callable[[], Iterable[RenderableType]]
) -> ExitCode:
    """Prints the current state by ``--json`` (a JSON text in pieces) or as tables, once; with ``--watch`` every
    ``args.watch`` seconds until Ctrl-C, which then ends the command with success."""
    try:
        if args.json:
            for _ in _ticks(args.watch):
                for piece in as_json():
                    sys.stdout.write(piece)
                print(flush=True)
        else:
            print_tables(as_tables, args.watch)
    except KeyboardInterrupt:
        if args.watch is None:
            raise
    return ExitCode.OK


def _ticks(every_s: float | None) -> Iterator[None]:
    """One tick now; with a period further ones without end."""
    yield
    while every_s is not None:
        time.sleep(every_s)
        yield


def print_tables(look: Callable[[], Iterable[RenderableType]], every_s: float | None) -> None:
    """Prints the tables once, or every so many seconds; on a terminal each time in place of the last."""
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False)
    if every_s is None or not console.is_terminal:
        for _ in _ticks(every_s):
            for part in look():
                # A part that must stay on one line is not cut at the edge of the window.
                console.print(part, crop=False)
        return
    with Live(_with_time(Group(*look()), every_s), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(_with_time(Group(*look()), every_s), refresh=True)


def _with_time(table: RenderableType, every_s: float) -> RenderableType:
    """The table above the time of its data. That last line is short, which leaves room for the ``^C`` that the terminal
    prints: on a full line it would move the cursor to the next one and spoil the last picture."""
    from rich.console import Group
    from rich.text import Text

    at = time.strftime("%H:%M:%S")
    return Group(table, Text(f"{at}, every {every_s:g} s; Ctrl-C ends it", style="dim"))


# ---- tables and plans ------------------------------------------------------------------------------------------------


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Prints a heading and one line per row; each row has one printable word per column."""
    from rich.console import Console

    from gpuherd.columns import fitted, window

    for line in fitted(columns, rows, window(Console())).lines:
        print(line)


def plan_window() -> Window:
    """The width of the terminal (or COLUMNS), and whether the encoding of the output has block characters."""
    from gpuherd.models.place.page import Window

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
    """Prints the lines of a plan; on a terminal in colours."""
    from gpuherd.models.place.page import text_of

    if not sys.stdout.isatty():
        encoding = sys.stdout.encoding or "utf-8"
        for line in lines:
            print(text_of(line).encode(encoding, "backslashreplace").decode(encoding))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        text = Text.assemble(*[(span.text, _STYLES.get(span.meaning, "")) for span in line])
        text.rstrip()
        console.print(text, soft_wrap=True)


# ---- arguments that several commands share ---------------------------------------------------------------------------
#
# A run is a folder or one of the user's own queues, of which there is one per engine. Without ``--engine`` the own
# queue is that of the engine in the settings, to which ``gpuherd submit`` adds; if that queue does not exist, the
# only existing one.


def add_json(parser: argparse._ActionsContainer, what: str) -> None:
    """The flag ``--json``; ``what`` it prints ends in the help text."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON on standard output")


def add_command_words(parser: argparse.ArgumentParser) -> None:
    """A command behind ``--``, which ``command_words`` returns."""
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the command and its words")


def command_words(args: argparse.Namespace) -> list[str]:
    """The command behind ``--``. Raises UsageError if there is none."""
    words: list[str] = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise UsageError("no command; write it behind --, like: -- python train.py")
    return words


# ---- --watch ---------------------------------------------------------------------------------------------------------

_WATCH_S = 2.0
_SHORTEST_WATCH_S, _LONGEST_WATCH_S = 0.1, 86_400


def add_watch(parser: argparse.ArgumentParser) -> None:
    """The flag ``--watch``; ``args.watch`` is a number of seconds, or None."""
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=_WATCH_S,
        metavar="SECONDS",
        help=f"update every SECONDS (default: {_WATCH_S:g}) until Ctrl-C",
    )


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not _SHORTEST_WATCH_S <= seconds <= _LONGEST_WATCH_S:
        raise argparse.ArgumentTypeError(
            f"{word!r} is not a number of seconds from {_SHORTEST_WATCH_S} to {_LONGEST_WATCH_S}"
        )
    return seconds


# ---- arguments that name a run ---------------------------------------------------------------------------------------

_RUN_HELP = "the run's folder (default: your own queue)"
_ENGINE_HELP = "your own queue for this engine (default: that of your settings, or the only one there is)"


def add_own_queue(parser: argparse.ArgumentParser, help_text: str = _ENGINE_HELP) -> None:
    """``--engine``, which chooses one of the user's own queues; ``args.engine`` is None if it is not given."""
    parser.add_argument("--engine", choices=names(), metavar="|".join(names()), help=help_text)


def add_run_name(
    parser: argparse.ArgumentParser,
    dest: str = "folder",
    *,
    metavar: str = "DIR",
    help_text: str = _RUN_HELP,
    required: bool = False,
) -> None:
    """The run, as an argument or by ``--run``, in the same way for every command. None if it is not given."""
    # An absent argument must not reset the value of the flag.
    parser.add_argument(
        dest, nargs="?", metavar=metavar, default=argparse.SUPPRESS, action=_RunArgument, help=help_text
    )
    parser.add_argument("--run", dest=dest, metavar=metavar, action=_RunArgument, help="the same, as a flag")
    parser.set_defaults(check_words=partial(_check_run_names, dest, required))


class _RunArgument(argparse.Action):
    """Collects each name given for the run. Two names are an error only after all other words were understood, because
    a word behind a misspelt flag looks like the name of a run."""

    def __call__(self, _parser: object, namespace: argparse.Namespace, values: object, _flag: object = None) -> None:
        namespace.run_names = (*getattr(namespace, "run_names", ()), str(values))
        setattr(namespace, self.dest, values)


def _check_run_names(dest: str, required: bool, args: argparse.Namespace) -> str | None:
    """An error message if the run is named twice, or not at all although ``required``; else None."""
    given: tuple[str, ...] = getattr(args, "run_names", ())
    if len(given) > 1:
        return f"name one run, not both {given[0]} and {given[-1]}"
    return "name a run, as an argument or by --run" if required and getattr(args, dest, None) is None else None


def add_folder(parser: argparse.ArgumentParser) -> None:
    """The run's folder, or the engine of the user's own queue: ``gpuherd status results``."""
    add_run_name(parser)
    add_own_queue(parser)


def add_folder_and_jobs(parser: argparse.ArgumentParser) -> None:
    """The run's folder and names of jobs: ``gpuherd cancel results model-3``. ``split_jobs`` tells them apart."""
    parser.add_argument(
        "jobs", nargs="*", metavar="JOB", help="names of jobs, as gpuherd status shows them; first the run's folder"
    )
    parser.add_argument("--run", dest="folder", metavar="DIR", help=_RUN_HELP)
    add_own_queue(parser)


# ---- which run that is -----------------------------------------------------------------------------------------------


def split_jobs(args: argparse.Namespace) -> None:
    """Moves the run's folder from the front of ``args.jobs`` to ``args.folder``, unless ``--run`` or ``--engine`` named
    the run.

    Raises UsageError for a word that is both a run's folder and a job of the user's own queue.
    """
    if args.folder is not None or args.engine is not None or not args.jobs or not has_queue(args.jobs[0]):
        return
    first = args.jobs[0]
    if _is_own_job(first):
        raise UsageError(
            f"{first} is the folder of a run, and also a job of your own queue; for the run write --run {first}, for "
            f"the job --engine {default_engine()}"
        )
    args.folder, args.jobs = first, args.jobs[1:]


def has_queue(folder: str | Path) -> bool:
    """Whether this is the folder of a run: it holds a queue file."""
    from gpuherd.jobs.queue.reader import is_there
    from gpuherd.jobs.run_dir import RunDirectory

    return is_there(RunDirectory(folder).queue)


def _is_own_job(name: str) -> bool:
    from gpuherd.batch.user_queue import folder, in_use
    from gpuherd.jobs.monitor.status import opened
    from gpuherd.jobs.run_dir import RunDirectory

    for engine in in_use():
        with opened(RunDirectory(folder(engine))) as reader:
            if reader.one("SELECT 1 FROM jobs WHERE name = ?", (name,)) is not None:
                return True
    return False


@contextmanager
def hint_at_folder(args: argparse.Namespace, words: Iterable[str], usage: str) -> Iterator[None]:
    """Extends a UsageError about the user's own queue if one of the ``words``, taken for a job, is the folder of a run.

    ``usage``: how to name a folder, with ``{}`` in its place.
    """
    try:
        yield
    except UsageError as problem:
        folder = None if args.folder is not None else next(filter(has_queue, words), None)
        if folder is None:
            raise
        raise UsageError(f"{problem}; {folder} is the folder of a run: {usage.format(folder)}") from None


def run_of(args: argparse.Namespace) -> RunDirectory:
    """The run that the arguments name. Raises UsageError if its folder holds no queue."""
    from gpuherd.batch.user_queue import folder
    from gpuherd.jobs.run_dir import RunDirectory

    if args.folder is not None:
        if getattr(args, "engine", None) is not None:
            raise UsageError(f"--engine names a queue of your own, and {args.folder} is a folder; name one of them")
        run = RunDirectory(args.folder)
        if not has_queue(args.folder):
            raise UsageError(f"there is no queue in {run.root}; name the folder of a run (its --output-dir)")
        return run
    engine = _queue_engine(args)
    run = RunDirectory(folder(engine))
    if not has_queue(folder(engine)):
        raise UsageError(
            f"you have no queue of your own yet ({run.root}); name the folder of a run, or start one: gpuherd submit"
            + engine_flag(engine)
        )
    return run


def engine_flag(engine: str) -> str:
    """The words that add an engine to a command in a message; empty for this machine."""
    return "" if engine == LOCAL else f" --engine {engine}"


def _queue_engine(args: argparse.Namespace) -> str:
    """The engine of the user's own queue. Raises UsageError if several queues are possible."""
    if args.engine is not None:
        return str(args.engine)
    from gpuherd.batch.user_queue import in_use

    default, existing = default_engine(), in_use()
    if default in existing or not existing:
        return default
    if len(existing) > 1:
        raise UsageError(f"you have queues of your own for {' and '.join(existing)}; say which: --engine {existing[0]}")
    return existing[0]


def default_engine(*, starts_jobs: bool = False) -> str:
    """The engine of a command without ``--engine``: that of the settings, or this machine.

    Wrong settings do not prevent looking at a run or ending it: the command prints a warning and uses this machine.
    Raises UsageError for wrong settings if the command starts or adds jobs (``starts_jobs``).
    """
    from gpuherd.jobs.settings import load, user_file

    try:
        if not user_file().exists():
            return LOCAL
    except RuntimeError:  # a user without a home folder has no settings there
        return LOCAL
    try:
        return load().engine
    except UsageError as problem:
        if starts_jobs:
            raise
        print_note(f"warning: {problem}. Until this is mended no job can be added or started")
        return LOCAL
