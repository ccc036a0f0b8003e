"""The bytes of weights against what transformers and bitsandbytes really put into memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.models.describe.description import Role, Tensor
from gpuherd.models.memory.weights import Precision, weight_bytes

pytest.importorskip("torch")

from tests.models.memory.real_memory import nbytes, state_tensors


def _bitsandbytes_module(shape: tuple[int, int], precision: Precision) -> Any:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    rows, columns = shape
    if precision is Precision.INT8:
        module = bitsandbytes.nn.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False)
    else:
        module = bitsandbytes.nn.Linear4bit(
            columns, rows, bias=False, quant_type="nf4", compress_statistics=precision is Precision.NF4_DQ
        )
    return module.to("cpu")


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.NF4, Precision.NF4_DQ])
@pytest.mark.parametrize("shape", [(64, 64), (96, 40), (7, 9), (1, 1), (257, 65), (3, 21845)])
def test_a_quantised_linear_layer_takes_what_bitsandbytes_keeps(shape: tuple[int, int], precision: Precision) -> None:
    module = _bitsandbytes_module(shape, precision)
    weights, state = weight_bytes(Tensor("layer.weight", shape, Role.LINEAR), precision)
    assert weights == nbytes([module.weight.data])
    assert state == nbytes(state_tensors(module.weight))


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.NF4])
def test_a_conv1d_is_stored_by_output_rows(precision: Precision) -> None:
    stored = weight_bytes(Tensor("c_attn.weight", (48, 144), Role.LINEAR, transposed=True), precision)
    assert stored == weight_bytes(Tensor("c_attn.weight", (144, 48), Role.LINEAR), precision)


def test_one_block_of_scales_more_for_one_number_more() -> None:
    one, two = (weight_bytes(Tensor("w", (1, 64 * 256 + more), Role.LINEAR), Precision.NF4_DQ) for more in (0, 1))
    assert two[0] - one[0] == 1
    assert two[1] - one[1] == 1 + 4


@given(
    shape=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    role=st.sampled_from(Role),
    precision=st.sampled_from(Precision),
)
def test_nothing_but_linear_weights_is_quantised(shape: list[int], role: Role, precision: Precision) -> None:
    weights, state = weight_bytes(Tensor("w", tuple(shape), role), precision)
    if precision.is_quantised and role is Role.LINEAR:
        assert weights == math.prod(shape) if precision is Precision.INT8 else -(-math.prod(shape) // 2)
        assert state > 0
    else:
        assert (weights, state) == (math.prod(shape) * (4 if precision is Precision.FP32 else 2), 0)


def test_what_stays_in_float32() -> None:
    always = Tensor("gate.bias", (10,), keeps_fp32=True)
    beside_fp16 = Tensor("wo.weight", (10, 10), Role.LINEAR, fp32_in_fp16=True)
    assert {weight_bytes(always, precision)[0] for precision in Precision} == {40}
    assert weight_bytes(beside_fp16, Precision.FP16) == (400, 0)
    assert weight_bytes(beside_fp16, Precision.INT8) == (400, 0), "int8 computes in fp16"
    assert weight_bytes(beside_fp16, Precision.BF16) == (200, 0)
    assert weight_bytes(beside_fp16, Precision.NF4) == (200, 0), "never quantised"


def test_a_quantised_checkpoint_as_it_is_stored() -> None:
    packed = Tensor("q_proj.weight", (64, 64), Role.LINEAR, stored_bytes=2321)
    plain = Tensor("norm.weight", (64,))
    assert weight_bytes(packed, Precision.AS_STORED) == (2321, 0)
    assert weight_bytes(plain, Precision.AS_STORED) == (128, 0)
    assert weight_bytes(packed, Precision.BF16) == (8192, 0), "dequantised while it is loaded"
