"""Frozen dataclasses as JSON, and back: the one codec of all records.

Equal data give equal text, and what is read is equal to what was written, floats to the bit. The form is that of the
dataclasses, field by field. Standard library alone.
"""

from __future__ import annotations

import json
import types
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_LARGEST = 2**64 - 1  # of whole numbers: seeds are
_PLAIN = frozenset({int, float, str, bool, types.NoneType})


def line_of(value: Any) -> str:
    """A dataclass as one line of JSON, without the line break. ASCII alone: no reader can take a line separator in a
    text for the end of the line."""
    return json.dumps(jsonable(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def jsonable(value: Any, as_lists: Collection[type] = ()) -> Any:
    """``value`` as JSON values: dataclasses as objects, of the kinds in ``as_lists`` as lists of their fields."""
    if type(value) in _PLAIN:
        return value
    if is_dataclass(value) and not isinstance(value, type):
        if type(value) in as_lists:
            return [jsonable(getattr(value, each.name), as_lists) for each in fields(value)]
        return {each.name: jsonable(getattr(value, each.name), as_lists) for each in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(each, as_lists) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(each, as_lists) for each in value]
    return value


def read(kind: Any, value: Any, as_lists: Collection[type] = ()) -> Any:
    """``value`` as what the annotation ``kind`` says: a dataclass, an enum, a Literal, ``tuple[X, ...]``,
    ``Mapping[str or enum, X]``, ``X | None``, ``Any`` or a plain type. Raises TypeError, ValueError or KeyError where
    it is not that; numbers are finite, and whole ones of at most 64 bits."""
    if kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        return _read_dataclass(kind, value, as_lists)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (wanted,) = (each for each in arguments if each is not type(None))
        return None if value is None else read(wanted, value, as_lists)
    if origin is tuple:
        items = _of(list, value)
        if _all_json(arguments[0], items):
            return tuple(items)
        return tuple(read(arguments[0], each, as_lists) for each in items)
    if origin is Mapping:
        return {arguments[0](key): read(arguments[1], each, as_lists) for key, each in _of(dict, value).items()}
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is none of {', '.join(map(repr, arguments))}")
        return value
    if issubclass(kind, Enum):
        return kind(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(_of(int, value))
    return _of(kind, value)


def _read_dataclass(kind: type, value: Any, as_lists: Collection[type]) -> Any:
    types_of = field_types(kind)
    if kind in as_lists:
        parts = _of(list, value)
        return kind(
            *(read(types_of[each.name], part, as_lists) for each, part in zip(fields(kind), parts, strict=True))
        )
    parts = _of(dict, value)
    # A field with a default may be missing: files of versions before the field lack it.
    there = [
        each
        for each in fields(kind)
        if each.name in parts or (each.default is MISSING and each.default_factory is MISSING)
    ]
    return kind(**{each.name: read(types_of[each.name], parts[each.name], as_lists) for each in there})


@cache
def field_types(kind: type) -> Mapping[str, Any]:
    """The annotation of each field of a dataclass, resolved."""
    return get_type_hints(kind)


def _all_json(kind: Any, items: list[Any]) -> bool:
    """Whether these are numbers or words as they should be, in one pass: there are thousands of token ids in a row."""
    exact = _EXACT.get(kind)
    if exact is None or not exact.issuperset(map(type, items)):
        return False
    if float in exact:
        return all(map(isfinite, filter(None, items)))
    if int in exact:
        known = [*filter(None, items), 0]
        return bool(min(known) >= -_LARGEST and max(known) <= _LARGEST)
    return True


# What items of these kinds are where nothing must be done with them.
_EXACT: Mapping[Any, frozenset[type]] = {
    int: frozenset({int}),
    bool: frozenset({bool}),
    str: frozenset({str}),
    float: frozenset({float}),
    float | None: frozenset({float, types.NoneType}),
    int | None: frozenset({int, types.NoneType}),
}


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    if isinstance(value, float) and not isfinite(value):  # Python's reader knows NaN and Infinity, JSON doesn't
        raise ValueError(f"{value!r} is no figure")
    if isinstance(value, int) and abs(value) > _LARGEST:  # Python's reader knows numbers that no float can hold
        raise ValueError("a whole number has more than 64 bits")
    return value
