"""Recognises quantised checkpoints, whose stored numbers are codes and not weights.

Pure: config and headers in, the format's name out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpuherd.models.dtypes import ITEM_BITS
from gpuherd.models.source import TensorInfo

# Last parts of tensor names that only one family of formats writes, most telling first.
_TELLTALES = {
    "SCB": "bitsandbytes 8-bit",
    "quant_map": "bitsandbytes 4-bit",
    "nested_absmax": "bitsandbytes 4-bit",
    "absmax": "bitsandbytes 4-bit",
    "g_idx": "GPTQ",
    "weight_packed": "compressed-tensors",
    "weight_shape": "compressed-tensors",
    "bitmask": "compressed-tensors, sparse",
    "qzeros": "GPTQ or AWQ",
    "qweight": "GPTQ or AWQ",
    "weight_scale_inv": "block-wise float8",
    "W_q": "HQQ",
    "codebooks": "AQLM",
    "Qidxs": "QuIP#",
}
# Methods that transformers can apply to plain weights while it loads them: a config that names one, beside weights
# that are all plain, only says how the author liked to load it (often left over from QLoRA training).
_ON_LOADING = frozenset({"bitsandbytes", "eetq", "hqq", "quanto", "torchao", "fbgemm_fp8", "higgs", "fp_quant"})
_NAMES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "block-wise float8",
    "mxfp4": "MXFP4",
    "hqq": "HQQ",
    "aqlm": "AQLM",
}


def quantised_as(config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> str | None:
    """The name of the format that the weights are quantised in, None if they are plain numbers."""
    method = method_of(config)
    listed = list(tensors)
    evidence = _evidence(info for info in listed if not info.decoded and info.scales_of is None)
    if method is None:
        return evidence
    # What is turned back into weights on reading is why the config names a method; what is left is plain.
    if evidence is None and (method in _ON_LOADING or any(info.decoded for info in listed)):
        return None
    name = _NAMES.get(method, method)
    return evidence if evidence is not None and evidence.startswith(name) else name


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``quantization_config`` of the config or of its text part, empty if there is none."""
    for part in (config, config.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        for key in ("quantization_config", "compression_config"):
            settings = part.get(key)
            if isinstance(settings, Mapping):
                return settings
    return {}


def method_of(config: Mapping[str, Any]) -> str | None:
    """The method that the config names, lower case; None if it has no settings of this kind."""
    settings = settings_of(config)
    if settings.get("load_in_8bit") is True or settings.get("load_in_4bit") is True:
        return "bitsandbytes"
    return str(settings.get("quant_method", "an unnamed method")).lower() if settings else None


def _evidence(tensors: Iterable[TensorInfo]) -> str | None:
    """What the names and number formats of the tensors tell."""
    found: set[str] = set()
    float8 = packed = False
    for info in tensors:
        last = info.name.rpartition(".")[2]
        if "quant_state." in info.name:
            return f"bitsandbytes 4-bit ({info.name.rpartition('bitsandbytes__')[2].upper() or 'NF4'})"
        if last in _TELLTALES:
            found.add(last)
        if last.endswith(("_blocks", "_scales")) and info.dtype in ("U8", "I8", "F8_E8M0"):
            return "MXFP4"
        matrix = len(info.shape) >= 2
        float8 = float8 or (matrix and (info.dtype.startswith("F8_") or info.dtype in ITEM_BITS))
        packed = packed or (matrix and last == "weight" and info.dtype in ("I8", "U8", "I32"))
    for last, name in _TELLTALES.items():
        if last in found:
            return name
    if float8:
        return "float8"
    return "integer codes of an unnamed format" if packed else None
