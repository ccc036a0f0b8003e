"""Quantised checkpoints are refused by the name of their format; plain ones never are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.open import open_checkpoint

PLAIN = {"model.layers.0.q_proj.weight": torch.ones(4, 4)}


def save(folder: Path, tensors: dict[str, torch.Tensor], quantization_config: dict[str, Any] | None = None) -> None:
    save_file(tensors, folder / "model.safetensors")
    config = {} if quantization_config is None else {"quantization_config": quantization_config}
    (folder / "config.json").write_text(json.dumps(config))


def packed(name: str, dtype: torch.dtype = torch.int32) -> dict[str, torch.Tensor]:
    return {**PLAIN, f"model.layers.0.k_proj.{name}": torch.ones(4, 4).to(dtype)}


@pytest.mark.parametrize(
    ("tensors", "config", "format_name"),
    [
        (packed("qweight"), {"quant_method": "gptq", "bits": 4}, "GPTQ"),
        (packed("qweight"), {"quant_method": "awq"}, "AWQ"),
        (packed("qweight") | packed("g_idx"), None, "GPTQ"),
        (packed("qweight"), None, "GPTQ or AWQ"),
        (packed("SCB", torch.float32), {"load_in_8bit": True, "quant_method": "bitsandbytes"}, "bitsandbytes 8-bit"),
        (packed("SCB", torch.float32), None, "bitsandbytes 8-bit"),
        (packed("weight.quant_state.bitsandbytes__nf4", torch.uint8), None, r"bitsandbytes 4-bit \(NF4\)"),
        (packed("weight.absmax", torch.float32), {"load_in_4bit": True}, "bitsandbytes 4-bit"),
        (packed("weight", torch.float8_e4m3fn), {"quant_method": "fp8"}, "block-wise float8"),
        (packed("weight", torch.float8_e4m3fn), None, "float8"),
        (packed("weight_scale_inv", torch.float32), None, "block-wise float8"),
        (packed("weight_packed"), {"quant_method": "compressed-tensors"}, "compressed-tensors"),
        (packed("gate_up_proj_blocks", torch.uint8), {"quant_method": "mxfp4"}, "MXFP4"),
        (packed("gate_up_proj_blocks", torch.uint8), None, "MXFP4"),
        (packed("weight", torch.int8), None, "integer codes"),
        (PLAIN, {"quant_method": "gptq"}, "GPTQ"),
        (PLAIN, {"bits": 4}, "an unnamed method"),
    ],
)
def test_refused_by_name(
    tmp_path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None, format_name: str
) -> None:
    save(tmp_path, tensors, config)
    with pytest.raises(BadModel, match=rf"is quantised \({format_name}"):
        open_checkpoint(tmp_path)


def test_a_left_over_setting_beside_plain_weights_is_no_obstacle(tmp_path: Path) -> None:
    save(tmp_path, PLAIN, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert list(open_checkpoint(tmp_path).tensors) == list(PLAIN)


def test_plain_integers_are_no_quantisation(tmp_path: Path) -> None:
    save(tmp_path, {**PLAIN, "position_ids": torch.arange(4).reshape(1, 4), "h.0.attn.bias": torch.ones(4, 4).bool()})
    assert len(open_checkpoint(tmp_path).tensors) == 3
