"""The log of a run as a whole: what gpuherd says goes into a file of its own, beside the logs of the attempts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from gpuherd.errors import CannotWrite
from gpuherd.jobs.rundir import RunDirectory


@contextmanager
def run_log(run: RunDirectory, prefix: str, now: datetime) -> Iterator[Path]:
    """Sends the records of all gpuherd loggers to ``<logs>/<prefix>_YYYYMMDD_HHMMSS.log`` while it is open.

    From INFO on, or what LOG_LEVEL names when that is finer. The run folder must be there (``RunDirectory.create``).
    Yields the path. Raises CannotWrite.
    """
    path = run.logs / f"{prefix}_{now:%Y%m%d_%H%M%S}.log"
    try:
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}") from problem
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    wanted = logging.getLevelNamesMapping().get(os.environ.get("LOG_LEVEL", "").upper(), logging.INFO)
    handler.setLevel(min(wanted, logging.INFO))
    logger = logging.getLogger("gpuherd")
    former = logger.level
    # What other handlers show is up to their own levels; the logger itself must let through what the file wants.
    quiet = [(other, other.level) for other in logging.getLogger().handlers]
    for other, level in quiet:
        other.setLevel(max(level, logging.getLogger().level))
    logger.setLevel(handler.level)
    logger.addHandler(handler)
    try:
        yield path
    finally:
        logger.removeHandler(handler)
        logger.setLevel(former)
        for other, level in quiet:
            other.setLevel(level)
        handler.close()
