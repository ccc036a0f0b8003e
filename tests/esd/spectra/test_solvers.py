"""Which way for which size, and that each way ends at the same eigenvalues, the same bytes every time."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from gpuherd.esd.spectra import solvers
from gpuherd.esd.spectra.solvers import INTEL, MKL_FROM, TWO_STAGE_FROM, Maker, aligned, band_for, choice_for, choose

SOURCE = str(Path(__file__).parents[3] / "src")


@pytest.mark.parametrize(
    ("n", "loaded", "vendor", "mkl", "expected"),
    [
        (768, "openblas", INTEL, False, ("openblas", "one-stage")),
        (TWO_STAGE_FROM - 1, "openblas", INTEL, False, ("openblas", "one-stage")),
        (TWO_STAGE_FROM, "openblas", INTEL, False, ("openblas", "two-stage")),
        (MKL_FROM - 1, "openblas", INTEL, True, ("openblas", "one-stage")),
        (MKL_FROM, "openblas", INTEL, True, ("mkl", "one-stage")),
        (8192, "openblas", INTEL, True, ("mkl", "one-stage")),
        (8192, "openblas", "AuthenticAMD", True, ("openblas", "two-stage")),
        (8192, "openblas", "", True, ("openblas", "two-stage")),
        (100, None, "AuthenticAMD", True, ("mkl", "one-stage")),
        (8192, None, INTEL, False, (None, "one-stage")),
        (8192, "mkl", "AuthenticAMD", False, ("mkl", "one-stage")),
    ],
)
def test_choice(n: int, loaded: Maker | None, vendor: str, mkl: bool, expected: tuple[str, str]) -> None:
    assert choose(n, loaded, vendor, mkl=mkl) == expected


def test_the_band_is_narrower_than_the_matrix() -> None:
    assert all(0 < band_for(n) < n for n in range(TWO_STAGE_FROM, 20_000, 500))


@pytest.mark.parametrize("n", [2, 100, 700])
def test_openblas_takes_narrow_blocks_while_a_matrix_lies_in_a_cache(n: int) -> None:
    choice = choice_for(n)
    if choice.library is None or choice.library.maker != "openblas":
        pytest.skip("this machine has no OpenBLAS, or a better way")
    assert (choice.way, choice.width) == ("one-stage", 16)
    W = np.random.default_rng(n).standard_normal((n, n + 5))
    expected = np.linalg.svd(W, compute_uv=False)[::-1] ** 2
    found = solvers.symmetric_eigenvalues(np.asfortranarray(W @ W.T))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-15 * n * expected[-1])


def test_two_stages_are_taken_and_right(gram: npt.NDArray[np.float64]) -> None:
    n = len(gram)
    if choice_for(n).way == "one-stage":
        pytest.skip("this machine has no OpenBLAS, or a better way")
    expected = np.linalg.eigvalsh(gram)
    found = solvers.symmetric_eigenvalues(gram)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-15 * n * expected[-1])


@pytest.fixture
def gram() -> npt.NDArray[np.float64]:
    W = np.random.default_rng(0).standard_normal((TWO_STAGE_FROM, 2500), dtype=np.float32).astype(np.float64)
    matrix = aligned((len(W), len(W)), np.float64)
    np.matmul(W, W.T, out=matrix)
    return matrix.view(np.float64)


def test_scipys_wrapper_where_no_library_can_be_called() -> None:
    W = np.random.default_rng(0).standard_normal((90, 100))
    G = np.asfortranarray(W @ W.T)
    expected = np.linalg.eigvalsh(G)
    np.testing.assert_allclose(solvers._by_scipy(G.copy(order="F")), expected, rtol=0, atol=1e-13 * expected[-1])
    single = solvers._by_scipy(np.asfortranarray(G.astype(np.float32)))
    assert single.dtype == np.float64
    np.testing.assert_allclose(single, expected, rtol=0, atol=1e-4 * expected[-1])


DIGEST = """
import hashlib, sys
import numpy as np
pad = [bytearray(size) for size in map(int, sys.argv[2].split(","))]  # memory lies elsewhere in each run
from gpuherd.esd.spectra.eigenvalues import eigenvalues
W = np.random.default_rng(0).standard_normal((int(sys.argv[1]), 900), dtype=np.float32)
sys.stdout.buffer.write(eigenvalues(W).tobytes())
"""


def computed(n: int, pad: str, threads: int) -> bytes:
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads), "PYTHONPATH": SOURCE}
    command = [sys.executable, "-c", DIGEST, str(n), pad]
    return subprocess.run(command, capture_output=True, check=True, env=env).stdout


def test_two_runs_give_the_same_bytes_and_two_threads_nearly() -> None:
    n = 701
    one, again, two = computed(n, "1", 1), computed(n, "48,100003,77", 1), computed(n, "5", 2)
    assert hashlib.sha256(one).digest() == hashlib.sha256(again).digest()
    first, second = np.frombuffer(one), np.frombuffer(two)
    np.testing.assert_allclose(second, first, rtol=0, atol=1e-12 * first[-1])
