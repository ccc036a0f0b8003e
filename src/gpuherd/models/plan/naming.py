"""The precision in a model's name, as the guide writes it: ``Llama-3.1-70B-8bit``, ``...-4bit``."""

from __future__ import annotations

from pathlib import Path

from gpuherd.models.plan.precision import Precision

SUFFIXES = {"-8bit": Precision.INT8, "-4bit": Precision.NF4}


def split_precision(text: str) -> tuple[str, Precision | None]:
    """The model without the suffix, and the precision that the suffix asks for; None where there is none.

    A file or folder that really has this name is the model, and its name asks for nothing.
    """
    for suffix, precision in SUFFIXES.items():
        if text.lower().endswith(suffix) and len(text) > len(suffix) and not _is_there(text):
            return text[: -len(suffix)], precision
    return text, None


def _is_there(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False
