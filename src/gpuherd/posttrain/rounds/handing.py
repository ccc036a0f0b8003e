"""What a round hands to the next: ``policy.json``. Paths inside the run's folder are kept relative to it, so that a run
can be moved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuherd.errors import CannotWrite, ExitCode, GpuherdError
from gpuherd.jobs.durable import atomic_write
from gpuherd.posttrain.policy import Policy

_INSIDE = "inside"


class BadPolicy(GpuherdError):
    """A policy.json is damaged or of a newer gpuherd."""

    exit_code = ExitCode.BAD_INPUT


def write_policy(path: Path, policy: Policy, root: Path) -> None:
    """Writes the policy, whole or not at all. Raises CannotWrite."""
    text = json.dumps({"format": 1, "policy": _mapped(policy.to_dict(), lambda word: _relative(word, root))}, indent=1)
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
        return Policy.from_dict(_mapped(found["policy"], lambda word: _absolute(word, root)))
    except OSError as problem:
        raise BadPolicy(f"{path} can't be read: {problem.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise BadPolicy(f"{path} is damaged ({type(problem).__name__}); remove it to train this round again") from None


def _mapped(values: Mapping[str, Any], change: Any) -> dict[str, Any]:
    """A policy's dictionary with the places of its models changed."""
    guide = values["guide"]
    return {
        **values,
        "model": change(values["model"]),
        "adapter": None if values["adapter"] is None else change(values["adapter"]),
        "guide": None if guide is None else {**guide, "classifier": change(guide["classifier"])},
    }


def _relative(word: str, root: Path) -> Any:
    path = Path(word)
    return {_INSIDE: str(path.relative_to(root))} if path.is_absolute() and path.is_relative_to(root) else word


def _absolute(word: Any, root: Path) -> str:
    if not isinstance(word, dict):
        return str(word)
    path = (root / word[_INSIDE]).resolve()
    if not path.is_relative_to(root.resolve()):
        raise ValueError("a path out of the run's folder")
    return str(root / word[_INSIDE])
