"""Reads YAML into a tree of plain nodes that know their lines; no document can run code or exhaust memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gpuherd.batch.job_options import BadJobFile, Problem

# Reads YAML into a tree of plain nodes that know their lines. What a hostile document can't do here: run code (no
# tags), turn a name into a number (scalars stay as they are written), repeat a key unseen, or grow (an alias is the
# same node again, and depth is bounded, without recursion).
#
# Uses the event parser of PyYAML only. Knows nothing of what the document means.

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
    """The document's top node. Raises BadJobFile for text that is no YAML, or uses what jobs have no use for."""
    import yaml

    # The parser is a state machine, also in C: nesting costs no stack there, and here it is counted.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _Builder().build(yaml.parse(text, Loader=loader))
    except yaml.MarkedYAMLError as problem:
        line = 0 if problem.problem_mark is None else problem.problem_mark.line + 1
        raise BadJobFile([Problem(line, f"no YAML: {problem.problem or problem.context}")]) from None
    except yaml.YAMLError as problem:
        raise BadJobFile([Problem(0, f"no YAML: {problem}")]) from None


def plain(node: Node) -> Any:
    """The node as dicts, lists, texts and None."""
    if isinstance(node, Mapping):
        return {key: plain(item) for key, item in node.items.items()}
    return [plain(item) for item in node.items] if isinstance(node, Sequence) else node.value


class _Builder:
    """Nodes that are open, with the key that waits for its value in each mapping."""

    def __init__(self) -> None:
        self._open: list[Sequence | Mapping] = []
        self._keys: list[Scalar | None] = []
        self._open_anchors: list[str | None] = []
        self._anchors: dict[str, Node | None] = {}
        self._top: Node | None = None

    def build(self, events: Iterator[Any]) -> Node:
        import yaml

        documents = 0
        for event in events:
            line = event.start_mark.line + 1
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _wrong(line, "a second document begins; a job file is one")
            elif isinstance(event, yaml.ScalarEvent):
                _refuse_tag(event, line)
                plain = not event.style and event.tag is None
                self._add(Scalar(line, None if plain and event.value in _NOTHING else event.value), event.anchor)
            elif isinstance(event, yaml.AliasEvent):
                node = self._anchors.get(str(event.anchor))
                if node is None:
                    raise _wrong(line, f"*{event.anchor} refers to nothing that is complete above it")
                self._add(node, None)
            elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
                _refuse_tag(event, line)
                kind = Sequence if isinstance(event, yaml.SequenceStartEvent) else Mapping
                self._begin(kind(line), event.anchor)
            elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
                self._end()
        if self._top is None:
            raise _wrong(0, "nothing is in it")
        return self._top

    def _begin(self, node: Sequence | Mapping, anchor: str | None) -> None:
        if len(self._open) == _MOST_DEPTH:
            raise _wrong(node.line, f"nested more than {_MOST_DEPTH} deep")
        self._add(node, None)
        self._open.append(node)
        self._keys.append(None)
        self._open_anchors.append(anchor)
        if anchor is not None:
            self._anchors[anchor] = None  # until it is complete: an alias inside it would be a circle

    def _end(self) -> None:
        ended = self._open.pop()
        self._keys.pop()
        anchor = self._open_anchors.pop()
        if isinstance(ended, Mapping):
            _merge(ended)
        if anchor is not None:
            self._anchors[anchor] = ended

    def _add(self, node: Node, anchor: str | None) -> None:
        """Puts a node where it belongs: the end of a list, a mapping's next key, the value of one, or the top."""
        if anchor is not None:
            self._anchors[anchor] = node
        if not self._open:
            self._top = node
            return
        parent = self._open[-1]
        if isinstance(parent, Sequence):
            parent.items.append(node)
            return
        key = self._keys[-1]
        if key is None:
            if not isinstance(node, Scalar) or node.value is None:
                raise _wrong(node.line, "a key must be a word")
            self._keys[-1] = node
            return
        name = str(key.value)
        if name in parent.items:
            raise _wrong(key.line, f"the key {name!r} is there twice; the first is in line {parent.lines[name]}")
        parent.items[name] = node
        parent.lines[name] = key.line
        self._keys[-1] = None


def _merge(node: Mapping) -> None:
    """``<<: *defaults``: what another mapping says, where this one says nothing."""
    others = node.items.pop("<<", None)
    if others is None:
        return
    for other in others.items if isinstance(others, Sequence) else [others]:
        if not isinstance(other, Mapping):
            raise _wrong(node.lines["<<"], "<< takes a mapping, or a list of some")
        for key, value in other.items.items():
            if key not in node.items:
                node.items[key] = value
                node.lines[key] = other.lines[key]


def _refuse_tag(event: Any, line: int) -> None:
    if event.tag not in (None, "!") and event.tag not in _PLAIN_TAGS:
        raise _wrong(line, f"the tag {event.tag} is not possible in a job file")


def _wrong(line: int, text: str) -> BadJobFile:
    return BadJobFile([Problem(line, text)])


# What every reader of a YAML tree asks of a node, and how it says that something is wrong with it.


class Wrong(Exception):
    """Something wrong with an entry; the other entries can still be read."""

    def __init__(self, line: int, text: str, also: Iterable[Problem] = ()):
        super().__init__(text)
        self.problems = (Problem(line, text), *also)

    @staticmethod
    def all_of(problems: list[Problem]) -> Wrong:
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
