"""A LoRA adapter merged into its base on disk: ours against PEFT's merge_and_unload and save_pretrained.

A Llama of 1.1 billion random bfloat16 weights in five files, and an adapter of rank 16 on all its projections, are
written here. Both ways run in processes of their own, one after the other, several times: CPU-seconds, wall time, and
the peak of anonymous memory (private to the process: pages of mapped files, which can be dropped at any time, are not
counted). Then all tensors of the two results are compared, bit for bit.
"""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MB = 2**20
RANK = 16
SHARDS = 5

OURS = """
import sys
from pathlib import Path
from gpuherd.models.lora.merge import merge_to_folder
merge_to_folder(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
"""
PEFT = """
import sys, warnings
warnings.simplefilter("ignore")
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
PeftModel.from_pretrained(model, sys.argv[2]).merge_and_unload().save_pretrained(sys.argv[3])
"""
IMPORTS = {"ours": "import torch, gpuherd.models.lora.merge", "peft": "import peft, transformers, torch"}


def run(*, quick: bool) -> dict[str, Any]:
    """Writes base and adapter, merges both ways, compares."""
    sizes = (256, 512, 2, 1000) if quick else (2048, 5632, 22, 32_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes = llama_shapes(*sizes)
        write_base(folder / "base", shapes, sizes)
        write_adapter(folder / "adapter", shapes)
        # The first run of each warms the page cache and is not counted.
        runs: dict[str, list[dict[str, float]]] = {"ours": [], "peft": []}
        for turn in range(2 if quick else 4):
            for way, program in (("ours", OURS), ("peft", PEFT)):
                target = folder / way
                shutil.rmtree(target, ignore_errors=True)
                figures = measured(program, folder / "base", folder / "adapter", target)
                if turn:
                    runs[way].append(figures)
        medians = {way: {key: statistics.median(each[key] for each in found) for key in found[0]} for way, found in
                   runs.items()}  # fmt: skip
        imports = {way: measured(program)["cpu_s"] for way, program in IMPORTS.items()}
        numbers = sum(rows * columns for rows, columns in shapes.values())
        return {
            "params": numbers,
            "rank": RANK,
            **medians,
            "cpu_ratio": medians["ours"]["cpu_s"] / medians["peft"]["cpu_s"],
            "memory_ratio": medians["ours"]["anonymous_peak_mb"] / medians["peft"]["anonymous_peak_mb"],
            "cpu_s_of_the_imports_alone": imports,
            "tensors": len(shapes),
            "numbers_that_differ": differing(folder / "ours", folder / "peft"),
        }


def llama_shapes(hidden: int, inner: int, layers: int, words: int) -> dict[str, tuple[int, int]]:
    """The matrices of a Llama with 64 numbers a head and an eighth as many key heads."""
    shapes = {"model.embed_tokens.weight": (words, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (1, hidden)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (1, hidden)
        for name, rows in (("q", hidden), ("k", max(64, hidden // 8)), ("v", max(64, hidden // 8)), ("o", hidden)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, hidden)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            shapes[f"{prefix}.mlp.{name}_proj.weight"] = shape
    return {**shapes, "model.norm.weight": (1, hidden), "lm_head.weight": (words, hidden)}


def write_base(folder: Path, shapes: dict[str, tuple[int, int]], sizes: tuple[int, int, int, int]) -> None:
    """A checkpoint of random weights in several files."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, layers, words = sizes
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(64, hidden // 8) // 64, "vocab_size": words, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for number in range(SHARDS):
        part = names[number * len(names) // SHARDS : (number + 1) * len(names) // SHARDS]
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        tensors = {name: (torch.randn(shapes[name]) * 0.02).to(torch.bfloat16) for name in part}
        save_file(
            {name: each[0].clone() if "norm" in name else each for name, each in tensors.items()},
            folder / file,
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_adapter(folder: Path, shapes: dict[str, tuple[int, int]]) -> None:
    """Random trained factors for all projections, as PEFT saves them."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    torch.manual_seed(1)
    targets = [name for name in shapes if "_proj." in name]
    factors = {}
    for name in targets:
        rows, columns = shapes[name]
        module = f"base_model.model.{name.removesuffix('.weight')}"
        factors[f"{module}.lora_A.weight"] = torch.randn(RANK, columns) * 0.05
        factors[f"{module}.lora_B.weight"] = torch.randn(rows, RANK) * 0.05
    save_file(factors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 24, "base_model_name_or_path": "base",
        "target_modules": sorted({name.split(".")[-2] for name in targets}), "bias": "none", "fan_in_fan_out": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


def measured(program: str, *words: Path) -> dict[str, float]:
    """CPU-seconds (of all its threads), wall time and peak anonymous memory of a program in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        child = subprocess.Popen([sys.executable, "-c", program, *map(str, words)], stdout=log, stderr=log)
        most = 0
        while child.poll() is None:
            most = max(most, anonymous_kb(child.pid))
            time.sleep(0.005)
        if child.returncode:
            log.seek(0)
            raise RuntimeError(log.read()[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "wall_s": time.perf_counter() - started,
        "anonymous_peak_mb": most / 1024,
    }


def anonymous_kb(pid: int) -> int:
    """What a process has of memory that belongs to no file, in kB; 0 when it has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:")), 0)


def differing(ours: Path, theirs: Path) -> int:
    """How many stored numbers of the two differ in any bit. Raises ValueError when their tensors are not the same."""
    import numpy as np

    from gpuherd.models.checkpoints.open import open_checkpoint

    mine, wanted = open_checkpoint(ours), open_checkpoint(theirs)
    described = [
        sorted((info.name, info.shape, info.dtype) for info in each.tensors.values()) for each in (mine, wanted)
    ]
    if described[0] != described[1]:
        raise ValueError("the two results have different tensors")
    count = 0
    for name, info in wanted.tensors.items():
        rows = int(np.prod(info.shape[:-1]))
        both = [np.empty((rows, info.shape[-1]), np.uint16) for _ in range(2)]
        for source, target in zip((mine, wanted), both, strict=True):
            source.read_codes(name, (0, rows), (0, info.shape[-1]), target)
        count += int(np.count_nonzero(both[0] != both[1]))
    return count
