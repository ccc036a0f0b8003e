"""Bytes of weights in memory, and of what a quantisation keeps beside them. Pure; to the byte.

Plain numbers take 4 or 2 bytes each. Quantised ones lie as bitsandbytes lays them (checked in tests against its own
modules, bitsandbytes 0.50):

- ``int8``, LLM.int8() (Dettmers et al., arXiv 2208.07339): one byte a number and a float32 scale for each output row.
- ``nf4`` (Dettmers et al., arXiv 2305.14314): two numbers a byte, a float32 scale for each 64 of them, and the table of
  the 16 values, which every module has for itself.
- ``nf4-dq``: scales of one byte each; for each 256 of those a float32 scale, and their float32 mean; two tables (16 and
  256 values).

Tensors of one storage are counted once: see ``usage`` for tied ones that two GPUs need.
"""

from __future__ import annotations

from gpuherd.models.plan.architecture import Role, Tensor
from gpuherd.models.plan.precision import Precision

BLOCK = 64
NESTED_BLOCK = 256
_FLOAT32 = 4
_VALUES_4BIT = 16 * _FLOAT32
_VALUES_8BIT = 256 * _FLOAT32


def weight_bytes(tensor: Tensor, precision: Precision) -> tuple[int, int]:
    """What a tensor takes: bytes of the weights, and bytes of its quantisation's scales and tables.

    The two stand apart, because ``get_memory_footprint()`` of transformers counts the first alone.

    >>> from gpuherd.models.plan.architecture import Role
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
