"""Waiting for the thing itself, however slow the machine is, and jobs that end when a test says so and not before."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 60.0


def wait_until(
    condition: Callable[[], bool],
    within_s: float = PATIENCE_S,
    every_s: float = 0.01,
    told: Callable[[], object] = lambda: "",
) -> None:
    """Waits for something to come true; fails when it does not, with what ``told`` says then."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"it never came true {told()}".rstrip()
        time.sleep(every_s)


class Gate:
    """A file that jobs wait for. ``open`` lets them go on."""

    def __init__(self, path: Path):
        self._path = path

    @property
    def wait(self) -> str:
        """Words of a shell script that wait for it."""
        return f"until [ -e '{self._path}' ]; do sleep 0.02; done"

    def open(self) -> None:
        """Lets all who wait for it go on, for good."""
        self._path.touch()
