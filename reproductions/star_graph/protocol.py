"""What is run, fixed before any method was: sizes, budgets, learning rates, and when a base counts. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reproductions.comparison import Budget
from reproductions.imitation import Shape

METHODS = ("next-token", "REINFORCE", "RPO", "RPO 0.0001", "DPO", "DPO 0.0001", "GRPO", "CD", "Q#", "PITA")


@dataclass(frozen=True)
class Protocol:
    """Of one graph G(d, l).

    Attributes:
        degree, length, nodes: d, l and N of the graph.
        base_lengths: what the base is trained on, in equal parts; the longer ones teach it to follow edges.
        base_graphs: of each of these lengths, drawn once.
        base_steps, base_batch, base_lr: of the base; constant after 50 steps of warm-up, AdamW, weight decay 0.1.
        checkpoint_every: steps between the bases that are looked at.
        budget: of each method.
        shape: of the model, 0.17 M parameters without its embeddings' few thousand.
        test: graphs of the test, each answered once at temperature 1.
        gate: held-out graphs that decide whether a base counts.
    """

    degree: int
    length: int
    nodes: int
    base_steps: int
    budget: Budget
    base_lengths: tuple[int, ...] = (3, 4, 5)
    base_graphs: int = 32_000
    base_batch: int = 96
    base_lr: float = 1e-3
    checkpoint_every: int = 250
    shape: Shape = field(default_factory=Shape)
    test: int = 1_000
    gate: int = 2_000

    @property
    def name(self) -> str:
        """As papers write it."""
        return f"G({self.degree},{self.length})"


PROTOCOLS: Mapping[tuple[int, int], Protocol] = {
    (2, 3): Protocol(degree=2, length=3, nodes=12, base_steps=1_500, budget=Budget(600, 96, 4)),
    (3, 3): Protocol(degree=3, length=3, nodes=14, base_steps=6_000, budget=Budget(600, 96, 4)),
    (2, 4): Protocol(degree=2, length=4, nodes=12, base_steps=1_500, budget=Budget(3_000, 96, 5)),
    (5, 5): Protocol(degree=5, length=5, nodes=24, base_steps=10_000, base_lengths=(5,), budget=Budget(3_000, 96, 6)),
}

# A base counts where it takes the shortcut, and follows edges. Methods' results have no part in this.
SHORTCUT_WITHIN = 0.03  # of 1/d: the probability that it gives to the right path, on average
EDGES_ABOVE = 0.95  # of the nodes behind the first choice: the right one is the most probable, at each longer length
