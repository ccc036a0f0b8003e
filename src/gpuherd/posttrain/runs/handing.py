"""What a round hands to the next: ``policy.json``. Paths inside the run's folder are kept relative to it, so that a run
can be moved."""

from __future__ import annotations

import json
from pathlib import Path

from gpuherd.atomic import atomic_write
from gpuherd.errors import CannotWrite, ExitCode, GpuherdError
from gpuherd.posttrain.types import Policy


class BadPolicy(GpuherdError):
    """A policy.json is damaged or of a newer gpuherd."""

    exit_code = ExitCode.BAD_INPUT


def write_policy(path: Path, policy: Policy, root: Path) -> None:
    """Writes the policy, whole or not at all. Raises CannotWrite."""
    text = json.dumps({"format": 1, "policy": policy.to_dict(root)}, indent=1)
    try:
        atomic_write(path, text.encode() + b"\n")
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}") from None


def read_policy(path: Path, root: Path) -> Policy:
    """The policy that was written. Raises BadPolicy."""
    try:
        found = json.loads(path.read_bytes())
        if found["format"] > 1:
            raise BadPolicy(f"{path} is of a newer gpuherd (format {found['format']}); update gpuherd")
        return Policy.from_dict(found["policy"], root)
    except OSError as problem:
        raise BadPolicy(f"{path} can't be read: {problem.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise BadPolicy(f"{path} is damaged ({type(problem).__name__}); remove it to train this round again") from None
