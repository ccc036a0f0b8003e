"""Adapters made by PEFT itself, for what is compared with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_adapter(base: Any, folder: Path, **settings: Any) -> None:
    """Gives the model a LoRA adapter with random trained weights, and saves that."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 6, **settings}))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif parameter.requires_grad:
                parameter.normal_(0.0, 0.2)
    adapted.save_pretrained(folder)
