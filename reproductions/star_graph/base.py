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

from gpuherd.jobs.durable import atomic_write
from gpuherd.posttrain.problem import Problem, Split
from gpuherd.posttrain.tasks.star_graph import Settings, StarGraphs, make_tokenizer
from gpuherd.report.progress import track
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
    import torch

    sets = {length: graphs(protocol, length, 1_000 + seed, protocol.base_graphs) for length in protocol.base_lengths}
    held = {length: task.problems(Split.HELDOUT, None, 0) for length, task in sets.items()}
    train = {length: task.problems(Split.TRAIN, None, 0) for length, task in sets.items()}
    tokenizer = make_tokenizer(folder / "tokenizer", protocol.nodes)
    model = _model(protocol, seed, tokenizer)
    optimiser = torch.optim.AdamW(model.parameters(), lr=protocol.base_lr, weight_decay=0.1)
    rise = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / 50))
    drawing = random.Random(f"base {seed}")  # noqa: S311 - not a secret
    began, looked = time.process_time(), []
    encoded = {length: [_encoded(tokenizer, each) for each in some] for length, some in train.items()}
    for step in track(console, range(1, protocol.base_steps + 1), f"{protocol.name} seed {seed}: base"):
        rows = [
            drawing.choice(encoded[protocol.base_lengths[place % len(encoded)]]) for place in range(protocol.base_batch)
        ]
        ids, labels, mask = _batch(rows, tokenizer)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        rise.step()
        if step % protocol.checkpoint_every == 0:
            looked.append(_look(model, tokenizer, protocol, held, step, time.process_time() - began))
            place = folder / f"step-{step:05d}"
            model.save_pretrained(place)
            tokenizer.save_pretrained(place)
    atomic_write(folder / "base.json", json.dumps([asdict(each) for each in looked], indent=1).encode() + b"\n")


def _model(protocol: Protocol, seed: int, tokenizer: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = protocol.model
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=shape.width,
            intermediate_size=2 * shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            max_position_embeddings=256,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            tie_word_embeddings=False,
        )
    )


def _encoded(tokenizer: Any, problem: Problem) -> tuple[list[int], int]:
    """All tokens of a problem with its path and the end, and how many of them are the prompt's."""
    prompt = tokenizer(problem.prompt, add_special_tokens=False)["input_ids"]
    path = tokenizer(problem.answers[0], add_special_tokens=False)["input_ids"]
    return [*prompt, *path, tokenizer.eos_token_id], len(prompt)


def _batch(rows: Sequence[tuple[list[int], int]], tokenizer: Any) -> tuple[Any, Any, Any]:
    """Ids, labels (-100 but for the path and the end) and mask, padded at the right: (rows, longest) int64."""
    import torch

    longest = max(len(ids) for ids, _ in rows)
    ids = [ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows]
    labels = [[-100] * asked + row[asked:] + [-100] * (longest - len(row)) for row, asked in rows]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row, _ in rows]
    return torch.tensor(ids), torch.tensor(labels), torch.tensor(mask)


def _look(
    model: Any, tokenizer: Any, protocol: Protocol, held: dict[int, Sequence[Problem]], step: int, cpu_s: float
) -> Looked:
    import torch

    right, edges = 0.0, {}
    model.eval()
    with torch.no_grad():
        for length, problems in held.items():
            some = problems if length == protocol.length else problems[: len(problems) // 4]
            rows = [_encoded(tokenizer, each) for each in some]
            ids, _, mask = _batch(rows, tokenizer)
            asked = rows[0][1]  # of one length all prompts are equally long
            log_probs = model(input_ids=ids, attention_mask=mask).logits[:, asked - 1 : -1].log_softmax(dim=-1)
            path = ids[:, asked:]
            if length == protocol.length:
                right = float(log_probs.gather(2, path[:, :, None]).sum(dim=(1, 2)).exp().mean())
            behind = slice(2, length)
            edges[str(length)] = float((log_probs.argmax(dim=-1) == path)[:, behind].float().mean())
    model.train()
    return Looked(step, right, edges, cpu_s)
