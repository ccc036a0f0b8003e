"""Is this machine set up for experiments? A small real one: data is collected on two GPUs or more, by the very way of
every experiment, with a random model of a few kilobytes that is made for it and removed again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gpuherd.errors import GpuherdError, naming_extras, printable
from gpuherd.gpus.state import Gpu
from gpuherd.posttrain.data.arithmetic import make_tokenizer
from gpuherd.posttrain.runs.guide_names import Collected, ParallelDataGenerator
from gpuherd.posttrain.runs.options import RoundsOptions

_MOST_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Checked:
    """One check: what was looked at, whether it is as it should be, and what was seen."""

    what: str
    passed: bool
    seen: str


def check_setup(
    options: RoundsOptions, gpus: Sequence[Gpu], console: Console, *, simulate: bool
) -> tuple[Checked, ...]:
    """Looks at the GPUs and collects data on them, in a temporary folder. A failure is returned, not raised.

    Args:
        gpus: those that are visible here.
    """
    usable = [gpu for gpu in gpus if gpu.problem is None]
    names = ", ".join(f"{gpu.label}: {printable(gpu.name)}, {gpu.total_mb} MB" for gpu in usable)
    found = [Checked("GPU detection", bool(usable), names or "no GPU; jobs run on the CPU")]
    with tempfile.TemporaryDirectory(prefix="gpuherd-setup-") as folder:
        try:
            found += _collection(options, len(usable), Path(folder), console, simulate)
        except GpuherdError as problem:
            found.append(Checked("parallel data generation", False, str(problem)))
    return tuple(found)


def _collection(options: RoundsOptions, gpus: int, folder: Path, console: Console, simulate: bool) -> list[Checked]:
    model = folder / "model"
    make_model(model)
    workers = min(_MOST_WORKERS, max(2, gpus))
    overrides = [
        "experiment.name=setup",
        f"output_dir={folder}",
        "algos=[QSharp]",
        "models=[]",
        f"models.tiny.reference={model}",
        f"models.tiny.value={model}",
        "datasets=[arithmetic]",
        "datasets.arithmetic.settings={digits:1,train:32,test:4}",
        "system.dtype=fp32",
        "generation.max_new_tokens=4",
        f"data_collection.shards={workers}",
        "data_collection.samples_per_example=2",
    ]
    told = replace(options, dry_run=False, max_gpus=options.max_gpus and max(options.max_gpus, workers))
    generator = ParallelDataGenerator(overrides, options=told, console=console, simulate=simulate)
    return _judged(generator, generator.generate(), gpus)


def _judged(generator: ParallelDataGenerator, collected: Collected, gpus: int) -> list[Checked]:
    run = generator.experiment.folder
    (rows,) = collected.rows.values()
    problems = len({row.problem for row in rows})
    visible = {name: _visible(run.usage_of(name)) for name in collected.figures}
    on_gpus = {device for device in visible.values() if device}
    assigned = ", ".join(f"{name}: {'CPU' if not device else f'GPU {device}'}" for name, device in visible.items())
    # Where others use all GPUs but one, that one has all the work.
    assigned_well = not gpus or (all(visible.values()) and len(on_gpus) >= min(2, gpus))
    log = run.run_log.read_text(encoding="utf-8", errors="replace").splitlines()
    memory = [line.strip() for line in log if line.strip().partition(" ")[0] == "GPU" or ": GPU " in line]
    return [
        Checked(
            "parallel data generation",
            problems == 32 and len(rows) == 64,
            f"{len(rows)} rows of {problems} problems by {len(visible)} workers",
        ),
        Checked("worker assignments", assigned_well, assigned),
        Checked("memory and utilization in run.log", bool(memory), f"{len(memory)} lines that name a GPU"),
    ]


def _visible(path: Path) -> str | None:
    told: Any = json.loads(path.read_bytes())
    value = told["visible"]
    return value if isinstance(value, str) else None


def make_model(folder: Path, *, width: int = 16, layers: int = 2, heads: int = 2, positions: int = 64) -> int:
    """Saves a random llama, the same each time, whose tokens are the characters of sums. Returns how many numbers it
    has: a few thousand unless asked for more. Raises MissingExtra."""
    with naming_extras({"tokenizers": "posttrain", "transformers": "posttrain", "torch": "posttrain"}, "models take"):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging as of_transformers
    of_transformers.disable_progress_bar()  # what is written here is there in a moment
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
