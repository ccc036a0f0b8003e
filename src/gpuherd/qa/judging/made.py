"""What a judging of any kind gives to who asked for it, and the description of it. Plain data."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata

from gpuherd import __version__
from gpuherd.errors import ExitCode
from gpuherd.qa.judging.meta import JudgingMeta

RULES_VERSION = 2  # of all that lies between a reply or a probability and a verdict; a change makes other judgings


@dataclass(frozen=True, slots=True)
class Made:
    """How a judging ended.

    Attributes:
        meta: the judging; None where it isn't whole (a dry run, a job that failed, Ctrl-C).
        exit_code: what a command that made it exits with.
        already: it was there before.
        asked: how many cases a model was asked about; 0 for rules.
        failures: title and reason of each job that failed.
    """

    meta: JudgingMeta | None
    exit_code: ExitCode = ExitCode.OK
    already: bool = False
    asked: int = 0
    failures: tuple[tuple[str, str], ...] = ()


def now() -> str:
    """The time as it stands in a description: ISO 8601, UTC, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions(*libraries: str) -> Mapping[str, str]:
    """Versions of gpuherd, Python, and those of these libraries that are installed."""
    found = {"gpuherd": __version__, "python": platform.python_version()}
    for library in libraries:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found
