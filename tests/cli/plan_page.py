"""What docs/plan.md shows, run again: ``python -m tests.cli.plan_page`` writes it anew where figures have changed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
_SHOWN = re.compile(r"^```console\n\$ gpuherd (?P<words>[^\n]+)\n(?P<output>.*?)^```$", re.DOTALL | re.MULTILINE)
# The stand-in driver comes first: no GPUs but simulated ones, on any machine.
_RUN = "from gpuherd.standin import driver; driver.load(); from gpuherd.cli.main import main; main()"


def shown(page: str) -> list[tuple[str, str]]:
    """Each command that is shown, and what it is shown to print."""
    return [(found["words"], found["output"]) for found in _SHOWN.finditer(page)]


def output(words: str) -> str:
    """What the command prints now."""
    environment = {**os.environ, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *shlex.split(words)],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=False,
        env=environment,
    )
    return done.stdout


def renewed(page: str) -> str:
    """The page with what its commands print now."""
    return _SHOWN.sub(lambda found: f"```console\n$ gpuherd {found['words']}\n{output(found['words'])}```", page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
