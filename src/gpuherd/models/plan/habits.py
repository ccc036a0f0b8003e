"""How families of models compute, as far as their memory depends on it: what transformers' modelling code (5.23) holds
beyond the usual. Data, each entry measured (``tests/models/plan/test_workspace.py``).

A family that is not listed computes as Llama does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Attention = Literal["sdpa", "math", "eager"]


@dataclass(frozen=True, slots=True)
class Family:
    """What a family of models holds beyond the usual.

    Attributes:
        attention: how transformers computes it unless told otherwise.
        hidden: hidden states alive beside the MLP: of embedding, layer, attention, normalised.
        inner: copies of the MLP's middle alive at once; None: 2, and with a gate ``gated`` (4 fused).
        gated: copies of the MLP's middle beside a gate of its own.
        experts: copies of all experts' middles alive at once.
        scores: copies of the scores (in the precision) that are kept until the layer ends, where they are made.
        masked: copies of the scores (in the precision) beside those of the softmax.
        softmax_fp32: the softmax of the scores is taken in float32.
        attended: further hidden states alive beside the attention.
        rotary_fp32: positions are applied in float32.
        keys_fp32: keys become float32 for the scores.
        scores_fp32: scores are float32, whatever the precision.
        table: bytes of a table of all positions, which each sequence gets a copy of.
        biased: positions are a bias of each pair and head, which a fused kernel gets as its mask.
        all_experts: every token goes through every expert, its input multiplied by zero where it wasn't chosen.
    """

    attention: Attention = "sdpa"
    hidden: int = 4
    inner: int | None = None
    gated: int = 3
    experts: int = 4
    scores: int = 1
    masked: int = 1
    softmax_fp32: bool = True
    attended: int = 0
    rotary_fp32: bool = False
    keys_fp32: bool = False
    scores_fp32: bool = False
    table: int = 0
    biased: bool = False
    all_experts: bool = False


_TANH_GELU = 4  # written out in Python: input, half of it, its cube, the cube scaled
FAMILIES = {
    "bloom": Family("eager", inner=_TANH_GELU + 1, scores=2, masked=3, attended=5),
    "codegen": Family("eager", hidden=6, inner=_TANH_GELU, attended=12, keys_fp32=True, scores_fp32=True),
    "cohere": Family(rotary_fp32=True),
    "cohere2": Family(rotary_fp32=True),
    "falcon": Family("math"),
    "gemma2": Family("eager"),
    "gpt2": Family(hidden=6, inner=_TANH_GELU),
    "gpt_bigcode": Family(hidden=6),
    "gpt_neo": Family("eager", hidden=6, inner=_TANH_GELU, scores=2, attended=4, keys_fp32=True),
    "gpt_oss": Family("eager", experts=9, masked=3, softmax_fp32=False),
    "gptj": Family("eager", inner=_TANH_GELU, scores=2, masked=2, keys_fp32=True, table=2048 * 64 * 4),
    "llama4_text": Family(hidden=6, all_experts=True),
    "mbart": Family(hidden=5),
    "mpt": Family("eager", hidden=5, scores=2, attended=3, masked=2),
    "mt5": Family(gated=_TANH_GELU, biased=True),
    "nemotron": Family(inner=3),  # the square of a ReLU is written out
    "olmo2": Family(hidden=3),
    "phi": Family(inner=_TANH_GELU),
    "qwen2_moe": Family(hidden=6),
    "stablelm": Family(hidden=6),
    "t5": Family(gated=_TANH_GELU, biased=True),
    "umt5": Family(gated=_TANH_GELU, biased=True),
}
