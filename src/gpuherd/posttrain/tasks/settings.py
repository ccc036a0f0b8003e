"""The settings of a task, read strictly: unknown names and wrong types are told with what was meant."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from gpuherd.errors import UsageError

T = TypeVar("T")


def settings_of(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """A frozen dataclass of plain values. Raises UsageError, naming the setting."""
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(hints)}"
            raise UsageError(f"{where}: no setting {name!r}; {hint}")
        if not _fits(value, hints[name]):
            raise UsageError(f"{where}: {name}={value!r} is no {_shown(hints[name])}")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is types.UnionType:
        return any(_fits(value, each) for each in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _shown(hint: Any) -> str:
    return str(getattr(hint, "__name__", None) or hint)
