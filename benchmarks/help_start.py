"""Wall time of ``gpuherd --help``, from process start to exit, beside that of an empty Python program."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

HELP = [sys.executable, "-c", "from gpuherd.cli.main import main; main()", "--help"]
# An installed program has its byte code.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
EMPTY = [sys.executable, "-c", "pass"]


def run(*, quick: bool) -> dict[str, Any]:
    """Median and least of the repeats, in milliseconds."""
    repeats = 3 if quick else 20
    return {"gpuherd_help": milliseconds(HELP, repeats), "empty_python": milliseconds(EMPTY, repeats)}


def milliseconds(command: list[str], repeats: int) -> dict[str, float]:
    """Times a command; the first run, which fills the disk cache, does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append((time.perf_counter() - start) * 1000)
    return {"median": statistics.median(times[1:]), "least": min(times[1:])}
