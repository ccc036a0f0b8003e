"""Data generation over two workers against one: the first round's rows of Q#, by the very way of every experiment.

A random llama of 25 million numbers answers sums on the CPU, each worker with one thread, as jobs on two simulated
GPUs. Wall-clock seconds, so a quiet machine with two cores is needed. Told are the whole (a dispatcher, workers that
import torch and load the model) and the collecting alone, of the slowest worker. Rows must not depend on the workers,
to the bit.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from gpuherd.posttrain.data.arithmetic import make_tokenizer
from gpuherd.posttrain.runs.guide_names import Collected, ParallelDataGenerator
from gpuherd.posttrain.runs.options import RoundsOptions
from gpuherd.standin.machine import SimulatedMachine


def run(*, quick: bool) -> dict[str, Any]:
    """Collects with one worker and with two, in turn, and compares."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    repeats, problems, width = (1, 16, 64) if quick else (3, 96, 512)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        numbers = make_model(folder / "model", width=width, layers=6, heads=8, positions=256)
        machine = SimulatedMachine.create(folder / "machine", "2x80GB")
        machine.activate()
        os.environ["GPUHERD_LEASE_DIR"] = str(folder / "leases")
        try:
            found = {
                workers: [collected(folder, workers, problems, number) for number in range(repeats)]
                for workers in (1, 2)
            }
        finally:
            machine.deactivate()
    rows = {each["rows"] for runs in found.values() for each in runs}
    whole = {workers: min(each["wall_s"] for each in runs) for workers, runs in found.items()}
    work = {workers: min(each["collecting_s"] for each in runs) for workers, runs in found.items()}
    return {
        "parameters": numbers,
        "problems": problems,
        "rows_equal": len(rows) == 1,
        "repeats": repeats,
        "best_wall_s": whole,
        "best_collecting_s": work,
        "speed_up_whole": whole[1] / whole[2],
        "speed_up_collecting": work[1] / work[2],
    }


def collected(folder: Path, workers: int, problems: int, number: int) -> dict[str, Any]:
    """One collection: seconds in all, seconds of the slowest worker's collecting, and the texts of the rows."""
    overrides = [
        "experiment.name=collect",
        f"output_dir={folder / f'{workers}-{number}'}",
        "algos=[QSharp]",
        "algos.QSharp.samples_per_example=4",
        "models=[]",
        f"models.random.reference={folder / 'model'}",
        f"models.random.value={folder / 'model'}",
        "datasets=[arithmetic]",
        f"datasets.arithmetic.settings={{digits:2,train:{problems},test:8}}",
        "system={dtype:fp32,attn_impl:sdpa}",
        f"generation={{max_new_tokens:48,batch_size:{min(16, problems // 2)},temperature:1,top_p:1}}",
        f"data_collection.shards={workers}",
    ]
    options = RoundsOptions(max_gpus=2, max_checks=1, check_interval=0.05)
    generator = ParallelDataGenerator(overrides, options=options, console=Console(quiet=True), simulate=True)
    started = time.perf_counter()
    found = generator.generate()
    wall = time.perf_counter() - started
    return {
        "wall_s": wall,
        "collecting_s": slowest(found),
        "rows": tuple(row for rows in found.rows.values() for row in rows),
    }


def slowest(found: Collected) -> float:
    """Seconds of collecting of the worker that took longest, its model's loading in it."""
    return max(float(each["seconds_last_start"]) for each in found.figures.values())


def make_model(folder: Path, *, width: int, layers: int, heads: int, positions: int) -> int:
    """Saves a random llama, the same each time, whose tokens are the characters of sums. Returns its number of
    weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(each.numel() for each in model.parameters())
