"""The GPUs of a cluster's node, for which jobs that name a model are planned: as the user says, or as the cluster does.

No driver is asked: where a command is typed there need not be a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from gpuherd.engines.options import EngineOptions
from gpuherd.errors import UsageError
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.cards import parse_cards
from gpuherd.models.plan.kinds import kind_named, nearest_kinds

FLAG = "--node-gpus"
_SAY = f"say what a node has by {FLAG}, like {FLAG} 4xA100-80GB"


def node_cards(options: EngineOptions) -> tuple[Card, ...]:
    """The GPUs of one node of the cluster that these options name, as free as when nobody uses them.

    Raises UsageError where neither the user nor the cluster says what they are; EngineMissing, EngineAway.
    """
    return said_cards(options.node_gpus) if options.node_gpus is not None else _told(options)


def said_cards(words: str) -> tuple[Card, ...]:
    """The GPUs of a node as ``--node-gpus`` says them. Raises UsageError for words that make no sense."""
    return parse_cards(words, flag=FLAG)


@cache
def _told(options: EngineOptions) -> tuple[Card, ...]:
    """Asked once: the jobs of a file may name many models."""
    spec = options.spec
    nodes = spec.inventory(options)
    if nodes is None:
        raise UsageError(
            f"--engine {spec.name} doesn't tell what GPUs a node has, and a model is to be planned; {_SAY}"
        )
    return cards_of_nodes(nodes, spec.title, spec.gpu_type_flag)


def cards_of_nodes(nodes: Sequence[Mapping[str, int]], title: str, flag: str | None = None) -> tuple[Card, ...]:
    """The cards of the largest node. Pure.

    Args:
        nodes: GPUs of each node, how many of each type; "" where the site names no types.
        title: the engine's.
        flag: chooses a type, where the engine has such a flag.

    Raises UsageError for nodes without GPUs, for several types of which a job could get any, and for a type of which
    it isn't known how much memory it has.

    >>> [card.name for card in cards_of_nodes([{"h100": 2}, {}, {"h100": 4}], "SLURM")]
    ['H100', 'H100', 'H100', 'H100']
    """
    types = sorted({name for node in nodes for name in node})
    if not types:
        raise UsageError(f"{title} tells of no GPUs there, and a model is to be planned; {_SAY}")
    if len(types) > 1:
        told = ", ".join(name or "without a type" for name in types)
        choose = "" if flag is None else f"choose one by {flag}, or "
        raise UsageError(f"the nodes there have GPUs of several types ({told}); {choose}{_SAY}")
    (name,) = types
    if not name:
        raise UsageError(f"{title} does not tell of what type its GPUs are, and a model is to be planned; {_SAY}")
    word = name.replace("_", " ")
    kind = kind_named(word)
    if kind is None:
        near = nearest_kinds(word)
        meant = f" (is it {' or '.join(near)}?)" if near else ""
        raise UsageError(f"{title} calls the GPUs {name!r}: how much memory they have is not known{meant}; {_SAY}")
    return parse_cards(f"{max(node.get(name, 0) for node in nodes)}x{kind.name}")
