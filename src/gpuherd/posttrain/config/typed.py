"""Plain nested values (of YAML, JSON, overrides) become frozen dataclasses, each value checked by its annotation.

``read`` goes down a mapping along the fields of a dataclass. Every complaint names the full key (``algos.PITA.lr``),
says what is possible there, and for a key that is not there the nearest one that is. ``runs.records.jsonable`` goes the
other way: ``read(type(value), jsonable(value)) == value``. Knows no particular configuration, no file and no library.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from gpuherd.errors import GpuherdError, UsageError, printable
from gpuherd.options import did_you_mean, nearest
from gpuherd.runs.records import field_types, jsonable

T = TypeVar("T")

_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
_LONGEST = 60
_KEY = re.compile(r"\w+")


def read(kind: type[T], values: Any, where: str = "", names: Mapping[str, str] | None = None) -> T:
    """The dataclass ``kind`` of a mapping of its fields' names.

    A field may be a bool, int, float, str, Path, an Enum, a Literal, a dataclass, ``tuple[X, ...]`` (of a list),
    ``tuple[X, Y]``, ``Mapping[str, X]``, ``Any`` (as it is), or one of several of these. A whole number is good for a
    float and, as people write names, for a text; 1e3 is good for a whole number; nothing else is converted. NaN is
    refused, and so is null where None is not possible.

    Args:
        where: the key that the mapping itself has in the whole configuration, "" for the top.
        names: full keys by fields, of those that the configuration calls otherwise.

    Raises UsageError, also for what a dataclass refuses itself (as UsageError or ValueError).
    """
    try:
        return _Reader(kind).dataclass(kind, values, where)  # type: ignore[no-any-return]
    except UsageError as problem:
        if names is None:
            raise
        text = str(problem)
        before = _KEY.match(text.removeprefix(f"{where}." if where else ""))
        if before is None or before[0] not in names:
            raise
        raise UsageError(names[before[0]] + text.removeprefix(_join(where, before[0]))) from None


def read_keys(
    annotations: Mapping[str, Any], values: Any, where: str = "", elsewhere: Sequence[str] = ()
) -> dict[str, Any]:
    """The values of a mapping by the annotations of its keys, as ``read`` takes them; of those that are given alone.

    Args:
        where: the key that the mapping itself has, "" for the top.
        elsewhere: full keys of other mappings, for hints.

    Raises UsageError.
    """
    reader = _Reader(elsewhere)
    reader.check_names(annotations, values, where)
    return {name: reader.value(annotations[name], value, _join(where, name)) for name, value in values.items()}


def known_keys(kind: type, where: str = "") -> Iterator[str]:
    """All keys that a configuration of this kind can have, in full, in order; ``*`` stands for a name of one's own."""
    for name, annotation in _fields(kind).items():
        key = _join(where, name)
        yield key
        for inner in _members(annotation):
            if dataclasses.is_dataclass(inner):
                yield from known_keys(typing.cast(type, inner), key)
            elif get_origin(inner) in _MAPPINGS and dataclasses.is_dataclass(get_args(inner)[1]):
                yield from known_keys(get_args(inner)[1], _join(key, "*"))


def nearest_or_all(name: str, possible: Sequence[str]) -> str:
    """``; did you mean ...?`` with the nearest of these names, or all possible names if none is near."""
    return did_you_mean(name, possible, f"possible: {', '.join(possible)}" if possible else "")


def check_range(
    options: object, name: str, least: float = 0, most: float = math.inf, *, above: float | None = None
) -> None:
    """Refuses a number that is not ``least`` or more (or more than ``above``), ``most`` at most and finite; None is
    allowed, where a field has it. Raises UsageError, which begins with the name."""
    value = getattr(options, name)
    if value is None or (
        -math.inf < value < math.inf and value <= most and (value >= least if above is None else value > above)
    ):
        return
    low, high = f"the least is {least:g}", f", and the most {most:g}"
    if above is not None:
        low, high = f"it is above {above:g}", f", and at most {most:g}"
    raise UsageError(f"{name}={value}; {low}{'' if math.isinf(most) else high}")


def at_least(options: object, **lowest: float) -> None:
    """Raises UsageError where a number of a dataclass is below its lowest value, or not finite; None is allowed."""
    for name, least in lowest.items():
        check_range(options, name, least)


_MAPPINGS = (dict, Mapping)


