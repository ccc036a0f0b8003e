"""In what form weights lie in memory. Pure.

``nf4-dq`` is bitsandbytes' 4-bit NormalFloat with double quantisation: its scales are quantised again. ``as-stored`` is
a checkpoint that is quantised already (GPTQ, AWQ, FP8, MXFP4, bitsandbytes), loaded as it is.
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
    AS_STORED = "as-stored"

    @property
    def is_quantised(self) -> bool:
        """Whether linear layers are stored as codes, by bitsandbytes."""
        return self in (Precision.INT8, Precision.NF4, Precision.NF4_DQ)

    @property
    def number_bytes(self) -> int:
        """Bytes of a number that is not quantised: of embeddings, norms, activations and the KV cache."""
        return 4 if self is Precision.FP32 else 2

    @property
    def computes_in(self) -> Precision:
        """The plain precision of activations and of all that is not quantised: fp32, bf16 or fp16.

        int8 computes in fp16, because bitsandbytes' 8-bit product is one of float16 numbers and casts all others; 4-bit
        weights and checkpoints that are quantised already in bf16.

        >>> [Precision(name).computes_in.value for name in ("fp32", "int8", "nf4-dq", "as-stored")]
        ['fp32', 'fp16', 'bf16', 'bf16']
        """
        if self in (Precision.FP32, Precision.BF16, Precision.FP16):
            return self
        return Precision.FP16 if self is Precision.INT8 else Precision.BF16
