"""Libraries called directly: what they compute, and that one which counts wrong, or is none, is never taken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from gpuherd.esd.spectra import solvers
from gpuherd.esd.spectra.solvers import Lapack, LapackError, aligned, installed_mkl, loaded_library

Float64 = npt.NDArray[np.float64]


@pytest.fixture(params=["loaded", "mkl"])
def library(request: pytest.FixtureRequest) -> Lapack:
    found = loaded_library() if request.param == "loaded" else installed_mkl()
    if found is None:
        pytest.skip(f"no {request.param} library can be called here")
    return found


def gram_of(W: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    gram = aligned((len(W), len(W)), W.dtype)
    gram[...] = W @ W.T
    return gram


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("tall", [False, True])
def test_syrk_adds_up_panels_and_leaves_the_upper_triangle_alone(library: Lapack, dtype: type, tall: bool) -> None:
    W: npt.NDArray[np.floating] = np.random.default_rng(0).standard_normal((60, 100)).astype(dtype)
    gram = aligned((60, 60), dtype)
    gram[...] = 7.0
    for number, start in enumerate(range(0, 100, 30)):
        part = W[:, start : start + 30]
        panel = np.asfortranarray(part.T) if tall else np.asfortranarray(part)
        library.syrk(panel, gram, transposed=tall, first=number == 0)
    rows, columns = np.tril_indices(60)
    np.testing.assert_allclose(
        gram[rows, columns], (W @ W.T)[rows, columns], rtol=0, atol=1e-3 if dtype is np.float32 else 1e-12
    )
    assert (gram[np.triu_indices(60, 1)] == 7.0).all()


@pytest.mark.parametrize("n", [1, 2, 3, 31, 64, 65, 200])
def test_one_stage(library: Lapack, n: int) -> None:
    G = gram_of(np.random.default_rng(n).standard_normal((n, 2 * n)))
    expected = np.linalg.eigvalsh(G)
    np.testing.assert_allclose(library.syevd(G), expected, rtol=0, atol=1e-14 * n * expected[-1])


@pytest.mark.parametrize("n", [1, 2, 3, 31, 65, 200])
@pytest.mark.parametrize("block", [1, 16, 32])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_stage_in_blocks(library: Lapack, n: int, block: int, dtype: type) -> None:
    G = gram_of(np.random.default_rng(n).standard_normal((n, 2 * n)).astype(dtype))
    expected = np.linalg.eigvalsh(G.astype(np.float64))
    diagonal, below = library.to_tridiagonal(G, block)
    assert (diagonal.shape, below.shape) == ((n,), (n - 1,))
    eps = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(library.sterf(diagonal, below), expected, rtol=0, atol=50 * eps * n * expected[-1])


@pytest.mark.parametrize(("n", "band"), [(3, 1), (40, 8), (65, 32), (200, 48), (300, 64)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_two_stage(library: Lapack, n: int, band: int, dtype: type) -> None:
    G = gram_of(np.random.default_rng(n).standard_normal((n, 2 * n)).astype(dtype))
    expected = np.linalg.eigvalsh(G.astype(np.float64))
    banded = library.to_band(G, band)
    assert banded.shape == (band + 1, n)
    diagonal, below = library.band_to_tridiagonal(banded)
    assert below.shape == (n - 1,)
    eps = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(library.sterf(diagonal, below), expected, rtol=0, atol=50 * eps * n * expected[-1])


def test_what_is_above_the_diagonal_does_not_count(library: Lapack) -> None:
    G = gram_of(np.random.default_rng(0).standard_normal((50, 60)))
    expected = np.linalg.eigvalsh(G)
    ways = (
        library.syevd,
        lambda A: library.sterf(*library.to_tridiagonal(A, 16)),
        lambda A: library.sterf(*library.band_to_tridiagonal(library.to_band(A, 8))),
    )
    for solve in ways:
        spoilt = aligned((50, 50), np.float64)
        spoilt[...] = np.where(np.triu(np.ones((50, 50)), 1) > 0, np.nan, G)
        np.testing.assert_allclose(solve(spoilt), expected, rtol=0, atol=1e-12 * expected[-1])


def test_a_failure_of_a_routine_is_told(library: Lapack) -> None:
    with pytest.raises(LapackError, match="sterf failed with info"):
        library.sterf(np.ones(5), np.full(4, np.nan))


def test_arrays_begin_at_a_cache_line() -> None:
    for size in (1, 3, 100, 5000):
        array = aligned((size, 3), np.float32)
        assert array.ctypes.data % 64 == 0
        assert array.flags.f_contiguous
        assert array.shape == (size, 3)


BENT = """
#include <stdint.h>
#define BOTH(name) void s##name##_(void) {} void d##name##_(void) {}
BOTH(syrk) BOTH(sytrd) BOTH(sytrd_sy2sb) BOTH(sytrd_sb2st) BOTH(sterf)
static void one(double *work, int32_t *iwork) { work[0] = 8; iwork[0] = 8; }
void dsyevd_(char *z, char *l, int32_t *n, double *a, int32_t *lda, double *w, double *work, int32_t *lwork,
             int32_t *iwork, int32_t *liwork, int32_t *info) {
  *info = 0;
  if (*lwork == -1) { one(work, iwork); return; }
  for (int i = 0; i < *n; i++) w[i] = i;
}
void ssyevd_(void) {}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler to make such a library with")
def test_a_library_that_counts_wrong_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, target = tmp_path / "bent.c", tmp_path / "libopenblas_bent.so"
    source.write_text(BENT)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", target, source], check=True)
    assert solvers._opened("openblas", str(target)) is None
    assert "gets the eigenvalues of a known matrix wrong" in caplog.text


def test_what_is_no_such_library_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "libopenblas.so").write_bytes(b"no library")
    assert solvers._opened("openblas", str(tmp_path / "libopenblas.so")) is None
    other = sys.modules["_socket"].__file__  # a library, with none of the routines
    assert other is None or solvers._opened("openblas", other) is None


def test_numpys_own_library_is_taken_and_scipy_stays_out() -> None:
    """Where numpy comes as a wheel: the others bring theirs later, if at all."""
    found = loaded_library()
    assert found is not None
    if "numpy" not in Path(found.path).parent.name:
        pytest.skip("this numpy has no library of its own")
    code = (
        "import sys, numpy as np; from gpuherd.esd.spectra.eigenvalues import eigenvalues;"
        "eigenvalues(np.random.default_rng(0).standard_normal((30, 40))); sys.exit('scipy' in sys.modules)"
    )
    source = str(Path(__file__).parents[3] / "src")
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": source})
