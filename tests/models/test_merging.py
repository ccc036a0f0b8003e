"""Merging to disk: files equal, byte for byte, to those of PEFT's merge_and_unload and save_pretrained."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.models.peft_adapters import save_adapter

from gpuherd.models.merging import merge_to_folder

Tiny = Callable[..., tuple[Any, Path]]

ALL_LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FORMATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def in_format(folder: Path, target: Path, dtype: torch.dtype) -> Path:
    """The model of ``folder`` saved in another format."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(target)
    return target


def train(base_folder: Path, folder: Path, *, auto_class: str = "AutoModelForCausalLM", **settings: Any) -> None:
    """A PEFT adapter of the model in ``base_folder`` with random trained weights, saved into ``folder``."""
    import transformers

    torch.manual_seed(11)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_adapter(getattr(transformers, auto_class).from_pretrained(base_folder), folder, **settings)


def by_peft(base_folder: Path, adapter: Path, target: Path, *, auto_class: str = "AutoModelForCausalLM") -> Path:
    """What PEFT and transformers make of both."""
    import transformers
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = getattr(transformers, auto_class).from_pretrained(base_folder)
        PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(target)
    return target


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(ours: Path, theirs: Path) -> None:
    """The same tensors, bit for bit."""
    mine, wanted = tensors_of(ours), tensors_of(theirs)
    assert sorted(mine) == sorted(wanted)
    for name, tensor in wanted.items():
        assert mine[name].dtype == tensor.dtype, name
        assert mine[name].shape == tensor.shape, name
        assert torch.equal(mine[name].view(torch.uint8), tensor.view(torch.uint8)), name


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ALL_LLAMA, "r": 5, "lora_alpha": 7}),
    "rslora": ("llama", {"target_modules": ALL_LLAMA, "use_rslora": True}),
    "dora": ("llama", {"target_modules": ALL_LLAMA, "use_dora": True}),
    "patterns": ("llama", {"target_modules": ALL_LLAMA, "rank_pattern": {"q_proj": 2, r"layers.1.*up_proj": 8},
                           "alpha_pattern": {"down_proj": 32, "model.layers.0.self_attn.k_proj": 1}}),
    "modules to save": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "head": ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    "embeddings": ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
    "embeddings with dora": ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2 with dora": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "use_dora": True,
                                "fan_in_fan_out": True}),
    "gpt2 tied embeddings": ("gpt2", {"target_modules": ["wte", "wpe", "c_proj"], "fan_in_fan_out": True}),
    "gpt2 biases": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    "opt trained biases": ("opt", {"target_modules": ["q_proj", "fc1"], "bias": "lora_only"}),
    "opt lora_bias": ("opt", {"target_modules": ["q_proj", "fc1"], "lora_bias": True}),
    "mixtral attention": ("mixtral", {"target_modules": ["q_proj", "o_proj"]}),
    "fused experts": ("gpt_oss", {"target_modules": ["q_proj"],
                                  "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "bloom": ("bloom", {"target_modules": ["query_key_value"]}),
}  # fmt: skip


@pytest.mark.parametrize("case", VARIANTS)
def test_same_bytes_as_peft(tiny: Tiny, tmp_path: Path, case: str) -> None:
    model_type, settings = VARIANTS[case]
    _, base = tiny(model_type)
    train(base, tmp_path / "adapter", **settings)
    for name, dtype in FORMATS.items():
        folder = in_format(base, tmp_path / f"base-{name}", dtype)
        theirs = by_peft(folder, tmp_path / "adapter", tmp_path / f"peft-{name}")
        ours = tmp_path / f"ours-{name}"
        result = merge_to_folder(folder, tmp_path / "adapter", ours)
        assert_same(ours, theirs)
        assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
        assert result.dtype == name and result.changed and result.output == ours
