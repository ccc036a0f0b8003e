"""Where log records go: to standard error at the level of LOG_LEVEL, and to a run's own log file."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from gpuherd.errors import CannotWrite, UsageError, escape_unencodable

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
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


def warn_once(logger: logging.Logger, source: str, problem: Exception, message: str, *values: object) -> None:
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
