"""Makes the demo's own two models: a small Llama-style model and a LoRA adapter of it.

Weights are random but not noise: each matrix has a spectrum with a power-law tail of a known exponent, so that the
analysis finds something that can be checked. The same seed gives the same files.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY = 256, 704, 4, 2000
HEADS, KEY_VALUE_HEADS = 8, 2
RANK, LORA_ALPHA = 8, 16
SEED = 20

Weights = dict[str, npt.NDArray[np.float32]]


def heavy_tailed(rng: np.random.Generator, rows: int, columns: int, alpha: float) -> npt.NDArray[np.float32]:
    """A matrix of this shape whose squared singular values are the quantiles of a power law p(λ) ~ λ^-alpha, λ >= 1,
    with random singular vectors; scaled to the size of trained weights."""
    n = min(rows, columns)
    eigenvalues = (1 - (np.arange(n) + 0.5) / n) ** (-1 / (alpha - 1))
    left = np.linalg.qr(rng.standard_normal((rows, n)))[0]
    right = np.linalg.qr(rng.standard_normal((columns, n)))[0]
    return np.ascontiguousarray((left * np.sqrt(eigenvalues)) @ right.T * 0.05, dtype=np.float32)


def make_llama(folder: Path) -> None:
    """Writes the Llama-style model: grouped-query attention, gated feed-forward, no tied head."""
    rng = np.random.default_rng(SEED)
    head = HIDDEN // HEADS
    weights: Weights = {"model.embed_tokens.weight": heavy_tailed(rng, VOCABULARY, HIDDEN, 4.0)}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KEY_VALUE_HEADS * head, HIDDEN),
            "self_attn.v_proj": (KEY_VALUE_HEADS * head, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        # Deeper layers get lighter tails, as in many trained models.
        for name, (rows, columns) in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = heavy_tailed(rng, rows, columns, 2.5 + 0.5 * layer)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    weights["lm_head.weight"] = heavy_tailed(rng, VOCABULARY, HIDDEN, 3.5)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    _write(folder, "config.json", config, "model.safetensors", weights)


def make_adapter(folder: Path, base: Path) -> None:
    """Writes a LoRA adapter of the model in ``base``, on its query and value projections."""
    rng = np.random.default_rng(SEED + 1)
    head = HIDDEN // HEADS
    weights: Weights = {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", HIDDEN), ("v_proj", KEY_VALUE_HEADS * head)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = rng.standard_normal((RANK, HIDDEN)).astype(np.float32) * 0.05
            weights[f"{prefix}.lora_B.weight"] = rng.standard_normal((rows, RANK)).astype(np.float32) * 0.05
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": RANK,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": None,
    }
    _write(folder, "adapter_config.json", config, "adapter_model.safetensors", weights)


def _write(folder: Path, config_name: str, config: dict[str, object], weights_name: str, weights: Weights) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / config_name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / weights_name, metadata={"format": "pt"})
