"""Reads YAML into a tree of plain nodes that know their lines; no document can run code or exhaust memory.

Uses only the event parser of PyYAML, a state machine in C. A hostile document can't run code (tags are refused), turn a
name into a number (scalars stay as they are written), repeat a key unnoticed, or grow: an alias is the same node again,
and depth is bounded, for the parser, which needs no stack, as for the recursion here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gpuherd.batch.assemble import BadJobFile, Problem

_MOST_DEPTH = 20
_NOTHING = frozenset({"", "~", "null", "Null", "NULL"})
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map"))


@dataclass(slots=True)
class Scalar:
    """A word as it is written; None for null or nothing."""

    line: int
    value: str | None


@dataclass(slots=True)
class Sequence:
    """A list."""

    line: int
    items: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Mapping:
    """Keys with values, in order; each key with its own line."""

    line: int
    items: dict[str, Node] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)


Node = Scalar | Sequence | Mapping


def read_tree(text: str) -> Node:
    """The document's top node. Raises BadJobFile for text that is no YAML, or uses what a job file can't have."""
    import yaml

    reader = _Reader(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    try:
        return reader.document()
    except yaml.MarkedYAMLError as problem:
        line = 0 if problem.problem_mark is None else problem.problem_mark.line + 1
        raise _wrong(line, f"no YAML: {problem.problem or problem.context}") from None
    except yaml.YAMLError as problem:
        raise _wrong(0, f"no YAML: {problem}") from None


def plain(node: Node) -> Any:
    """The node as dicts, lists, texts and None."""
    if isinstance(node, Mapping):
        return {key: plain(item) for key, item in node.items.items()}
    return [plain(item) for item in node.items] if isinstance(node, Sequence) else node.value


class _Reader:
    """Builds nodes from the parser's events."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        # None for a node that is not complete: an alias inside it would make a circle.
        self._anchors: dict[str, Node | None] = {}

    def document(self) -> Node:
        import yaml

        top: Node | None = None
        for event in self._events:
            line = event.start_mark.line + 1
            if isinstance(event, yaml.DocumentStartEvent) and top is not None:
                raise _wrong(line, "a second document begins; a job file is one")
            if isinstance(event, yaml.NodeEvent):
                top = self._node(event, 0)
        if top is None:
            raise _wrong(0, "nothing is in it")
        return top

    def _node(self, event: Any, depth: int) -> Node:
        import yaml

        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            known = self._anchors.get(str(event.anchor))
            if known is None:
                raise _wrong(line, f"*{event.anchor} refers to nothing that is complete above it")
            return known
        if event.tag not in (None, "!") and event.tag not in _PLAIN_TAGS:
            raise _wrong(line, f"the tag {event.tag} is not possible in a job file")
        node: Node
        if isinstance(event, yaml.ScalarEvent):
            is_null = not event.style and event.tag is None and event.value in _NOTHING
            node = Scalar(line, None if is_null else event.value)
        elif depth == _MOST_DEPTH:
            raise _wrong(line, f"nested more than {_MOST_DEPTH} deep")
        else:
            if event.anchor is not None:
                self._anchors[event.anchor] = None
            inside = self._inside(depth + 1)
            if isinstance(event, yaml.SequenceStartEvent):
                node = Sequence(line, list(inside))
            else:
                node = _mapping(line, inside)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _inside(self, depth: int) -> Iterator[Node]:
        """The nodes up to the end of the list or mapping that has begun."""
        from yaml import CollectionEndEvent

        for event in self._events:
            if isinstance(event, CollectionEndEvent):
                return
            yield self._node(event, depth)


def _mapping(line: int, nodes: Iterator[Node]) -> Mapping:
    """The mapping of these keys and values. ``<<: *defaults`` adds the keys of another that this one doesn't have."""
    made = Mapping(line)
    for key in nodes:
        if not isinstance(key, Scalar) or key.value is None:
            raise _wrong(key.line, "a key must be a word")
        if key.value in made.items:
            first = made.lines[key.value]
            raise _wrong(key.line, f"the key {key.value!r} is there twice; the first is in line {first}")
        made.lines[key.value] = key.line
        made.items[key.value] = next(nodes)
    others = made.items.pop("<<", None)
    for other in others.items if isinstance(others, Sequence) else [] if others is None else [others]:
        if not isinstance(other, Mapping):
            raise _wrong(made.lines["<<"], "<< takes a mapping, or a list of some")
        made.items = other.items | made.items
        made.lines = other.lines | made.lines
    return made


def _wrong(line: int, text: str) -> BadJobFile:
    return BadJobFile([Problem(line, text)])


class Wrong(Exception):
    """Something wrong with an entry; the other entries can still be read. ``problems``: at least one."""

    def __init__(self, line: int, text: str, also: Iterable[Problem] = ()):
        super().__init__(text)
        self.problems = (Problem(line, text), *also)

    @staticmethod
    def all_of(problems: Iterable[Problem]) -> Wrong:
        """One for several problems, of which there is at least one."""
        first, *others = problems
        return Wrong(first.line, first.text, others)


def mapping_of(node: Node, what: str) -> Mapping:
    """The node as a mapping. Raises Wrong."""
    if not isinstance(node, Mapping):
        raise Wrong(node.line, f"{what} must be a mapping of keys to values")
    return node


def word_of(node: Node, what: str) -> str:
    """The node as a word. Raises Wrong."""
    if not isinstance(node, Scalar) or node.value is None:
        raise Wrong(node.line, f"{what} must be a word")
    return node.value
