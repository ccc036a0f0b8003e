"""Gram matrices from panels: float64 as good as numpy's long double says, the compensated float32 form no worse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.esd.spectra.device import CHUNK, MOST_SLICES, DeviceGramSum, ieee_float32

DEVICE = "cpu:0"


def gram(W: np.ndarray, form: str, step: int = 700) -> np.ndarray:
    total = DeviceGramSum(len(W), DEVICE, form)  # type: ignore[arg-type]
    for start in range(0, W.shape[1], step):
        total.add(torch.from_numpy(W[:, start : start + step].copy()))
    assert total.peak() == np.abs(W).max()
    return total.result().numpy()


def bound(columns: int, step: int) -> float:
    """Of the compensated form, from its docstring: what the slices leave out, and the sums in float64."""
    chunks = sum(-(-min(step, columns - start) // CHUNK) for start in range(0, columns, step))
    return 4 * CHUNK * (MOST_SLICES + 1) * 2.0**-64 + 21 * chunks * 2.0**-53


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 2500))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    W = random.standard_normal((rows, columns))
    if draw(st.booleans()):
        W *= 10.0 ** random.uniform(-draw(st.integers(0, 8)), 0, (rows, 1))
    if draw(st.booleans()):
        W *= 10.0 ** random.uniform(-draw(st.integers(0, 40)), 0, W.shape)
    if draw(st.booleans()):
        W[random.random(W.shape) < 0.5] = 0.0
        W[draw(st.integers(0, rows - 1))] = 0.0
    W *= 2.0 ** draw(st.integers(-200, 200))
    kind = draw(st.sampled_from(["float64", "float32", "float16"]))
    with np.errstate(over="ignore"):
        small = W.astype(kind)
    return (small if np.isfinite(small).all() and small.any() else W).astype(np.float64)


@settings(max_examples=60)
@given(matrices(), st.sampled_from([700, 1024, 3000]))
def test_the_compensated_form_is_as_near_as_its_bound(W: np.ndarray, step: int) -> None:
    exact = W.astype(np.longdouble) @ W.T.astype(np.longdouble)
    sizes = np.linalg.norm(W, axis=1)
    room = np.maximum(sizes, sizes.max() * 2.0**-60)
    error = np.abs(gram(W, "split", step) - exact)
    assert (error <= (bound(W.shape[1], step) + W.shape[1] * 2.0**-63) * np.outer(room, room)).all()


def test_whole_numbers_come_out_exactly_also_where_float32_would_round() -> None:
    W = np.random.default_rng(0).integers(-(2**20), 2**20, (30, 1000)).astype(np.float64)
    exact = W.astype(np.int64) @ W.T.astype(np.int64)
    assert (gram(W, "split").astype(np.int64) == exact).all()
    assert (gram(W, "float64").astype(np.int64) == exact).all()
    assert (gram(W, "float32").astype(np.int64) != exact).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_panels_come_as_they_are_stored(dtype: torch.dtype) -> None:
    W = torch.from_numpy(np.random.default_rng(1).standard_normal((20, 300))).to(dtype)
    exact = W.to(torch.float64) @ W.to(torch.float64).T
    for form in ("float64", "split"):
        total = DeviceGramSum(20, DEVICE, form)
        total.add(W[:, :100])
        total.add(W.T[100:].T)
        assert torch.allclose(total.result(), exact, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("form", ["float64", "split", "float32"])
def test_numbers_that_are_none_are_told(value: float, form: str) -> None:
    W = np.ones((4, 10), np.float32)
    W[2, 7] = value
    total = DeviceGramSum(4, DEVICE, form)  # type: ignore[arg-type]
    total.add(torch.from_numpy(W))
    total.add(torch.ones(4, 3))
    assert not np.isfinite(total.peak())


def test_float32_products_are_whole_ones_while_it_lasts() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with ieee_float32():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
