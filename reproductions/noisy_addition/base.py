"""The base: next-token training on sums of which half the labels are wrong, until it knows them all the same."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from gpuherd.jobs.durable import atomic_write
from gpuherd.posttrain.problem import Problem, Split
from gpuherd.posttrain.tasks.arithmetic import Arithmetic, Settings, make_tokenizer
from gpuherd.report.progress import track
from reproductions.imitation import encoded, forced, imitating, small_llama
from reproductions.noisy_addition.protocol import Looked, Protocol, chosen_base


def sums(protocol: Protocol, seed: int, *, wrong_labels: float = 0.0) -> Arithmetic:
    """The task; which sums are in which split does not depend on the labels."""
    return Arithmetic(
        Settings(
            train=protocol.problems,
            heldout=protocol.heldout,
            test=protocol.test,
            wrong_labels=wrong_labels,
            seed=seed,
        )
    )


def make_base(protocol: Protocol, seed: int, folder: Path, console: Console) -> tuple[Path | None, list[Looked]]:
    """Trains the base (done once) and returns its folder, None where the seed is not valid, with all checkpoints."""
    record = folder / "base.json"
    if not record.exists():
        looked = _train(protocol, seed, folder, console)
        atomic_write(record, json.dumps([asdict(each) for each in looked], indent=1).encode() + b"\n")
    looked = [Looked(**each) for each in json.loads(record.read_text())]
    return (None if chosen_base(protocol, looked) is None else folder / "model"), looked


def _train(protocol: Protocol, seed: int, folder: Path, console: Console) -> list[Looked]:
    tokenizer = make_tokenizer(folder / "model")
    train = sums(protocol, seed, wrong_labels=protocol.wrong_labels).problems(Split.TRAIN, None, 0)
    held = sums(protocol, seed).problems(Split.HELDOUT, None, 0)
    model = small_llama(protocol.shape, tokenizer, seed)
    drawing = random.Random(f"base {seed}")
    examples = [encoded(tokenizer, each) for each in train]
    batches = (
        drawing.choices(examples, k=protocol.base_batch)
        for _ in track(console, range(protocol.base_steps), f"addition, seed {seed}: base")
    )
    began, looked = time.process_time(), list[Looked]()
    for step in imitating(model, tokenizer.pad_token_id, batches, protocol.base_lr):
        if step % protocol.checkpoint_every == 0:
            looked.append(_look(model, tokenizer, held, step, time.process_time() - began))
            if looked[-1].passes(protocol):
                break
    model.save_pretrained(folder / "model")
    return looked


def _look(model: Any, tokenizer: Any, held: Sequence[Problem], step: int, cpu_s: float) -> Looked:
    log_probs, likeliest = forced(model, [encoded(tokenizer, each) for each in held], tokenizer.pad_token_id)
    right = float(log_probs.sum(dim=1).exp().mean())
    return Looked(step, float(likeliest.all(dim=1).float().mean()), right, cpu_s)
