"""Small modules, items and losses for the tests of training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gpuherd.posttrain.engine.checkpoints import capture_random
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.options import OptimiserOptions, StepOptions
from gpuherd.posttrain.engine.state import state_of
from gpuherd.posttrain.engine.train_engine import TrainEngine

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
    world: DistEnv | None = None,
    optimiser: OptimiserOptions | None = None,
    steps: StepOptions | None = None,
    **more: Any,
) -> TrainEngine:
    """A trainee of a net."""
    return TrainEngine(
        net() if module is None else module,
        OptimiserOptions(0.05) if optimiser is None else optimiser,
        StepOptions() if steps is None else steps,
        DistEnv.single() if world is None else world,
        total_steps=10,
        **more,
    )


def trained(one: TrainEngine, steps: Sequence[int], batch: int = 8) -> list[float]:
    """The losses of these steps, a batch of items of its own each."""
    losses = []
    for step in steps:
        mine = one.world.share(items(batch, seed=step))
        figures = one.step(mine, loss_of(one.module), weight)
        assert figures.loss is not None
        losses.append(figures.loss)
    return losses


def held(one: TrainEngine) -> dict[str, list[Any]]:
    """Weights, the optimiser's states and buffers, whole; all processes call it together."""
    state = state_of(one)
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).tolist() for name, each in state.items()
    }


def write_former(folder: Path, one: TrainEngine, step: int, pieces: int = 2) -> Path:
    """A checkpoint of format 1 as the version before wrote it by FSDP in so many processes: the rows of each tensor in
    ``part-N.safetensors``, where they belong in ``part-N.json``."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    state = state_of(one)
    for piece in range(pieces):
        tensors, places = {}, {}
        for name, tensor in state.items():
            whole, start, stop = list(tensor.shape), None, None
            if not name.startswith("buffers/") and tensor.ndim:
                each = -(-tensor.shape[0] // pieces)
                start, stop = min(piece * each, whole[0]), min((piece + 1) * each, whole[0])
                tensor = tensor[start:stop]
            tensors[name], places[name] = tensor.clone(), [whole, start, stop]
        save_file(tensors, path / f"part-{piece:05d}.safetensors")
        (path / f"part-{piece:05d}.json").write_text(json.dumps({"places": places, "numbers": {}}))
        (path / f"random-{piece:05d}.json").write_text(json.dumps(capture_random("cpu")))
    about = {
        "format": 1,
        "step": step,
        "world_size": pieces,
        "identity": {},
        "counters": one.counters(),
        "extra": {"place": step},
        "files": {each.name: each.stat().st_size for each in path.iterdir()},
    }
    (path / "checkpoint.json").write_text(json.dumps(about))
    return path
