"""Log records, on standard error and in a run's own file, and progress bars.

Loads no ``rich``: every command of gpuherd loads this.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gpuherd.errors import CannotWrite, UsageError, escape_unencodable

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
SHOW_AFTER_S = 2.0  # of a progress bar
T = TypeVar("T")

_warned: set[tuple[str, str]] = set()  # sources and kinds of exceptions that ``warn_once`` has logged


def configure_console() -> None:
    """Sends records of the level that LOG_LEVEL names (default WARNING), and above, to standard error.

    Characters that the encoding of standard output lacks are printed as escapes.
    """
    escape_unencodable(sys.stdout)
    logging.basicConfig(format=FORMAT)
    for handler in logging.getLogger().handlers:
        handler.setLevel(chosen_level())
    logging.getLogger("gpuherd").setLevel(chosen_level())


def warn_once(logger: logging.Logger, source: str, problem: BaseException, message: str, *values: object) -> None:
    """Logs a warning with the exception's traceback, once for each kind of exception and ``source`` of it."""
    kind = (source, type(problem).__name__)
    if kind not in _warned:
        _warned.add(kind)
        logger.warning(message, *values, exc_info=problem)


def chosen_level() -> int:
    """The level that LOG_LEVEL names. Raises UsageError for a word that is no level."""
    name = os.environ.get("LOG_LEVEL", "").upper() or "WARNING"
    level = logging.getLevelNamesMapping().get(name)
    if level is None:
        raise UsageError(f"LOG_LEVEL={name!r} is no level; use DEBUG, INFO, WARNING or ERROR")
    return level


@contextmanager
def run_log(folder: Path, now: datetime, kind: str) -> Iterator[Path]:
    """While it lasts, our records go to ``<kind>_<time>.log``, as by ``logged_to``. Raises CannotWrite."""
    path = folder / f"{kind}_{now:%Y%m%d_%H%M%S}.log"
    with logged_to(path):
        yield path


@contextmanager
def logged_to(path: Path, *, shown: bool = False) -> Iterator[None]:
    """While it lasts, our records from INFO on (DEBUG with LOG_LEVEL=DEBUG) are added to the file.

    They go to standard error too only where LOG_LEVEL asks for it: the run's display shows what happens already. Where
    none does (``shown``), they go there as ever. Raises CannotWrite when the file can't be made.
    """
    try:
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}") from None
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.setLevel(min(logging.INFO, chosen_level()))
    ours = logging.getLogger("gpuherd")
    before = ours.level, ours.propagate
    ours.addHandler(handler)
    ours.setLevel(min(handler.level, ours.getEffectiveLevel()))
    ours.propagate = ours.propagate and (shown or bool(os.environ.get("LOG_LEVEL")))
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(before[0])
        ours.propagate = before[1]
        handler.close()


# ---- progress bars


def track(console: Console, items: Sequence[T], title: str, clock: Callable[[], float] = time.monotonic) -> Iterator[T]:
    """Passes ``items`` on; when they take longer than two seconds, with a bar and an ETA on ``console``."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    started = clock()
    bar: Progress | None = None
    try:
        for done, item in enumerate(items):
            if bar is None and clock() - started > SHOW_AFTER_S:
                columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
                bar = Progress(*columns, console=console, transient=True)
                bar.add_task(title, total=len(items))
                bar.start()
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()


@contextmanager
def of_bytes(
    console: Console, total: int, title: str, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """A function to call, from any thread, with how many more bytes are done.

    Past two seconds ``console`` shows a bar with an ETA; where it is no terminal, one line that names the work.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(TextColumn("{task.description}"), *columns, console=console, transient=True)
    task = bar.add_task(title, total=total)
    started, shown, lock = clock(), False, threading.Lock()

    def advance(count: int) -> None:
        nonlocal shown
        bar.update(task, advance=count)
        with lock:
            if shown or clock() - started <= SHOW_AFTER_S:
                return
            shown = True
        if console.is_terminal:
            bar.start()
        else:
            console.print(f"{title} ({total / 1e9:.1f} GB)", markup=False, highlight=False)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
