"""What a run is: the digest of all that its results depend on, and by which versions and when they were made."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from gpuherd import __version__


def digest_of(text: str) -> str:
    """SHA-256 of a text, in hex: of everything that results depend on, as JSON with sorted keys, it is their identity.

    Lone surrogates, which no file name can have but a hostile data set may, count as they are.
    """
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def versions(*libraries: str) -> dict[str, str]:
    """Versions of gpuherd, Python, and those of these libraries that are installed; none of them is imported."""
    found = {"gpuherd": __version__, "python": platform.python_version()}
    for library in libraries:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def now() -> str:
    """The time as it stands in a record: ISO 8601, UTC, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def begun_here() -> dict[str, Any]:
    """Where and when a run is begun, for its run.json."""
    return {
        "cwd": os.getcwd(),  # noqa: PTH109 - a record, not a path to work with
        "host": socket.gethostname(),
        "started": now(),
    }
