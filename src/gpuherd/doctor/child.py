"""Checks with torch, in a process of their own. Each prints one line of JSON.

python -m gpuherd.doctor.child build    which torch is installed, and does it see a GPU?
python -m gpuherd.doctor.child cuda     writes a small transformer to a file, loads it on the device (or cpu), runs
                                        it, and compares its numbers with the CPU's
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.gpus.visible import setting

if TYPE_CHECKING:
    import torch

_TOKENS, _WIDTH, _BATCH, _LENGTH = 256, 64, 2, 16


def build() -> dict[str, Any]:
    """Version, CUDA and ROCm version of the build (None for none), whether CUDA starts, and how many GPUs it shows."""
    import torch

    available = torch.cuda.is_available()
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "available": available,
        "devices": torch.cuda.device_count() if available else 0,
    }


def small_model(device_name: str) -> dict[str, Any]:
    """What was seen of the device, and how far its numbers are from the CPU's. ``device_name``: cuda or cpu."""
    import torch

    torch.manual_seed(0)
    device = torch.device("cuda:0" if device_name == "cuda" else "cpu")
    original = _build()
    tokens = torch.randint(_TOKENS, (_BATCH, _LENGTH))  # (batch, token)
    loaded = _save_and_load(original, device)
    with torch.no_grad():
        wanted = original(tokens)  # (batch, token, token of the vocabulary)
        found = loaded(tokens.to(device)).cpu()
    answer: dict[str, Any] = {
        "device": str(next(loaded.parameters()).device),
        "visible": setting(os.environ),
        "cuda_available": torch.cuda.is_available(),
        "parameters": sum(parameter.numel() for parameter in loaded.parameters()),
        "relative_error": float((found - wanted).abs().max() / wanted.abs().max()),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        answer |= {
            "name": properties.name,
            "uuid": str(getattr(properties, "uuid", "")) or None,
            "devices": torch.cuda.device_count(),
        }
    return answer


def _build() -> torch.nn.Module:
    """Embedding, two layers of attention and MLP, and a head, as in a language model."""
    from torch import nn

    layers = [
        nn.TransformerEncoderLayer(_WIDTH, nhead=4, dim_feedforward=4 * _WIDTH, dropout=0.0, batch_first=True)
        for _ in range(2)
    ]
    return nn.Sequential(nn.Embedding(_TOKENS, _WIDTH), *layers, nn.Linear(_WIDTH, _TOKENS)).eval()


def _save_and_load(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """A second model on the device, with the first one's weights loaded from a file."""
    import torch

    with tempfile.TemporaryDirectory(prefix="gpuherd-doctor-") as folder:
        path = Path(folder) / "weights.pt"
        torch.save(model.state_dict(), path)
        copy = _build()
        copy.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return copy.to(device)


if __name__ == "__main__":
    found = build() if sys.argv[1] == "build" else small_model(sys.argv[1])
    sys.stdout.write(json.dumps(found) + "\n")
