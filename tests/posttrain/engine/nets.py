"""Small modules, items and losses for the tests of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpuherd.posttrain.engine.options import OptimiserOptions, StepOptions
from gpuherd.posttrain.engine.trainee import Trainee
from gpuherd.posttrain.engine.world import World

WIDTH = 6


class Block(nn.Module):
    """A layer with a matrix, a bias and dropout."""

    def __init__(self, dropout: float):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        """The next values."""
        moved: Tensor = self.dropout(torch.tanh(self.linear(values)))
        return values + moved


class Net(nn.Module):
    """A tower of blocks with an odd number of outputs (5: it can't be divided evenly)."""

    def __init__(self, dropout: float = 0.0, blocks: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 5)
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor

    def forward(self, values: Tensor) -> Tensor:
        """Logits."""
        self.count += 1
        for layer in self.layers:
            values = layer(values)
        return self.head(values)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Item:
    """Inputs, a right class, and what the item weighs."""

    values: tuple[float, ...]
    label: int
    weight: float = 1.0


def net(seed: int = 0, dropout: float = 0.0, blocks: int = 3) -> Net:
    """A net of these random weights; the generator's state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(dropout, blocks)


def items(count: int, seed: int = 0) -> list[Item]:
    """Random items of different weights."""
    drawn = torch.Generator().manual_seed(seed)
    values = torch.randn(count, WIDTH, generator=drawn).tolist()
    labels = torch.randint(5, (count,), generator=drawn).tolist()
    return [
        Item(tuple(each), label, 1.0 + number % 3)
        for number, (each, label) in enumerate(zip(values, labels, strict=True))
    ]


def loss_of(module: Any) -> Any:
    """The weighted sum of cross-entropies under a module."""

    def loss_sum(batch: Sequence[Item]) -> Tensor:
        logits = module(torch.tensor([each.values for each in batch]))
        losses = nn.functional.cross_entropy(
            logits.float(), torch.tensor([each.label for each in batch]), reduction="none"
        )
        return (losses * torch.tensor([each.weight for each in batch])).sum()

    return loss_sum


def weight(batch: Sequence[Item]) -> float:
    """What the items weigh."""
    return sum(each.weight for each in batch)


def trainee(
    module: nn.Module | None = None,
    world: World | None = None,
    optimiser: OptimiserOptions | None = None,
    steps: StepOptions | None = None,
    **more: Any,
) -> Trainee:
    """A trainee of a net."""
    return Trainee(
        net() if module is None else module,
        OptimiserOptions(0.05) if optimiser is None else optimiser,
        StepOptions() if steps is None else steps,
        World.single() if world is None else world,
        total_steps=10,
        **more,
    )


def trained(one: Trainee, steps: Sequence[int], batch: int = 8) -> list[float]:
    """The losses of these steps, a batch of items of its own each."""
    losses = []
    for step in steps:
        mine = one.world.share(items(batch, seed=step))
        figures = one.step(mine, loss_of(one.module), weight)
        assert figures.loss is not None
        losses.append(figures.loss)
    return losses
