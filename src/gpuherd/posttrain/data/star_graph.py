"""Star graphs G(d, l): d arms of l nodes, the shared start counted; which arm leads to the goal?

Bachmann and Nagarajan 2024 (arXiv 2403.06963); with post-training, Zhou et al. 2025 (arXiv 2502.20548, appendix C). A
model trained on the next token learns to follow an arm but not which one: it answers right in one of d cases. The text
is that of their code: ``32,3|16,12|47,28/32,12=32,34,6,16,12``: edges, start and goal, the path with its start. Of
G(2, 2) both nodes of the answer stand in the prompt; G(d, 3) needs one look-up.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.dataset import content_id
from gpuherd.posttrain.data.generated import MOST_PROBLEMS, SHARES, GeneratedTask, generated, write_tokenizer
from gpuherd.posttrain.types import Problem, Reward, Split
from gpuherd.qa.span import answer_in

_MOST_NODES = 10_000
_SIGNS = ("|", "=", "/", "$")


@dataclass(frozen=True, slots=True)
class Settings:
    """Which graphs.

    Attributes:
        degree: d, arms.
        length: l, nodes of an arm with the start.
        nodes: N, labels that a graph's nodes are drawn from without repetition.
        train, heldout, test: graphs in each split.
        seed: of the sets. Those of another seed are other sets, and never hold a graph of this one's test.
    """

    degree: int = 2
    length: int = 5
    nodes: int = 50
    train: int = 200_000
    heldout: int = 1_000
    test: int = 20_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.degree < 2 or self.length < 2:
            raise UsageError(f"degree={self.degree}, length={self.length}; each is at least 2")
        if self.nodes > _MOST_NODES:
            raise UsageError(f"nodes={self.nodes}; {_MOST_NODES} at most")
        if self.nodes < self.used:
            raise UsageError(f"a graph has {self.used} nodes; nodes={self.nodes} labels are too few")
        for split in Split:
            wanted = getattr(self, split.value)
            if not 0 <= wanted <= MOST_PROBLEMS:
                raise UsageError(f"{split}={wanted}; from 0 to {MOST_PROBLEMS}")
            if 2 * wanted > (most := self.texts * len(SHARES[split]) // 10):
                raise UsageError(
                    f"{split}={wanted}; there are about {most} such problems and at most half of them are "
                    f"drawn; ask for fewer, or for more nodes"
                )

    @property
    def used(self) -> int:
        """Nodes of one graph."""
        return 1 + self.degree * (self.length - 1)

    @property
    def texts(self) -> int:
        """How many different problems there are, other orders of edges counted."""
        graphs = math.perm(self.nodes, self.used) // math.factorial(self.degree - 1)
        return graphs * math.factorial(self.used - 1)


@dataclass(frozen=True, slots=True)
class StarGraph:
    """A graph and its question, as a prompt says them; edges lead away from the start."""

    edges: tuple[tuple[int, int], ...]
    start: int
    goal: int

    @property
    def arms(self) -> tuple[tuple[int, ...], ...]:
        """The paths from the start to the end of each arm, in the order of their first edges in the text."""
        following = dict(edge for edge in self.edges if edge[0] != self.start)
        arms = []
        for start, node in self.edges:
            if start == self.start:
                arm = [start, node]
                while arm[-1] in following and len(arm) <= len(self.edges):
                    arm.append(following[arm[-1]])
                arms.append(tuple(arm))
        return tuple(arms)


@dataclass(frozen=True, slots=True)
class PathCheck:
    """What a completion is as a path.

    Attributes:
        nodes: as it says them; None where it is not a list of numbers.
        follows: for each node whether it may stand there: the first is the start, the others are reached by an edge
            from the one before.
        right: it is the path from the start to the goal.
    """

    nodes: tuple[int, ...] | None
    follows: tuple[bool, ...]
    right: bool


@generated("star_graph", Settings)
class StarGraphs(GeneratedTask[Settings]):
    """The task: fixed sets of graphs."""

    def generate(self, split: Split) -> Iterator[Problem]:
        """The split's set: graphs are drawn until enough of them are of this split and new."""
        settings = self.settings
        key = f"star graph {settings.degree} {settings.length} {settings.nodes} {settings.seed} {split}"
        drawing = random.Random(key)  # noqa: S311 - not a secret
        known: set[str] = set()
        while len(known) < getattr(settings, split.value):
            nodes = drawing.sample(range(settings.nodes), settings.used)
            start, rest, arm = nodes[0], nodes[1:], settings.length - 1
            arms = [(start, *rest[first : first + arm]) for first in range(0, len(rest), arm)]
            if _share(arms) not in SHARES[split]:
                continue
            edges = [edge for each in arms for edge in itertools.pairwise(each)]
            drawing.shuffle(edges)
            prompt = f"{'|'.join(f'{one},{other}' for one, other in edges)}/{start},{arms[0][-1]}="
            if prompt not in known:
                known.add(prompt)
                yield Problem(content_id(prompt), prompt, (",".join(map(str, arms[0])),))

    def reward(self, problem: Problem, completion: str) -> Reward:
        """1 for the exact path; a part says which share of its nodes follow edges."""
        check = check_path(graph_of(problem.prompt), answer_in(completion))
        if check.nodes is None:
            return Reward(0.0, False, {"edges": 0.0}, "not a list of nodes")
        edges = sum(check.follows) / len(check.follows)
        note = None if check.right else "follows edges, not to the goal" if edges == 1 else "follows no edge somewhere"
        return Reward(float(check.right), check.right, {"edges": edges}, note)


def graph_of(prompt: str) -> StarGraph:
    """The graph of a prompt. Raises ValueError where it is not of this form.

    >>> graph_of("5,2|3,8|5,3|2,7/5,8=").arms
    ((5, 2, 7), (5, 3, 8))
    """
    edges, _, question = prompt.removesuffix("=").partition("/")
    pairs = [tuple(map(int, edge.split(","))) for edge in edges.split("|")]
    start, goal = map(int, question.split(","))
    return StarGraph(tuple((one, other) for one, other in pairs), start, goal)


def check_path(graph: StarGraph, completion: str) -> PathCheck:
    """A completion as a path; its numbers may be divided by commas or white space."""
    words = completion.replace(",", " ").split()
    if not words or not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        return PathCheck(None, (), False)
    nodes = tuple(map(int, words))
    edges = set(graph.edges)
    follows = (nodes[0] == graph.start, *(edge in edges for edge in itertools.pairwise(nodes)))
    right = any(nodes == arm for arm in graph.arms if arm[-1] == graph.goal)
    return PathCheck(nodes, follows, right)


def make_tokenizer(folder: Path, nodes: int) -> Any:
    """A tokenizer of one token a node and a sign, saved into the folder and returned; commas are dropped, as in the
    published runs from scratch. ``</s>`` is 0 and ``<pad>`` 1; a text is decoded with spaces between its tokens."""
    from tokenizers import Regex, pre_tokenizers

    parts = [pre_tokenizers.Split(Regex(r"[,\s]+"), "removed"), pre_tokenizers.Split(Regex(r"[|=/$]"), "isolated")]
    return write_tokenizer(folder, [*_SIGNS, *map(str, range(nodes))], pre_tokenizers.Sequence(parts))


def _share(arms: Sequence[Sequence[int]]) -> int:
    """Which tenth of all graphs one belongs to, the first arm being the path."""
    text = f"{list(arms[0])} {sorted(map(list, arms[1:]))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % 10
