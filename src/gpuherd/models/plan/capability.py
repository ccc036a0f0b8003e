"""Which form of the weights a GPU can compute with, by its CUDA compute capability. Pure.

Sources: the CUDA programming guide (arithmetic by capability: bfloat16 from 8.0, float16 from 5.3), torch's
``is_bf16_supported`` (emulated below 8.0), bitsandbytes' requirements (6.0 and above; its 8-bit product is fast only
with the integer tensor cores of 7.5) and FlashAttention's (8.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuherd.models.plan.card import Card
from gpuherd.models.plan.precision import Precision

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether it can be done, and a sentence where it can't, or only badly; "" where all is well."""

    possible: bool
    sentence: str = ""


# Precision -> capability below which it can't be done, and below which it is slow; why.
_NEEDS: dict[Precision, tuple[Capability, Capability, str]] = {
    Precision.FP32: ((3, 5), (3, 5), ""),
    Precision.FP16: ((5, 3), (7, 0), "fp16 is slow below 7.0, where there are no tensor cores"),
    Precision.BF16: ((7, 0), (8, 0), "bf16 is emulated below 8.0 and slow; fp16 is fast there"),
    Precision.INT8: ((6, 0), (7, 5), "bitsandbytes' int8 is slow below 7.5, where there are no int8 tensor cores"),
    Precision.NF4: ((6, 0), (7, 5), "bitsandbytes' 4-bit is slow below 7.5"),
    Precision.NF4_DQ: ((6, 0), (7, 5), "bitsandbytes' 4-bit is slow below 7.5"),
}
# Method of a checkpoint that is quantised already -> capability below which transformers (5.23) unpacks it to bf16, or
# refuses to load it: those of its quantizers.
_STORED_NEEDS: dict[str, Capability] = {"fp8": (8, 9), "fbgemm_fp8": (9, 0), "mxfp4": (7, 5)}
UNPACKED = frozenset({"fp8", "mxfp4"})
_FLASH = (8, 0)


def verdict(precision: Precision, capability: Capability | None, stored_method: str | None = None) -> Verdict:
    """What a GPU of this capability makes of this precision. Of one that is not known nothing is said.

    ``stored_method``: of weights that are quantised already, and are to stay so.
    """
    if capability is None:
        return Verdict(True)
    if precision is Precision.AS_STORED:
        return _of_stored(stored_method or "", capability)
    if precision not in _NEEDS:
        return Verdict(True)
    least, fast, slow = _NEEDS[precision]
    if capability < least:
        needed, has = "{}.{}".format(*least), "{}.{}".format(*capability)
        return Verdict(False, f"{precision} needs compute capability {needed}; it has {has}")
    return Verdict(True, slow if capability < fast else "")


def _of_stored(method: str, capability: Capability) -> Verdict:
    least = _STORED_NEEDS.get(method)
    if least is None or capability >= least:
        return Verdict(True)
    needed, has = "{}.{}".format(*least), "{}.{}".format(*capability)
    instead = "; transformers would unpack them to bf16" if method in UNPACKED else ""
    return Verdict(False, f"weights stored as {method} need compute capability {needed}; it has {has}{instead}")


def split_by_capability(
    precision: Precision, cards: Sequence[Card], stored_method: str | None = None
) -> tuple[tuple[Card, ...], tuple[str, ...]]:
    """The cards that can compute with this precision, and what a person should know of the others and of slow ones."""
    verdicts = [(card, verdict(precision, card.capability, stored_method)) for card in cards]
    able = tuple(card for card, told in verdicts if told.possible)
    sentences = [
        f"GPU {card.label} ({card.name}) can't be used: {told.sentence}"
        if not told.possible
        else f"on GPU {card.label} ({card.name}) {told.sentence}"
        for card, told in verdicts
        if told.sentence
    ]
    return able, tuple(sentences)


def attention_for(capability: Capability | None) -> str:
    """The fastest attention that transformers can use there: ``flash_attention_2`` (where its library is installed)
    from 8.0, else ``sdpa``."""
    return "flash_attention_2" if capability is not None and capability >= _FLASH else "sdpa"
