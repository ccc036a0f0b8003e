"""Matrices in lanes: the same rows in the same order as one after the other, and nothing lost when one goes wrong.

Lanes run on GPUs only; here torch computes on the CPU under the name "cpu:0", which takes the way of a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from gpuherd.errors import BadModel
from gpuherd.esd.devices import CudaDevices, NoCuda, choose_devices
from gpuherd.esd.pipeline import analyse_matrices
from gpuherd.esd.settings import FitSettings
from gpuherd.models.dtypes import FloatArray
from gpuherd.models.matrices import WeightMatrix

SETTINGS = FitSettings("xmin_mid")


def matrix(name: str, seed: int = 0, read: Callable[[], list[FloatArray]] | None = None) -> WeightMatrix:
    weights = np.random.default_rng(seed).standard_t(3, (24, 16)).astype(np.float32)
    return WeightMatrix(name, "linear", (24, 16), 24 * 16, None, read or (lambda: [weights]))


def skipped(name: str) -> WeightMatrix:
    return WeightMatrix(name, "embedding", (5, 4), 20, "embedding", list)


def test_lanes_give_the_rows_of_a_single_lane() -> None:
    matrices = [skipped("e"), *(matrix(f"m{n}", n) for n in range(20))]
    told: list[int] = []
    alone = analyse_matrices(matrices, SETTINGS, ("cpu",), parallel=True, on_progress=told.append)
    assert told == list(range(2, 22))
    told.clear()
    lanes = analyse_matrices(matrices, SETTINGS, ("cpu:0", "cpu:0"), parallel=True, on_progress=told.append)
    assert told == list(range(2, 22))
    assert [row.longname for row in lanes] == [row.longname for row in alone] == ["e", *(f"m{n}" for n in range(20))]
    assert lanes[0] == alone[0]
    assert lanes[0].fit_status == "not analysed: embedding"
    for one, other in zip(lanes[1:], alone[1:], strict=True):
        assert one.alpha == pytest.approx(other.alpha, rel=1e-9)
        assert one.norm == pytest.approx(other.norm, rel=1e-12)


def test_no_parallel_gpu_is_one_after_the_other() -> None:
    threads: set[int] = set()

    def noted() -> list[FloatArray]:
        threads.add(threading.get_ident())
        return matrix("").slices()

    matrices = [matrix(f"m{n}", read=noted) for n in range(6)]
    analyse_matrices(matrices, SETTINGS, ("cpu:0", "cpu:0"), parallel=False, on_progress=lambda _: None)
    assert threads == {threading.get_ident()}
    analyse_matrices(matrices, SETTINGS, ("cpu:0", "cpu:0"), parallel=True, on_progress=lambda _: None)
    assert len(threads) > 1


def test_what_ran_out_of_memory_beside_another_is_tried_alone() -> None:
    tries: list[str] = []

    def too_large_at_first() -> list[FloatArray]:
        tries.append(threading.current_thread().name)
        if len(tries) == 1:
            raise MemoryError
        return matrix("").slices()

    matrices = [matrix("a"), matrix("big", read=too_large_at_first), matrix("c")]
    rows = analyse_matrices(matrices, SETTINGS, ("cpu:0",), parallel=True, on_progress=lambda _: None)
    assert [row.fit_status for row in rows] == ["ok"] * 3
    assert tries[1] == threading.main_thread().name


@pytest.mark.parametrize("error", [BadModel("damaged"), MemoryError()])
def test_an_error_ends_all_lanes_and_comes_out(error: Exception) -> None:
    def fails() -> list[FloatArray]:
        raise error

    matrices = [matrix("a"), matrix("bad", read=fails), *(matrix(f"m{n}") for n in range(20))]
    with pytest.raises(type(error)):
        analyse_matrices(matrices, SETTINGS, ("cpu:0",), parallel=True, on_progress=lambda _: None)
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
    with pytest.raises(NoCuda, match="no CUDA driver"):
        choose_devices("cuda", NONE, unasked, all_gpus=True)
    with pytest.raises(NoCuda, match="CPU-only"):
        choose_devices("cuda", TWO, lambda: "CPU-only build", all_gpus=True)