class _Reader:
    """One reading; ``root`` is what the whole configuration is, or all its keys, for hints at keys that stand elsewhere
    in it."""

    def __init__(self, root: type | Sequence[str]):
        self._root = root

    def dataclass(self, kind: type, values: Any, where: str) -> Any:
        if dataclasses.is_dataclass(values) and isinstance(values, kind):
            return values
        annotations = _fields(kind)
        self.check_names(annotations, values, where)
        given: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            if field.name in values:
                given[field.name] = self.value(annotations[field.name], values[field.name], _join(where, field.name))
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                key, inner = _join(where, field.name), annotations[field.name]
                if dataclasses.is_dataclass(inner):
                    self.dataclass(typing.cast(type, inner), {}, key)  # names the key in it that is missing
                raise UsageError(f"{key} is missing")
        try:
            return kind(**given)
        except (GpuherdError, ValueError) as problem:
            text = str(problem)
            names_key = any(text.startswith(f"{name}=") for name in annotations)
            raise UsageError(_join(where, text) if names_key else f"{where}: {text}" if where else text) from None

    def check_names(self, annotations: Mapping[str, Any], values: Any, where: str) -> None:
        """Raises UsageError for what is no mapping of these names."""
        if not isinstance(values, Mapping):
            raise _wrong(where, values, "a mapping of keys")
        for name in values:
            if name not in annotations:
                raise UsageError(
                    f"there is no key {_as_yaml(_join(where, str(name)))}{self._hint(name, annotations, where)}"
                )

    def value(self, annotation: Any, value: Any, where: str) -> Any:
        """A value by its annotation. Raises UsageError."""
        origin = get_origin(annotation)
        if annotation is Any:
            return value
        if origin in (Union, types.UnionType):
            return self._one_of(get_args(annotation), value, where)
        if annotation is None or annotation is type(None):
            if value is None:
                return None
            raise _wrong(where, value, "nothing (null)")
        if origin is Literal:
            return _literal(get_args(annotation), value, where)
        if origin is tuple:
            return self._tuple(get_args(annotation), value, where)
        if origin in _MAPPINGS:
            return self._mapping(get_args(annotation)[1], value, where)
        if dataclasses.is_dataclass(annotation):
            return self.dataclass(typing.cast(type, annotation), value, where)
        if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
            return annotation(_literal([each.value for each in annotation], value, where))
        return _scalar(annotation, value, where)

    def _one_of(self, kinds: Sequence[Any], value: Any, where: str) -> Any:
        """By the first of several annotations that takes the value."""
        if value is None and type(None) in kinds:
            return None
        left = [kind for kind in kinds if kind is not type(None)]
        if bool in left and isinstance(value, bool):
            return value
        if int in left and float in left and isinstance(value, float):
            left.remove(int)
        alike = [kind for kind in left if _has_form(kind, value)]
        if len(alike) == 1:
            return self.value(alike[0], value, where)
        for kind in left:
            with suppress(UsageError):
                return self.value(kind, value, where)
        if len(left) == 1:
            return self.value(left[0], value, where)
        raise _wrong(where, value, " or ".join(_in_words(kind) for kind in left))

    def _tuple(self, kinds: Sequence[Any], value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise _wrong(where, value, "a list")
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            kinds = (kinds[0],) * len(value)
        elif len(kinds) != len(value):
            raise UsageError(f"{where}: a list of {len(kinds)}, and {len(value)} are given")
        return tuple(
            self.value(kind, each, f"{where}[{number}]")
            for number, (kind, each) in enumerate(zip(kinds, value, strict=True))
        )

    def _mapping(self, kind: Any, value: Any, where: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise _wrong(where, value, "a mapping of names")
        return {str(name): self.value(kind, each, _join(where, str(name))) for name, each in value.items()}

    def _hint(self, name: object, annotations: Mapping[str, Any], where: str) -> str:
        near = nearest(str(name), annotations, cutoff=0.75)
        if near:
            return f"; did you mean {_join(where, near[0])}?"
        keys = known_keys(self._root) if isinstance(self._root, type) else self._root
        elsewhere = [key for key in keys if key.rpartition(".")[2] == name]
        if elsewhere:
            return f"; did you mean {elsewhere[0].replace('*', '<name>')}?"
        otherwise = f"possible here: {', '.join(annotations)}"
        return did_you_mean(str(name), annotations, otherwise, show=lambda near: _join(where, near))


def _fields(kind: type) -> dict[str, Any]:
    """The fields that the constructor takes, with their annotations resolved."""
    types_of = field_types(kind)
    return {each.name: types_of[each.name] for each in dataclasses.fields(kind) if each.init}


def _members(annotation: Any) -> Sequence[Any]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _has_form(kind: Any, value: Any) -> bool:
    """Whether a structure is of the form that an annotation has: a mapping, or a list."""
    if isinstance(value, Mapping):
        return dataclasses.is_dataclass(kind) or get_origin(kind) in _MAPPINGS
    return isinstance(value, list | tuple) and get_origin(kind) is tuple


def _literal(possible: Sequence[Any], value: Any, where: str) -> Any:
    for each in possible:
        if each == value and isinstance(value, bool) == isinstance(each, bool):
            return each
    hint = nearest_or_all(value, [str(each) for each in possible]) if isinstance(value, str) else ""
    told = ", ".join(str(each) for each in possible)
    raise UsageError(f"{where}={_as_yaml(value)}: it is one of {told}{hint if 'did' in hint else ''}")


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # of a whole number with hundreds of digits
            number = math.inf if value > 0 else -math.inf
        if not math.isnan(number):
            return number
    if kind is int and not isinstance(value, bool):
        if isinstance(value, int):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    if kind is str and isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind not in _NAMES:
        raise TypeError(f"{where}: a field can't be {kind!r}")
    raise _wrong(where, value, _NAMES[kind])


def _in_words(kind: Any) -> str:
    """An annotation in words."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(each) for each in get_args(kind))
    if get_origin(kind) is tuple:
        return "a list"
    if get_origin(kind) in _MAPPINGS or dataclasses.is_dataclass(kind):
        return "a mapping"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of " + ", ".join(str(each.value) for each in kind)
    return _NAMES.get(kind, str(kind))


def _wrong(where: str, value: Any, told: str) -> UsageError:
    if not where:
        return UsageError(f"the configuration is {_as_yaml(value)}, and should be {told}")
    quotes = "; a text of such a form stands in quotes" if told == _NAMES[str] and isinstance(value, float) else ""
    return UsageError(f"{where}={_as_yaml(value)}: it should be {told}{quotes}")


def _as_yaml(value: Any) -> str:
    """A value as YAML has it, printable, and not too long."""
    words = {None: "null", True: "true", False: "false"}
    is_word = value is None or isinstance(value, bool)
    text = words[value] if is_word else printable(value if isinstance(value, str) else repr(jsonable(value)))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
