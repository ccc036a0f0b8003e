"""A file system of its own that is soon full, as over a quota."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """The folder, made, with so much space (``24m``). Skips the test where that can't be had."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip("making a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, leave: int = 0) -> Path:
    """Uses all space but ``leave`` bytes; with 0 also what others give back meanwhile."""
    big = folder / "big"
    found = os.statvfs(folder)
    left = found.f_bavail * found.f_frsize - leave if leave else sys.maxsize
    with big.open("wb", buffering=0) as file:  # a close that has nothing left to write can't fail
        try:
            while left > 0:
                left -= file.write(b"\0" * min(left, 65_536))
        except OSError:
            pass
    return big
