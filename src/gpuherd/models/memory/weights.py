"""In what form weights lie in memory, and how many bytes they take. Pure.

``nf4-dq`` is bitsandbytes' 4-bit NormalFloat with double quantisation: its scales are quantised again. ``as-stored`` is
a checkpoint that is quantised already (GPTQ, AWQ, FP8, MXFP4, bitsandbytes), loaded as it is.
"""

from __future__ import annotations

from enum import StrEnum

from gpuherd.models.describe.description import Role, Tensor
from gpuherd.models.names import is_there


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


# The precision in a model's name, as the guide writes it: ``Llama-3.1-70B-8bit``, ``...-4bit``.

SUFFIXES = {"-8bit": Precision.INT8, "-4bit": Precision.NF4}


def split_precision(text: str) -> tuple[str, Precision | None]:
    """The model without the suffix, and the precision that the suffix asks for; None where there is none.

    A file or folder that really has this name is the model, and its name asks for nothing.
    """
    for suffix, precision in SUFFIXES.items():
        if text.lower().endswith(suffix) and len(text) > len(suffix) and not is_there(text):
            return text[: -len(suffix)], precision
    return text, None


# Bytes of weights in memory, and of what a quantisation keeps beside them. Pure; to the byte.
#
# Plain numbers take 4 or 2 bytes each. Quantised ones lie as bitsandbytes lays them (checked in tests against its own
# modules, bitsandbytes 0.50):
#
# - ``int8``, LLM.int8() (Dettmers et al., arXiv 2208.07339): one byte a number and a float32 scale for each output
#   row.
# - ``nf4`` (Dettmers et al., arXiv 2305.14314): two numbers a byte, a float32 scale for each 64 of them, and the
#   table of the 16 values, which every module has for itself.
# - ``nf4-dq``: scales of one byte each; for each 256 of those a float32 scale, and their float32 mean; two tables (16
#   and 256 values).
#
# Tensors of one storage are counted once: see ``usage`` for tied ones that two GPUs need.

BLOCK = 64
NESTED_BLOCK = 256
_FLOAT32 = 4
_VALUES_4BIT = 16 * _FLOAT32
_VALUES_8BIT = 256 * _FLOAT32


def weight_bytes(tensor: Tensor, precision: Precision) -> tuple[int, int]:
    """What a tensor takes: bytes of the weights, and bytes of its quantisation's scales and tables.

    The two stand apart, because ``get_memory_footprint()`` of transformers counts the first alone.

    >>> from gpuherd.models.describe.description import Role
    >>> down = Tensor("model.layers.0.mlp.down_proj.weight", (4096, 14336), Role.LINEAR)
    >>> weight_bytes(down, Precision.BF16), weight_bytes(down, Precision.INT8), weight_bytes(down, Precision.NF4)
    ((117440512, 0), (58720256, 16384), (29360128, 3670080))
    """
    if precision is Precision.AS_STORED and tensor.stored_bytes is not None:
        return tensor.stored_bytes, 0
    if quantises(tensor, precision):
        return _int8(tensor) if precision is Precision.INT8 else _nf4(tensor.numel, precision is Precision.NF4_DQ)
    return tensor.numel * number_bytes(tensor, precision), 0


def quantises(tensor: Tensor, precision: Precision) -> bool:
    """Whether bitsandbytes turns this tensor into codes while it is loaded."""
    return precision.is_quantised and tensor.role is Role.LINEAR and not (tensor.fp32_in_fp16 or tensor.keeps_fp32)


def number_bytes(tensor: Tensor, precision: Precision) -> int:
    """Bytes of one number of a tensor that is not quantised."""
    if tensor.keeps_fp32 or (tensor.fp32_in_fp16 and precision.computes_in is Precision.FP16):
        return _FLOAT32
    return precision.number_bytes


def _int8(tensor: Tensor) -> tuple[int, int]:
    return tensor.numel, tensor.shape[-1 if tensor.transposed else 0] * _FLOAT32


def _nf4(numel: int, nested: bool) -> tuple[int, int]:
    codes, scales = -(-numel // 2), -(-numel // BLOCK)
    if not nested:
        return codes, scales * _FLOAT32 + _VALUES_4BIT
    outer = -(-scales // NESTED_BLOCK) * _FLOAT32
    mean = _FLOAT32
    return codes, scales + outer + mean + _VALUES_4BIT + _VALUES_8BIT
