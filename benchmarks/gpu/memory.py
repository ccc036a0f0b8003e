"""Memory that CUDA gave out for a model and for its largest pass, beside what the plan expected, by dtype."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import Measurement, device, needs, python

DTYPES = ("fp32", "bf16", "fp16", "int8", "nf4")
MB = 2**20


def measure(quick: bool) -> Iterator[Measurement]:
    """A Llama of 0.45 billion random weights, loaded in each dtype."""
    device(quick)
    needs("transformers")
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), quick=quick)
        for dtype in DTYPES:
            yield Measurement(dtype, partial(loaded, Path(name), dtype))


def make_model(folder: Path, *, quick: bool) -> None:
    """Writes the model: large enough that the allocator's rounding does not count."""
    import torch
    import transformers

    width, layers = (64, 2) if quick else (2048, 6)
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 32,
        num_key_value_heads=width // 64, vocab_size=32000, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def loaded(folder: Path, dtype: str) -> dict[str, Any]:
    """MB of the weights and at the peak of a prompt of 8 x 512 tokens. Raises ValueError where the peak is over the
    plan, the weights are off by more than 3 %, or a number that came out is not finite."""
    if dtype in ("int8", "nf4"):
        needs("bitsandbytes")
    report = folder / f"{dtype}.json"
    python("-m", "gpuherd.models.load.worker", str(folder), "--dtype", dtype, "--batch", "8", "--json", str(report))
    found = json.loads(report.read_text())
    (place,), trial = found["devices"], found["trial"]
    taken = place["cuda_bytes"] if place["cuda_bytes"] is not None else place["real_bytes"]
    figures = {
        "weights_mb": taken / MB,
        "weights_planned_mb": place["predicted_bytes"] / MB,
        "peak_mb": sum(trial["peak_bytes"].values()) / MB,
        "peak_planned_mb": sum(trial["planned_bytes"].values()) / MB,
    }
    off = abs(taken / place["predicted_bytes"] - 1)
    if off > 0.03 or not trial["within_plan"] or not trial["finite"]:
        raise ValueError(f"{figures}; finite: {trial['finite']}")
    return figures
