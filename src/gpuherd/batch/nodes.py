"""What every reader of a YAML tree asks of a node, and how it says that something is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable

from gpuherd.batch.draft import Problem
from gpuherd.batch.yaml_tree import Mapping, Node, Scalar


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
