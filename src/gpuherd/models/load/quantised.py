"""A precision as transformers is told it: the dtype of what stays in plain numbers, and bitsandbytes' settings.

Knows what can be said before torch is imported (is bitsandbytes there, can the card compute so) apart from what needs
it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from gpuherd.errors import MissingExtra, UsageError
from gpuherd.models.place.gpus import Capability, GpuSpec, capability_verdict
from gpuherd.models.plan.precision import Precision

EXTRAS = {"torch": "load", "transformers": "load", "accelerate": "load", "peft": "load", "safetensors": "load"}
# Of checkpoints that are stored in 8 bits: weights and their scales.
_EIGHT_BITS = frozenset(
    {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"}
)
_DTYPES = {Precision.FP32: "float32", Precision.FP16: "float16", Precision.BF16: "bfloat16"}
# bfloat16 is emulated below; the product of 4-bit weights is then computed in float16, which takes as much.
_BF16_FROM = (8, 0)


def check_bitsandbytes(precision: Precision) -> None:
    """Raises MissingExtra where bitsandbytes is needed and not installed. Imports nothing."""
    if precision.is_quantised and importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtra(
            f"bitsandbytes is not installed, and {precision} needs it; pip install 'gpuherd[bnb]' brings it, or load "
            "the model in bf16 or fp16"
        )


def check_cards(precision: Precision, cards: Sequence[GpuSpec]) -> tuple[str, ...]:
    """Sentences on cards that are slow with this precision. Raises UsageError for one that can't do it at all."""
    told = [(card, capability_verdict(precision, card.capability)) for card in cards]
    for card, said in told:
        if not said.possible:
            raise UsageError(f"GPU {card.label} ({card.name}): {said.sentence}; load the model in another dtype")
    return tuple(f"on GPU {card.label} ({card.name}) {said.sentence}" for card, said in told if said.sentence)


def loading_words(
    precision: Precision, capabilities: Sequence[Capability | None] = (), *, overflows: bool = False
) -> dict[str, Any]:
    """What ``from_pretrained`` is told of the precision. Imports torch and transformers.

    Args:
        capabilities: of the GPUs that it will lie on.
        overflows: float16 is too narrow for a part of the model, which transformers would keep in float32.
    """
    import torch

    plain = precision.computes_in
    emulated = any(each is not None and each < _BF16_FROM for each in capabilities)
    if precision in (Precision.NF4, Precision.NF4_DQ) and emulated and not overflows:
        plain = Precision.FP16
    dtype = getattr(torch, _DTYPES[plain])
    if precision is Precision.AS_STORED:
        return {"dtype": "auto"}
    if not precision.is_quantised:
        return {"dtype": dtype}
    from transformers import BitsAndBytesConfig

    if precision is Precision.INT8:
        return {"dtype": dtype, "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=precision is Precision.NF4_DQ,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"dtype": dtype, "quantization_config": settings}


def expected_dtypes(precision: Precision) -> frozenset[str]:
    """In which torch dtypes weights that are no codes may lie, beside those that stay in float32 anyway."""
    if precision is Precision.AS_STORED:
        return frozenset(_DTYPES.values()) | _EIGHT_BITS
    if precision in (Precision.NF4, Precision.NF4_DQ):
        return frozenset({"bfloat16", "float16"})
    return frozenset({_DTYPES[precision.computes_in]})
