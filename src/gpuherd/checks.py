"""Results of checks, as ``gpuherd doctor`` shows them, and the means by which checks look: versions of distributions,
and modules that run in a process of their own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How a check ended. Only FAIL means that something is wrong."""

    OK = "ok"
    WARN = "warn"  # works, but not as it could, or not now
    FAIL = "fail"
    SKIP = "skip"  # could not or need not be tried


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of ``gpuherd doctor``: what was looked at, its state, and what to do unless it is well.

    Raises ValueError for a result that is not OK and has no remedy.
    """

    name: str
    status: Status
    detail: str
    remedy: str | None = None

    def __post_init__(self) -> None:
        if (self.status is Status.OK) != (self.remedy is None):
            raise ValueError(f"{self.name}: {self.status} with remedy {self.remedy!r}")


def all_well(results: Iterable[CheckResult]) -> bool:
    """Whether nothing is wrong."""
    return all(result.status is not Status.FAIL for result in results)


def version_of(distribution: str) -> str | None:
    """The installed version, None for a distribution that is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


# A check that may crash runs in a child: a broken torch or driver may crash the process that tries it, and CUDA reads
# CUDA_VISIBLE_DEVICES only once.


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a child: its values, or in one line why it has none."""

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
