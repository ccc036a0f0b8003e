"""Runs one of this room's modules in a process of its own and takes its answer.

A child, because a broken torch or driver may crash the process that tries it, and because CUDA reads
CUDA_VISIBLE_DEVICES only once. Knows nothing of what is asked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """What a child told: its values, or in one line why it has none."""

    values: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def ask(
    module: str,
    words: Sequence[str] = (),
    *,
    environment: Mapping[str, str | None],
    timeout_s: float,
    pass_fds: Sequence[int] = (),
) -> Answer:
    """Runs ``python -m module words``; its last line of output is its answer as JSON.

    Args:
        environment: variables to set in the child only, or to remove (None).
        timeout_s: seconds after which it is killed.
        pass_fds: open files that it inherits (leases).
    """
    variables = {**os.environ, **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        env={name: value for name, value in variables.items() if value is not None},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        pass_fds=pass_fds,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Answer(error=f"no answer within {timeout_s:g} s")
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return read_answer(process.returncode, out, err)


def read_answer(code: int, out: str, err: str) -> Answer:
    """The answer of a child that ended with this exit code (negative: by that signal) and this output."""
    if code < 0:
        return Answer(error=f"it was ended by {_signal_name(-code)}")
    if code != 0:
        return Answer(error=next((line for line in reversed(err.splitlines()) if line.strip()), f"exit code {code}"))
    try:
        values = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        return Answer(error=f"it answered {out[-200:]!r}")
    return Answer(values) if isinstance(values, dict) else Answer(error=f"it answered {out[-200:]!r}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
