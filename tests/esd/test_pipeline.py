"""Matrices in lanes: the same rows in the same order as one after the other, and nothing lost when one goes wrong.

Lanes run on GPUs only; here torch computes on the CPU under the name "cpu:0", which takes the way of a GPU. Matrices of
a side up to 256 are computed without it, so that those of these tests are a little larger.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gpuherd.errors import BadModel
from gpuherd.esd.config import FitSettings
from gpuherd.esd.pipeline import analyse_matrices
from gpuherd.esd.resources import CudaDevices, CudaUnavailable, choose_devices
from gpuherd.esd.schema import LayerRow
from gpuherd.esd.spectra.batching import HOST_SIDE
from gpuherd.esd.spectra.pooled import LayerSpectrum
from gpuherd.models.checkpoints.open import open_checkpoint
from gpuherd.models.tensors.matrices import WeightMatrix
from gpuherd.models.tensors.matrices import matrices as read_matrices
from gpuherd.models.tensors.source import FloatArray

SETTINGS = FitSettings("xmin_mid")


HALF = (torch.bfloat16, torch.float16, torch.float32)
LARGE, SMALL = (HOST_SIDE + 40, HOST_SIDE + 4), (24, 16)


def matrix(
    name: str,
    seed: int = 0,
    read: Callable[[], list[FloatArray]] | None = None,
    shape: tuple[int, int] = LARGE,
    dtype: type = np.float32,
) -> WeightMatrix:
    weights: FloatArray = np.random.default_rng(seed).standard_t(3, shape).astype(dtype)
    return WeightMatrix(name, "linear", shape, weights.size, None, read or (lambda: [weights]))


def convolution(name: str, seed: int, positions: int = 3) -> WeightMatrix:
    weights = np.random.default_rng(seed).standard_t(3, (positions, *LARGE)).astype(np.float32)
    return WeightMatrix(name, "conv", LARGE, weights.size, None, lambda: list(weights))


def skipped(name: str) -> WeightMatrix:
    return WeightMatrix(name, "embedding", (5, 4), 20, "embedding", list)


def analysed(matrices: list[WeightMatrix], *devices: str, parallel: bool = True) -> list[LayerRow]:
    return analyse_matrices(matrices, SETTINGS, devices, parallel=parallel, on_progress=lambda _: None)


def assert_alike(rows: list[LayerRow], others: list[LayerRow]) -> None:
    assert [row.longname for row in rows] == [row.longname for row in others]
    for one, other in zip(rows, others, strict=True):
        assert (one.fit_status, one.num_evals, one.matrix_rank) == (
            other.fit_status,
            other.num_evals,
            other.matrix_rank,
        )
        if one.alpha is not None and other.alpha is not None:
            assert one.alpha == pytest.approx(other.alpha, rel=1e-9)
            assert one.norm == pytest.approx(other.norm, rel=1e-12)


def a_model() -> list[WeightMatrix]:
    """A matrix of every kind that takes a way of its own."""
    deficient = np.random.default_rng(0).standard_normal((300, 4)) @ np.random.default_rng(1).standard_normal((4, 280))
    holes = np.ones((280, 300), np.float32)
    holes[3, 5] = np.nan
    return [
        skipped("e"),
        *(matrix(f"m{n}", n) for n in range(6)),
        matrix("small", 1, shape=SMALL),
        matrix("wide", 2, shape=(300, 4000)),
        matrix("tall", 3, shape=(4000, 270)),
        matrix("double", 4, dtype=np.float64),
        convolution("conv", 5),
        matrix("deficient", read=lambda: [deficient], shape=(300, 280)),
        matrix("zero", read=lambda: [np.zeros(LARGE, np.float32)]),
        matrix("nan", read=lambda: [holes], shape=(280, 300)),
        matrix("huge", read=lambda: [matrix("", 9, dtype=np.float64).slices()[0] * 1e200]),
    ]


def test_lanes_give_the_rows_of_a_single_lane() -> None:
    matrices = a_model()
    told: list[int] = []
    spectra: dict[int, LayerSpectrum] = {}
    alone = analysed(matrices, "cpu")
    lanes = analyse_matrices(
        matrices,
        SETTINGS,
        ("cpu:0", "cpu:0"),
        parallel=True,
        on_progress=told.append,
        on_spectrum=lambda index, spectrum: spectra.update({index: spectrum}),
    )
    assert told == list(range(2, len(matrices) + 1))
    assert sorted(spectra) == list(range(1, len(matrices)))
    assert lanes[0] == alone[0]
    assert lanes[0].fit_status == "not analysed: embedding"
    assert lanes[13].fit_status == "all weights are zero"
    assert lanes[14].fit_status == "1 of 84000 weights are NaN or infinite"
    assert_alike(lanes, alone)
    assert_alike(analysed(matrices, "cpu:0", parallel=False), alone)


def test_a_checkpoint_of_16_bits_gives_the_rows_of_the_cpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {f"layers.{n}.weight": torch.randn(HOST_SIDE + 3 + 200 * (n % 2), HOST_SIDE + 90) for n in range(6)}
    save_file(
        {name: tensor.to(HALF[n % 3]) for n, (name, tensor) in enumerate(tensors.items())}, tmp_path / "m.safetensors"
    )
    found = list(read_matrices(open_checkpoint(tmp_path / "m.safetensors")))
    assert [matrix.half is not None for matrix in found] == [True, True, False] * 2
    assert_alike(analysed(found, "cpu:0"), analysed(found, "cpu"))
    assert_alike(analysed(found, "cpu:0", parallel=False), analysed(found, "cpu"))


def test_float32_is_done_in_float64_where_an_eigenvalue_would_not_be_positive() -> None:
    square = [matrix(f"m{n}", n, shape=(400, 400)) for n in range(6)]
    settings = FitSettings("xmin_mid", precision="float32")
    exact = analysed(square, "cpu")
    for parallel in (True, False):
        rows = analyse_matrices(square, settings, ("cpu:0",), parallel=parallel, on_progress=lambda _: None)
        for row, other in zip(rows, exact, strict=True):
            assert row.alpha == pytest.approx(other.alpha, rel=1e-3)
            assert row.norm == pytest.approx(other.norm, rel=1e-5)
        # Some in float32, whose small eigenvalues are noise; the others in float64 to the last digits.
        far = [abs((row.alpha or 0) / (other.alpha or 1) - 1) > 1e-9 for row, other in zip(rows, exact, strict=True)]
        assert any(far)


def test_two_runs_in_lanes_give_the_same_bits() -> None:
    matrices = [matrix(f"m{n}", n, shape=(HOST_SIDE + 4 + n % 3, 400)) for n in range(12)]
    assert analysed(matrices, "cpu:0", "cpu:0") == analysed(matrices, "cpu:0", "cpu:0")


def test_each_matrix_is_read_once_and_by_a_reader() -> None:
    reads: list[tuple[int, str]] = []

    def noted(number: int) -> Callable[[], list[FloatArray]]:
        def read() -> list[FloatArray]:
            reads.append((number, threading.current_thread().name))
            return matrix("", number).slices()

        return read

    analysed([matrix(f"m{n}", read=noted(n)) for n in range(20)], "cpu:0", "cpu:0")
    assert sorted(number for number, _ in reads) == list(range(20))
    assert all(thread.startswith("lane reader") for _, thread in reads)


def test_no_parallel_gpu_is_one_after_the_other() -> None:
    threads: set[int] = set()

    def noted() -> list[FloatArray]:
        threads.add(threading.get_ident())
        return matrix("").slices()

    matrices = [matrix(f"m{n}", read=noted) for n in range(6)]
    analysed(matrices, "cpu:0", "cpu:0", parallel=False)
    assert threads == {threading.get_ident()}
    analysed(matrices, "cpu:0", "cpu:0")
    assert len(threads) > 1


def test_what_ran_out_of_memory_beside_another_is_tried_alone() -> None:
    tries: list[str] = []

    def too_large_at_first() -> list[FloatArray]:
        tries.append(threading.current_thread().name)
        if len(tries) == 1:
            raise MemoryError
        return matrix("").slices()

    matrices = [matrix("a"), matrix("big", read=too_large_at_first), matrix("c")]
    rows = analysed(matrices, "cpu:0")
    assert [row.fit_status for row in rows] == ["ok"] * 3
    assert tries[0].startswith("lane reader")
    assert tries[1:] == [threading.main_thread().name]


def test_running_out_of_memory_while_it_is_fitted_is_such_a_case_too() -> None:
    failed: list[int] = []

    def once(index: int, _: LayerSpectrum) -> None:
        if index == 1 and not failed:
            failed.append(index)
            raise MemoryError

    rows = analyse_matrices(
        [matrix(f"m{n}", n) for n in range(4)],
        SETTINGS,
        ("cpu:0",),
        parallel=True,
        on_progress=lambda _: None,
        on_spectrum=once,
    )
    assert [row.fit_status for row in rows] == ["ok"] * 4
    assert failed == [1]


@pytest.mark.parametrize("error", [BadModel("damaged"), MemoryError()])
def test_an_error_ends_all_lanes_and_comes_out(error: Exception) -> None:
    def fails() -> list[FloatArray]:
        raise error

    matrices = [matrix("a"), matrix("bad", read=fails), *(matrix(f"m{n}") for n in range(20))]
    with pytest.raises(type(error)):
        analysed(matrices, "cpu:0")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane")]


TWO = CudaDevices(("A", "B"))
NONE = CudaDevices(problem="no CUDA driver on this machine")


def unasked() -> str | None:
    raise AssertionError("torch must not be imported for this")


def test_which_devices_are_used() -> None:
    assert choose_devices("auto", TWO, lambda: None, all_gpus=True) == (("cuda:0", "cuda:1"), None)
    assert choose_devices("cuda", TWO, lambda: None, all_gpus=False) == (("cuda:0",), None)
    assert choose_devices("auto", NONE, unasked, all_gpus=True) == (("cpu",), NONE.problem)
    assert choose_devices("cpu", TWO, unasked, all_gpus=True)[0] == ("cpu",)
    assert choose_devices("auto", TWO, lambda: "CPU-only build", all_gpus=True) == (("cpu",), "CPU-only build")
    with pytest.raises(CudaUnavailable, match="no CUDA driver"):
        choose_devices("cuda", NONE, unasked, all_gpus=True)
    with pytest.raises(CudaUnavailable, match="CPU-only"):
        choose_devices("cuda", TWO, lambda: "CPU-only build", all_gpus=True)
