"""A short run of SFT, DPO, GRPO, PPO (all weights, and LoRA) and Q# in bfloat16, each beside its memory plan.

A Llama of 0.3 billion random weights writes sentences of the task ``sentiment``, whose rewards need no other model. It
shows that each algorithm runs, that its figures are finite and that it stays within its plan: not that it learns, which
``python -m benchmarks learning_curves`` does.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import Measurement, device, gpuherd, needs

FAST = ("--max-checks", "2", "--check-interval", "0.2")
STEPS = 6
NEW_TOKENS = 12
MB = 2**20


def measure(quick: bool) -> Iterator[Measurement]:
    """Each algorithm with all weights, GRPO and SFT with LoRA too, and a round of Q#."""
    where = device(quick).partition(":")[0]
    needs("transformers", "tokenizers")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "policy", 64 if quick else 1024, 2 if quick else 24)
        make_model(folder / "value", 64 if quick else 512, 2 if quick else 8)
        for algorithm in ("grpo", "ppo", "sft", "dpo"):
            yield Measurement(algorithm, partial(trained, algorithm, folder, where, lora=False))
        yield Measurement("qsharp", partial(q_sharp, folder))
        for algorithm in ("grpo", "sft"):
            yield Measurement(f"{algorithm}_lora", partial(trained, algorithm, folder, where, lora=True))


def make_model(folder: Path, width: int, layers: int) -> None:
    """Writes a Llama of random weights whose tokens are the words of the task."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from gpuherd.posttrain.data.sentiment import make_tokenizer

    tokenizer = make_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=width // 64, max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def trained(algorithm: str, folder: Path, where: str, *, lora: bool) -> dict[str, Any]:
    """Seconds of the first step and of a later one, and MB taken beside the plan's. Raises ValueError where a figure is
    not finite, or more was taken than planned."""
    if lora:
        needs("peft")
    output = folder / f"{algorithm}_{lora}"
    config = {
        "experiment_name": output.name,
        "training": {
            "algorithm": algorithm, "num_iterations": STEPS, "num_rollouts_per_iteration": 64, "batch_size": 64,
            "use_bf16": True, "eval_every": 0, "max_problems": 512, "learning_rate": 1e-5,
        },
        "model": {
            "model_name_or_path": str(folder / "policy"), "max_new_tokens": NEW_TOKENS, "use_lora": lora,
            "torch_dtype": "bfloat16" if lora else "float32",
        },
        "grpo": {"group_size": 8, "kl_coef": 0.05},
        "ppo": {"kl_coef": 0.05},
        "policy_env": {"env_type": "task", "dataset": "sentiment"},
    }  # fmt: skip
    file = folder / f"{output.name}.yaml"  # JSON is YAML
    file.write_text(json.dumps(config))
    command = ("train", "--config", str(file), "--device", where, "--output", str(output), *FAST)
    planned = json.loads(gpuherd(*command, "--dry-run", "--json", cwd=folder).stdout)["plan"]["memory_mb"]
    gpuherd(*command, cwd=folder)
    curve = [json.loads(line) for line in (output / "curves.jsonl").read_text().splitlines()]
    not_finite = {f"{key} of step {row['step']}" for row in curve for key, value in row.items() if not finite(value)}
    if not_finite or "loss" not in curve[-1] or curve[-1]["step"] != STEPS:
        raise ValueError(f"not finite: {sorted(not_finite)}; last line of the curves: {curve[-1]}")
    log = (output / "run.log").read_text()
    taken = re.search(r"GPU \S+: ([\d.]+) GB allocated, ([\d.]+) GB reserved", log)
    figures = {
        "steps": STEPS,
        "first_step_s": curve[0].get("seconds"),
        "last_step_s": curve[-1].get("seconds"),
        "loss": curve[-1]["loss"],
        "allocated_mb": None if taken is None else float(taken[1]) * 1024,
        "reserved_mb": None if taken is None else float(taken[2]) * 1024,
        "planned_mb": planned,
    }
    return within_plan(figures)


def finite(value: Any) -> bool:
    """Whether a figure of a curve is a finite number, or no number at all."""
    return not isinstance(value, float) or math.isfinite(value)


def within_plan(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures. Raises ValueError where more was reserved than planned."""
    taken, planned = figures["reserved_mb"], figures["planned_mb"]
    if taken is not None and planned is not None and taken > planned:
        raise ValueError(f"more memory than planned: {figures}")
    return figures


def q_sharp(folder: Path) -> dict[str, Any]:
    """One round of Q# as jobs of a queue: rollouts, the classifier's training, guided evaluation."""
    needs("hydra", "omegaconf")
    words = (
        "posttrain", "experiment.name=qsharp", f"output_dir={folder / 'rounds'}", "algos=[QSharp]",
        "rounds_of_training=1", "models=[]", f"models.random.reference={folder / 'policy'}",
        f"models.random.value={folder / 'value'}", "datasets=[]",
        "datasets.sentences={task:sentiment,settings:{train:64,heldout:8,test:32}}", "system.dtype=bf16",
        f"generation={{max_new_tokens:{NEW_TOKENS},temperature:1,top_p:1,batch_size:64}}",
        "evaluation.etas=[0.1]", "evaluation.num_samples=2",
    )  # fmt: skip
    jobs = json.loads(gpuherd(*words, *FAST, "--dry-run", "--json", cwd=folder).stdout)["jobs"]
    gpuherd(*words, *FAST, cwd=folder)
    (run,) = (folder / "rounds/qsharp").iterdir()
    figures: dict[str, Any] = {}
    for job in jobs:
        usage = json.loads((run / "usage" / f"{job['name']}.json").read_text())
        phase = job["phase"] if job["algorithm"] != "reference" else "reference"
        allocated, reserved = (
            None if usage[key] is None else usage[key] / MB for key in ("peak_allocated", "peak_reserved")
        )
        figures[phase] = within_plan(
            {"allocated_mb": allocated, "reserved_mb": reserved, "planned_mb": job["memory_mb"]}
        )
    return figures
