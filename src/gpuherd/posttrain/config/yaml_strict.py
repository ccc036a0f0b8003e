"""Reads YAML into plain values, and refuses what people don't see in it: a key that is there twice, tags, several
documents, documents that grow by aliases.

Scalars are those of YAML 1.2's core schema: ``1e-5`` is a number here (PyYAML alone makes a text of it), ``yes``,
``no``, ``on`` and dates are texts, and only ``true`` and ``false`` are truth values. Knows nothing of what the document
means.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError, printable

_MOST_BYTES = 2_000_000
_MOST_DEPTH = 30
_MOST_NODES = 200_000
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE, _FALSE = frozenset({"true", "True", "TRUE"}), frozenset({"false", "False", "FALSE"})
_INT = re.compile(r"[-+]?[0-9]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_INFINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)\Z")
_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}"
    for kind in ("str", "int", "float", "bool", "null", "seq", "map", "merge", "timestamp", "value")
)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """What a YAML file holds: a mapping; {} of an empty file.

    Raises UsageError: the file can't be read, or is no YAML that is taken here; the message names file and line.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as problem:
        raise UsageError(f"{path} can't be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no UTF-8 text") from None
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{path} has more than {_MOST_BYTES} bytes, and a configuration has fewer")
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str = "the configuration") -> dict[str, Any]:
    """The same of a text; ``name`` is what messages call it. Raises UsageError.

    >>> parse_yaml("lr: 1e-5\\nname: 'on'\\nsizes: [1, 2.5, null]")
    {'lr': 1e-05, 'name': 'on', 'sizes': [1, 2.5, None]}
    """
    import yaml

    try:
        # In Python: nesting is counted there by Python itself, where libyaml's composer could exhaust the C stack.
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        found = None if node is None else _Values(name).value(node, 0)
    except yaml.MarkedYAMLError as problem:
        line = "" if problem.problem_mark is None else f", line {problem.problem_mark.line + 1}"
        raise UsageError(f"{name}{line}: no YAML: {problem.problem or problem.context}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as problem:
        raise UsageError(f"{name}: no YAML that can be read: {problem}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UsageError(f"{name}: it should be a mapping of keys at the top, as in 'key: value'")
    return found


class _Values:
    """Turns nodes into values; each use of an alias is counted, so that a document can't grow."""

    def __init__(self, name: str):
        self._name = name
        self._nodes = 0

    def value(self, node: Any, depth: int) -> Any:
        import yaml

        self._nodes += 1
        if self._nodes > _MOST_NODES or depth > _MOST_DEPTH:
            raise self._wrong(node, "too large or too deep for a configuration")
        if node.tag not in _PLAIN_TAGS:
            raise self._wrong(node, f"the tag {node.tag} is not possible")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(each, depth + 1) for each in node.value]
        return self._mapping(node, depth)

    def _mapping(self, node: Any, depth: int) -> dict[str, Any]:
        import yaml

        found: dict[str, Any] = {}
        lines: dict[str, int] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or (key_node.style is None and key_node.value in _NULL):
                raise self._wrong(key_node, "a key must be a word")
            key, line = key_node.value, key_node.start_mark.line + 1
            if key in lines:
                raise self._wrong(key_node, f"the key {key!r} is there twice; the first is in line {lines[key]}")
            lines[key] = line
            value = self.value(value_node, depth + 1)
            if key != "<<" or key_node.style is not None:
                found[key] = value
                continue
            for other in value if isinstance(value, list) else [value]:
                if not isinstance(other, dict):
                    raise self._wrong(key_node, "<< takes a mapping, or a list of some")
                merged = other | merged
        return merged | found

    def _scalar(self, node: Any) -> Any:
        text: str = node.value
        if node.style is not None:
            return text
        if text in _NULL:
            return None
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        if _INT.match(text):
            if len(text) > 300:
                raise self._wrong(node, f"a number of {len(text)} digits")
            return int(text)
        if _FLOAT.match(text):
            return float(text)
        infinite = _INFINITE.match(text)
        if infinite is not None:
            return float(f"{infinite[1]}inf")
        return text

    def _wrong(self, node: Any, told: str) -> UsageError:
        return UsageError(f"{self._name}, line {node.start_mark.line + 1}: {printable(told)}")
