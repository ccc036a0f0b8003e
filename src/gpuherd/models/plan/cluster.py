"""The GPUs of a cluster's node, for which jobs that name a model are planned: as the user says, or as the cluster does.

No driver is asked: where a command is typed there need not be a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from gpuherd.engines.base import node_gpus
from gpuherd.engines.options import ClusterOptions, EngineOptions
from gpuherd.errors import UsageError
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.cards import parse_cards
from gpuherd.models.plan.kinds import kind_named, nearest_kinds

FLAG = "--node-gpus"
_SAY = f"say what a node has by {FLAG}, like {FLAG} 4xA100-80GB"


def node_cards(options: EngineOptions | ClusterOptions) -> tuple[Card, ...]:
    """The GPUs of one node of the cluster that these options name, as free as when nobody uses them.

    Raises UsageError where neither the user nor the cluster says what they are; EngineMissing, EngineAway.
    """
    if options.node_gpus is not None:
        return said_cards(options.node_gpus)
    return _told(options.engine, options.partition, options.gpu_type)


def said_cards(words: str) -> tuple[Card, ...]:
    """The GPUs of a node as ``--node-gpus`` says them. Raises UsageError for words that make no sense."""
    return parse_cards(words, flag=FLAG)


@cache
def _told(engine: str, partition: str | None, gpu_type: str | None) -> tuple[Card, ...]:
    """Asked once: the jobs of a file may name many models."""
    nodes = node_gpus(engine, partition)
    if nodes is None:
        raise UsageError(f"--engine {engine} doesn't tell what GPUs a node has, and a model is to be planned; {_SAY}")
    return cards_of_nodes(nodes, gpu_type)


def cards_of_nodes(nodes: Sequence[Mapping[str, int]], gpu_type: str | None) -> tuple[Card, ...]:
    """The cards of the largest node. Pure.

    Args:
        nodes: GPUs of each node, how many of each type; "" where the site names no types.
        gpu_type: jobs get GPUs of this type alone.

    Raises UsageError for nodes without GPUs, for several types of which a job could get any, and for a type of which
    it isn't known how much memory it has.

    >>> [card.name for card in cards_of_nodes([{"h100": 2}, {}, {"h100": 4}], None)]
    ['H100', 'H100', 'H100', 'H100']
    """
    wanted = [{name: many for name, many in node.items() if gpu_type in (None, name)} for node in nodes]
    types = sorted({name for node in wanted for name in node})
    if not types:
        raise UsageError(f"SLURM tells of no GPUs there, and a model is to be planned; {_SAY}")
    if len(types) > 1:
        told = ", ".join(name or "without a type" for name in types)
        raise UsageError(f"the nodes there have GPUs of several types ({told}); choose one by --gpu-type, or {_SAY}")
    (name,) = types
    if not name:
        raise UsageError(f"SLURM does not tell of what type its GPUs are, and a model is to be planned; {_SAY}")
    word = name.replace("_", " ")
    kind = kind_named(word)
    if kind is None:
        near = nearest_kinds(word)
        meant = f" (is it {' or '.join(near)}?)" if near else ""
        raise UsageError(f"SLURM calls the GPUs {name!r}: how much memory they have is not known{meant}; {_SAY}")
    return parse_cards(f"{max(node.get(name, 0) for node in wanted)}x{kind.name}")
