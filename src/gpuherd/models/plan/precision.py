"""In what form weights lie in memory. Pure.

``nf4-dq`` is bitsandbytes' 4-bit NormalFloat with double quantisation: its scales are quantised again.
"""

from __future__ import annotations

from enum import StrEnum


class Precision(StrEnum):
    """A form of the weights. Quantised ones hold the linear layers of the body; the rest stays in 16 bits."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    NF4 = "nf4"
    NF4_DQ = "nf4-dq"

    @property
    def is_quantised(self) -> bool:
        """Whether linear layers are stored as codes, by bitsandbytes."""
        return self in (Precision.INT8, Precision.NF4, Precision.NF4_DQ)

    @property
    def number_bytes(self) -> int:
        """Bytes of a number that is not quantised: of embeddings, norms, activations and the KV cache."""
        return 4 if self is Precision.FP32 else 2
