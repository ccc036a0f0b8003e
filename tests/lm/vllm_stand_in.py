"""A Python that has a vLLM: of the stand-in beside this file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from gpuherd.lm import vllm_process


def python_with_vllm(folder: Path) -> Path:
    """A program in this folder that is Python with the stand-in; for ``GPUHERD_VLLM_PYTHON``."""
    program = folder / "python-with-vllm"
    path = shlex.quote(str(Path(__file__).parent / "stand_in_vllm"))
    program.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {shlex.quote(sys.executable)} "$@"\n')
    program.chmod(0o755)
    return program


def processes(parent: int) -> list[int]:
    """The processes of vLLM that this one has started and that are still there."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            try:
                words = (each / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            if vllm_process.__file__.encode() in words and words[-2] == str(parent).encode():
                found.append(int(each.name))
    return found
