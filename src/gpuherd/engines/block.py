"""``engine:`` in a YAML file: a name, or a mapping with the name and what else is said of it. Pure.

::

    engine: slurm

    engine:
      name: slurm
      partition: gpu
      time-limit: 4h
      cpus-per-job: 8
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from gpuherd.engines.options import ENGINES, EngineOptions
from gpuherd.errors import UsageError
from gpuherd.options import Option

_OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(EngineOptions)}


def read_block(told: Any, possible: Collection[str] = tuple(_OPTIONS), where: str = "engine") -> dict[str, Any]:
    """The options that a block says, by field name; {} for None, where there is none.

    Args:
        told: the value of the key as YAML has it.
        possible: names of the options that the command has.
        where: what the key is called in errors.

    Raises UsageError, with the key, for what is no option and for values that can't be.

    >>> read_block({"name": "slurm", "time-limit": "4h"})
    {'engine': 'slurm', 'time_limit': 14400.0}
    """
    if told is None:
        return {}
    block = told if isinstance(told, Mapping) else {"name": told}
    if "name" not in block:
        raise UsageError(f"{where}: it has no name; write name: slurm (possible: {', '.join(ENGINES)})")
    found: dict[str, Any] = {}
    for key, value in block.items():
        name = "engine" if key == "name" else str(key).replace("-", "_")
        if name not in possible or name not in _OPTIONS or key == "engine":
            raise UsageError(f"{where}.{key} is no option of an engine{_nearest(str(key), possible)}")
        found[name] = _value(_OPTIONS[name], value, f"{where}.{key}")
    return found


def _value(spec: Option, value: Any, where: str) -> Any:
    if spec.many:
        return tuple(_one(spec, each, where) for each in (value if isinstance(value, list) else [value]))
    return _one(spec, value, where)


def _one(spec: Option, value: Any, where: str) -> Any:
    if spec.yes_or_no:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {value!r} should be true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{where}: {value!r} should be a text or a number")
    word = str(value)
    if spec.choices is not None and word not in spec.choices:
        raise UsageError(f"{where}: {word!r} is not possible; possible: {', '.join(spec.choices)}")
    try:
        return word if spec.parse is None else spec.parse(word)
    except ValueError as problem:
        raise UsageError(f"{where}: {problem}") from None


def _nearest(key: str, possible: Collection[str]) -> str:
    import difflib  # slow to import, and seldom needed

    known = ["name", *(name.replace("_", "-") for name in possible if name in _OPTIONS and name != "engine")]
    near = difflib.get_close_matches(key.replace("_", "-"), known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; possible: {', '.join(known)}"
