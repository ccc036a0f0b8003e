"""Matrices on a device: how each is cut and planned, and the same spectra in every arithmetic and every grouping."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpuherd.esd.on_device import (
    MatrixWork,
    compute_group,
    piece_bytes,
    process_single,
    read_pieces,
    settle,
    size_of,
    staged,
)
from gpuherd.esd.spectra.batching import HOST_SIDE, Size, lane_bytes, panel_length
from gpuherd.esd.spectra.device import GramArithmetic
from gpuherd.esd.spectra.pooled import spectrum_of
from gpuherd.models.tensors.fused import FusedLayout
from gpuherd.models.tensors.matrices import MatrixPart, WeightMatrix
from gpuherd.models.tensors.source import FloatArray

DEVICE = "cpu:0"


def matrix(
    shape: tuple[int, int], seed: int = 0, positions: int = 1, part: MatrixPart | None = None, factors: bool = False
) -> WeightMatrix:
    weights: list[FloatArray] = list(np.random.default_rng(seed).standard_t(3, (positions, *shape)).astype(np.float32))
    return WeightMatrix(
        f"m{seed}",
        "conv" if positions > 1 else "linear",
        shape,
        positions * shape[0] * shape[1],
        None,
        lambda: weights,
        tensor="fused",
        part=part or MatrixPart(),
        factors=list if factors else None,
    )


def test_what_a_plan_knows_of_a_matrix() -> None:
    plain = size_of(3, matrix((300, 500)), None)
    assert plain == Size(3, 300, 500, pieces=1, bundle=None, on_host=False)
    assert size_of(0, matrix((300, 400), positions=9), None).pieces == 9
    assert size_of(0, matrix((300, 400), factors=True), None).on_host
    assert size_of(0, matrix((600, 400)), lane_bytes(400) - 1).on_host
    assert not size_of(0, matrix((600, 400)), lane_bytes(400)).on_host


def test_parts_that_are_read_together_go_together() -> None:
    part = MatrixPart(2, FusedLayout(1, 4, (("_q", 8), ("_k", 8))), 1)
    together = matrix((300, 400), part=part)
    assert size_of(0, together, None).bundle == ("fused", 2)
    assert size_of(0, replace(together, stream=lambda most: iter(())), None).bundle is None


@pytest.mark.parametrize("shape", [(300, 300), (3000, 300), (300, 70_000)])
def test_pieces_are_the_matrix_and_of_bounded_size(shape: tuple[int, int]) -> None:
    whole = matrix(shape)
    pieces = list(read_pieces(whole, DEVICE, whole=False))
    assert max(max(piece.shape) for piece in pieces) <= max(300, panel_length(300, 4))
    joined = np.concatenate([piece.numpy() for piece in pieces], axis=0 if shape[0] >= shape[1] else 1)
    assert (joined == whole.slices()[0]).all()
    assert [piece_bytes(piece) for piece in read_pieces(whole, DEVICE, whole=True)] == [4 * shape[0] * shape[1]]


def test_what_is_sent_keeps_its_precision() -> None:
    double = np.array([[1 + 2.0**-50]])
    assert staged(double, DEVICE).numpy() == double
    read_only = np.broadcast_to(np.float32(3), (2, 3))
    assert (staged(read_only, DEVICE).numpy() == 3).all()


@pytest.mark.parametrize("arithmetic", [GramArithmetic("float64", "device"), GramArithmetic("split", "band")])
@pytest.mark.parametrize("batch", [1, 2, 100])
@pytest.mark.parametrize("whole", [False, True])
def test_groups_give_the_spectra_of_the_cpu(arithmetic: GramArithmetic, batch: int, whole: bool) -> None:
    shapes = [(60, 90), (90, 60), (60, 60), (70, 200)]
    matrices = [matrix(shape, seed) for seed, shape in enumerate(shapes)]
    matrices.insert(2, matrix((60, 80), 7, positions=5))
    work = []
    for index, each in enumerate(matrices):
        slices = whole or each.kind == "conv"
        work.append(MatrixWork(10 + index, each, read_pieces(each, DEVICE, slices), slices))
    results = [settle(each) for each in compute_group(work, DEVICE, arithmetic, lambda side: batch)]
    assert [result.index for result in results] == [10, 11, 12, 13, 14]
    for result, each in zip(results, matrices, strict=True):
        expected = spectrum_of(each).evals
        assert result.spectrum is not None
        assert result.device == DEVICE
        assert (result.weights is not None) is (whole or each.kind == "conv")
        assert np.abs(result.spectrum.evals - expected).max() <= 1e-13 * len(expected) * expected[-1]


def test_one_that_cannot_be_resolved_leaves_the_others_of_its_group() -> None:
    low = np.ones((60, 80), np.float32)
    matrices = [matrix((60, 80), 1), replace(matrix((60, 80), 2), slices=lambda: [low]), matrix((60, 80), 3)]
    work = [MatrixWork(n, each, read_pieces(each, DEVICE, whole=False), False) for n, each in enumerate(matrices)]
    computed = compute_group(work, DEVICE, GramArithmetic("float64", "device"), lambda side: 8)
    results = [settle(each) for each in computed]
    assert [result.spectrum is None for result in results] == [False, True, False]


def test_alone_leaves_to_the_cpu_what_it_is_better_at() -> None:
    small, large = matrix((HOST_SIDE, 400)), matrix((HOST_SIDE + 1, 400))
    assert process_single(0, small, "float64", needs_weights=False, device=DEVICE).spectrum is None
    result = process_single(4, large, "float64", needs_weights=True, device=DEVICE)
    assert (result.index, result.spectrum is None, result.weights is None) == (4, False, False)
