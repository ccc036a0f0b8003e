"""The base: next-token training on true paths alone, until it follows edges but has not seen through the shortcut.

A checkpoint is looked at every so many steps, by held-out graphs; the base is the last one that passes both conditions
of ``protocol``. None passes: the seed is not valid, and is reported as that.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from gpuherd.atomic import atomic_write
from gpuherd.posttrain.data.star_graph import Settings, StarGraphs, make_tokenizer
from gpuherd.posttrain.types import Problem, Split
from gpuherd.runs.console import track
from reproductions.imitation import encoded, forced, imitating, small_llama
from reproductions.star_graph.protocol import EDGES_ABOVE, SHORTCUT_WITHIN, Protocol


@dataclass(frozen=True)
class Looked:
    """A checkpoint on held-out graphs.

    Attributes:
        right: the mean probability of the right path, its end included.
        edges: of each length, how often the most probable node behind the first choice is the right one.
    """

    step: int
    right: float
    edges: dict[str, float]
    cpu_s: float

    def passes(self, protocol: Protocol) -> bool:
        """Whether it takes the shortcut and follows edges."""
        longer = [share for length, share in self.edges.items() if int(length) > protocol.length] or [
            *self.edges.values()
        ]
        return abs(self.right - 1 / protocol.degree) < SHORTCUT_WITHIN and min(longer) > EDGES_ABOVE


def chosen_base(protocol: Protocol, looked: Sequence[Looked]) -> Looked | None:
    """The last checkpoint that passes; None where none does."""
    passing = [each for each in looked if each.passes(protocol)]
    return passing[-1] if passing else None


def graphs(protocol: Protocol, length: int, seed: int, train: int) -> StarGraphs:
    """The sets of graphs of this length; those of another seed share no graph with this one's test."""
    return StarGraphs(
        Settings(
            degree=protocol.degree,
            length=length,
            nodes=protocol.nodes,
            train=train,
            heldout=protocol.gate,
            test=protocol.test,
            seed=seed,
        )
    )


def make_base(protocol: Protocol, seed: int, folder: Path, console: Console) -> tuple[Path | None, list[Looked]]:
    """Trains the base (done once) and returns its folder, None where the seed is not valid, with all checkpoints."""
    record = folder / "base.json"
    if not record.exists():
        _train(protocol, seed, folder, console)
    looked = [Looked(**each) for each in json.loads(record.read_text())]
    base = chosen_base(protocol, looked)
    return (None if base is None else folder / f"step-{base.step:05d}"), looked


def _train(protocol: Protocol, seed: int, folder: Path, console: Console) -> None:
    sets = {length: graphs(protocol, length, 1_000 + seed, protocol.base_graphs) for length in protocol.base_lengths}
    held = {length: task.problems(Split.HELDOUT, None, 0) for length, task in sets.items()}
    train = {length: task.problems(Split.TRAIN, None, 0) for length, task in sets.items()}
    tokenizer = make_tokenizer(folder / "tokenizer", protocol.nodes)
    model = small_llama(protocol.shape, tokenizer, seed)
    drawing = random.Random(f"base {seed}")
    began, looked = time.process_time(), []
    examples = {length: [encoded(tokenizer, each) for each in some] for length, some in train.items()}
    batches = (
        [drawing.choice(examples[protocol.base_lengths[place % len(examples)]]) for place in range(protocol.base_batch)]
        for _ in track(console, range(protocol.base_steps), f"{protocol.name} seed {seed}: base")
    )
    for step in imitating(model, tokenizer.pad_token_id, batches, protocol.base_lr):
        if step % protocol.checkpoint_every == 0:
            looked.append(_look(model, tokenizer, protocol, held, step, time.process_time() - began))
            place = folder / f"step-{step:05d}"
            model.save_pretrained(place)
            tokenizer.save_pretrained(place)
    atomic_write(folder / "base.json", json.dumps([asdict(each) for each in looked], indent=1).encode() + b"\n")


def _look(
    model: Any, tokenizer: Any, protocol: Protocol, held: dict[int, Sequence[Problem]], step: int, cpu_s: float
) -> Looked:
    right, edges = 0.0, {}
    for length, problems in held.items():
        some = problems if length == protocol.length else problems[: len(problems) // 4]
        examples = [encoded(tokenizer, each) for each in some]
        log_probs, likeliest = forced(model, examples, tokenizer.pad_token_id)
        if length == protocol.length:
            right = float(log_probs.sum(dim=1).exp().mean())
        before = examples[0].asked - 1  # of one length all prompts are equally long
        edges[str(length)] = float(likeliest[:, before + 2 : before + length].float().mean())
    return Looked(step, right, edges, cpu_s)
