"""Which algorithms an experiment has, and with which options: names become classes, values their options.

An algorithm's module is imported here, and is light: none imports torch with its options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import algorithm_class, canonical
from gpuherd.posttrain.config.typed import read

# Keys of a block under ``algos`` that are the experiment's and not the algorithm's.
_OURS = ("enabled", "algorithm")


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm of an experiment.

    Attributes:
        name: its key under ``algos``; what its jobs and results are called by.
        algorithm: the name in the registry.
        options: of its ``Options``, checked.
        guided: its policies are the reference with a classifier.
        draws: whether it learns by the log-probs of what was drawn for it.
        collects: whether it learns from rows that are collected before. With ``online`` it samples while it trains,
            with ``preferences`` it learns from a file.
    """

    name: str
    algorithm: str
    options: Any
    guided: bool
    draws: bool
    collects: bool

    def make(self) -> Any:
        """The algorithm itself."""
        return algorithm_class(self.algorithm)(self.options)


def choices_of(blocks: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Mapping[str, Any]]) -> tuple[Choice, ...]:
    """The enabled algorithms of ``algos`` in order.

    Args:
        shared: by block of the configuration, options for all algorithms that have them and set none of this name
            themselves.

    Raises UsageError: a name that is no algorithm, an option that is none; something shared that no algorithm reads.
    """
    found = []
    read_by: set[str] = set()
    common = {key: value for block in shared.values() for key, value in block.items()}
    for name, block in blocks.items():
        where = f"algos.{name}"
        if not isinstance(block, Mapping):
            raise UsageError(f"{where} should be a mapping of options, as in {where}.enabled=true")
        ours = read(_Block, {key: block[key] for key in _OURS if key in block}, where)
        algorithm = canonical(name if ours.algorithm is None else ours.algorithm)
        kind = algorithm_class(algorithm)
        given = {key: value for key, value in block.items() if key not in _OURS}
        fields = {each.name for each in dataclasses.fields(kind.Options)}
        also = {key: value for key, value in common.items() if key in fields}
        options = read(kind.Options, {**also, **given}, where)
        if ours.enabled:
            read_by |= fields
            made = kind(options)
            found.append(Choice(name, algorithm, options, made.guided, made.draws, made.collects))
    for where, key in ((where, key) for where, several in shared.items() for key in several):
        if found and key not in read_by:
            raise UsageError(f"{where}.{key}: none of {', '.join(each.name for each in found)} reads it")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Block:
    enabled: bool = True
    algorithm: str | None = None
