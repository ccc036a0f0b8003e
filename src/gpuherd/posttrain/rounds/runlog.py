"""``run.log``: what happened in a run, over all its starts, in lines that people grep."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuherd.errors import CannotWrite
from gpuherd.report.log import FORMAT, chosen_level


@contextmanager
def run_log(path: Path) -> Iterator[None]:
    """While it lasts our records from INFO on (DEBUG with LOG_LEVEL=DEBUG) are added to the file.

    They go to standard error too only where LOG_LEVEL asks for it. Raises CannotWrite.
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
    ours.propagate = ours.propagate and bool(os.environ.get("LOG_LEVEL"))
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(before[0])
        ours.propagate = before[1]
        handler.close()
