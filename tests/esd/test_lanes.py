"""Lanes by themselves: each arithmetic of a card gives the CPU's spectra, and what it can't finish is handed back."""

from __future__ import annotations

import numpy as np
import pytest

from gpuherd.esd.lanes import Lanes
from gpuherd.esd.on_device import MatrixResult
from gpuherd.esd.spectra.batching import HOST_SIDE
from gpuherd.esd.spectra.device import GramArithmetic
from gpuherd.esd.spectra.pooled import spectrum_of
from gpuherd.models.tensors.matrices import WeightMatrix
from gpuherd.models.tensors.source import FloatArray

N = HOST_SIDE + 8


def matrix(name: str, weights: FloatArray) -> WeightMatrix:
    return WeightMatrix(name, "linear", weights.shape, weights.size, None, lambda: [weights])


@pytest.mark.parametrize(
    "arithmetic",
    [GramArithmetic("float64", "device"), GramArithmetic("float64", "band"), GramArithmetic("split", "band")],
)
@pytest.mark.parametrize("needs_weights", [False, True])
def test_every_arithmetic_gives_the_spectra_of_the_cpu(arithmetic: GramArithmetic, needs_weights: bool) -> None:
    random = np.random.default_rng(0)
    shapes = [(N, 400), (500, N), (N, N), (20, 30), (N + 30, 2000)]
    matrices = [matrix(f"m{n}", random.standard_t(3, shape).astype(np.float32)) for n, shape in enumerate(shapes)]
    matrices.append(matrix("low", np.ones((N, N), np.float32)))
    done: dict[int, MatrixResult] = {}

    def on_cpu(index: int) -> MatrixResult:
        return MatrixResult(index, spectrum_of(matrices[index]), None, "cpu")

    def finish(result: MatrixResult) -> None:
        done[result.index] = result

    devices = ("cpu:0", "cpu:0")
    lanes = Lanes(matrices, range(6), needs_weights, devices, (arithmetic, arithmetic), finish, on_cpu)
    left = lanes.run()
    assert (left.alone, left.on_cpu) == ([], [5])
    assert sorted(done) == [0, 1, 2, 3, 4]
    assert done[3].device == "cpu"
    for index, result in done.items():
        assert result.spectrum is not None
        expected = spectrum_of(matrices[index]).evals
        assert np.abs(result.spectrum.evals - expected).max() <= 1e-13 * len(expected) * expected[-1]
        assert (result.weights is not None) is (needs_weights and index != 3)


@pytest.mark.parametrize("devices", [1, 3])
def test_pieces_larger_than_a_readers_share_keep_nobody_waiting(devices: int) -> None:
    random = np.random.default_rng(0)
    matrices = [matrix(f"m{n}", random.standard_normal((N + n % 2, 300)).astype(np.float32)) for n in range(40)]
    done: list[int] = []
    arithmetic = [GramArithmetic("float64", "device")] * devices
    names = ["cpu:0"] * devices

    def finish(result: MatrixResult) -> None:
        done.append(result.index)

    lanes = Lanes(matrices, range(40), False, names, arithmetic, finish, never, read_ahead_bytes=4000)
    left = lanes.run()
    assert (left.alone, left.on_cpu) == ([], [])
    assert sorted(done) == list(range(40))


def never(index: int) -> MatrixResult:
    raise AssertionError(f"matrix {index} is for the device")
