"""The base: next-token training on sums, then on labels of which half are wrong, until half of its own are right."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gpuherd.atomic import atomic_write
from gpuherd.posttrain.data.arithmetic import Arithmetic, Settings, make_tokenizer
from gpuherd.posttrain.types import Problem, Split
from gpuherd.runs.console import track
from reproductions.imitation import encoded, forced, imitating, small_llama
from reproductions.noisy_addition.protocol import Looked, Protocol, chosen_base

FURTHEST = 10  # a wrong label is so far from the right one at most


def sums(protocol: Protocol, seed: int) -> Arithmetic:
    """The task, whose answers are right."""
    return Arithmetic(Settings(train=protocol.problems, heldout=protocol.heldout, test=protocol.test, seed=seed))


def mislabelled(problem: Problem, wrong: float, drawing: random.Random) -> Problem:
    """With this probability one whose answer is another number, up to ``FURTHEST`` away, drawn anew each time: labels
    that stay the same are learnt by heart, and the sums are not."""
    if drawing.random() >= wrong:
        return problem
    right = int(problem.answers[0])
    near = [number for number in range(max(0, right - FURTHEST), right + FURTHEST + 1) if number != right]
    return replace(problem, answers=(str(drawing.choice(near)),))


def make_base(protocol: Protocol, seed: int, folder: Path, console: Console) -> tuple[Path | None, list[Looked]]:
    """Trains the base (done once) and returns its folder, None where the seed is not valid, with all checkpoints."""
    record = folder / "base.json"
    if not record.exists():
        looked = _train(protocol, seed, folder, console)
        atomic_write(record, json.dumps([asdict(each) for each in looked], indent=1).encode() + b"\n")
    looked = [Looked(**each) for each in json.loads(record.read_text())]
    return (None if chosen_base(looked) is None else folder / "model"), looked


def _train(protocol: Protocol, seed: int, folder: Path, console: Console) -> list[Looked]:
    tokenizer = make_tokenizer(folder / "model")
    task = sums(protocol, seed)
    train, held = (task.problems(split, None, 0) for split in (Split.TRAIN, Split.HELDOUT))
    model = small_llama(protocol.shape, tokenizer, seed)
    drawing = random.Random(f"base {seed}")
    began, looked = time.process_time(), list[Looked]()
    for number, phase in enumerate(protocol.phases, 1):
        batches = (
            [
                encoded(tokenizer, mislabelled(each, phase.wrong, drawing))
                for each in drawing.choices(train, k=protocol.batch)
            ]
            for _ in track(console, range(phase.steps), f"addition, seed {seed}: base, phase {number}")
        )
        for step in imitating(model, tokenizer.pad_token_id, batches, phase.lr):
            if phase is protocol.phases[-1] and step % protocol.look_every == 0:
                looked.append(_look(model, tokenizer, held, step, time.process_time() - began))
                if looked[-1].passes:
                    break
    model.save_pretrained(folder / "model")
    return looked


def _look(model: Any, tokenizer: Any, held: Sequence[Problem], step: int, cpu_s: float) -> Looked:
    log_probs, likeliest = forced(model, [encoded(tokenizer, each) for each in held], tokenizer.pad_token_id)
    right = float(log_probs.sum(dim=1).exp().mean())
    return Looked(step, float(likeliest.all(dim=1).float().mean()), right, cpu_s)
