"""Files laid out here are those of the safetensors library, byte for byte."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save

from gpuherd.models.checkpoints.open import read_weight_file
from gpuherd.models.checkpoints.safetensors import header, in_order

FORMATS = (
    torch.bool, torch.uint8, torch.int8, torch.float8_e5m2, torch.float8_e4m3fn, torch.int16, torch.uint16,
    torch.float16, torch.bfloat16, torch.int32, torch.uint32, torch.float32, torch.complex64, torch.float64,
    torch.int64, torch.uint64,
)  # fmt: skip


def test_the_same_file_as_the_library_writes(tmp_path: Path) -> None:
    tensors = {f"{name}.{number}": torch.ones(2, number % 3 + 1).to(dtype) for number, dtype in enumerate(FORMATS)
               for name in ("z", "a", "Ü", "quote\"d", "new\nline")}  # fmt: skip
    tensors |= {"empty": torch.ones(0, 3), "number": torch.tensor(3.0)}
    whole = save(tensors, metadata={"format": "pt"})
    (tmp_path / "x.safetensors").write_bytes(whole)
    entries = [tensor.info for tensor in read_weight_file(tmp_path / "x.safetensors")]
    for order in (entries, entries[::-1]):
        start = header(order)
        assert whole[: len(start)] == start
        assert start + b"".join(bytes_of(tensors[name]) for name in in_order(order)) == whole


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
