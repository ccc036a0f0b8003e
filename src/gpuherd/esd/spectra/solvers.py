"""Eigenvalues of a symmetric matrix, values only: which library and which reduction for which size.

Two ways lead to the tridiagonal form. One-stage (LAPACK's dsytrd) does half of its work by products of the matrix with
one vector after another: quick while the matrix lies in a cache, bound by memory beyond. Two-stage (dsytrd_2stage)
reduces to a band by products of matrices, then chases the band: more operations, nearly all at full speed. MKL's
dsyevd is two-stage from some size on by itself.

The choice is a table of sizes (benchmarks/esd.py measures what it rests on), not a race at the start of each process:
the same machine takes the same way every time, so that results are the same to the last bit.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpuherd.esd.spectra.lapack import Lapack, LapackError, Maker, installed_mkl, loaded_library

logger = logging.getLogger(__name__)

Real = npt.NDArray[np.floating[Any]]
Way = Literal["one-stage", "two-stage"]

# From this side on the two-stage reduction of OpenBLAS is faster (measured: equal at 2304, 0.77 of the time at 2560,
# half at 4096, with one thread and with two). Below, the matrix lies in the last cache.
TWO_STAGE_FROM = 2400

# On Intel's processors MKL's dsyevd is faster than OpenBLAS from about here (4096: 3.7 against 4.7 CPU-seconds; 768:
# equal). On others it is not: on an AMD EPYC it takes 1.9 times as long at 768 and 1.07 times at 4096.
MKL_FROM = 1024
INTEL = "GenuineIntel"


@dataclass(frozen=True)
class Choice:
    """How to solve.

    Attributes:
        library: None for scipy's own wrapper, where no library can be called directly.
        way: to the tridiagonal form.
        width: of the band between two stages; of the blocks of one stage; 0 where the library's dsyevd decides.
    """

    library: Lapack | None
    way: Way
    width: int = 0


def choose(n: int, loaded: Maker | None, vendor: str, *, mkl: bool) -> tuple[Maker | None, Way]:
    """Whose library solves a matrix of side ``n``, and how (pure).

    Args:
        n: 1 or more.
        loaded: who made the library that numpy or scipy brought, None where it can't be called directly.
        vendor: of the processor, as /proc/cpuinfo calls it.
        mkl: whether an MKL is installed.
    """
    if loaded == "mkl" or (mkl and (loaded is None or (vendor == INTEL and n >= MKL_FROM))):
        return "mkl", "one-stage"
    return loaded, "two-stage" if loaded is not None and n >= TWO_STAGE_FROM else "one-stage"


def band_for(n: int) -> int:
    """The width between the two stages: a wider one makes the first faster and the second slower.

    Measured, one thread: 2560 and 3072 differ by less than 3 % from 48 to 64; 4096 is within 1 % from 48 to 128.
    """
    return 48 if n < 3072 else 64


def block_for(n: int) -> int:
    """How many columns OpenBLAS's dsytrd reduces at a time: while the matrix lies in a cache, narrow blocks leave less
    of the work to products of matrix and vector with the blocks themselves.

    Measured, one thread, the whole solution: 16 columns take 0.86 of the time of LAPACK's 32 at 100, 0.90 at 300, 0.94
    at 768; equal from 1024 on.
    """
    return 16 if n < 1024 else 32


def choice_for(n: int) -> Choice:
    """What this process takes for a matrix of side ``n``. An MKL is loaded only where it would be taken."""
    loaded, vendor = loaded_library(), cpu_vendor()
    maker = None if loaded is None else loaded.maker
    first, way = choose(n, maker, vendor, mkl=True)
    if first == "mkl" and maker != "mkl":
        found = installed_mkl()
        if found is not None:
            return Choice(found, way)
        _, way = choose(n, maker, vendor, mkl=False)
    if way == "two-stage":
        return Choice(loaded, way, band_for(n))
    return Choice(loaded, way, block_for(n) if maker == "openblas" else 0)


def symmetric_eigenvalues(matrix: Real) -> npt.NDArray[np.float64]:
    """All eigenvalues of a symmetric matrix, ascending, as float64.

    Args:
        matrix: float64 or float32 (computed in that), Fortran order, shape (n, n). Its lower triangle is read and
            overwritten; the upper is not looked at.

    Memory: a few n values, and for two stages about 3 n times the band's width.

    Rounding leaves an error of about 1e-15 to 1e-14 (float32: 1e-6 to 1e-5) times the largest; small ones can come out
    negative.
    """
    n = len(matrix)
    choice = choice_for(n)
    if choice.library is None:
        return _by_scipy(matrix)
    try:
        return _solved(choice.library, choice.way, choice.width, matrix).astype(np.float64, copy=False)
    except LapackError as problem:
        raise np.linalg.LinAlgError(str(problem)) from None


def _solved(library: Lapack, way: Way, width: int, matrix: Real) -> Real:
    if way == "two-stage":
        return library.sterf(*library.band_to_tridiagonal(library.to_band(matrix, width)))
    return library.sterf(*library.to_tridiagonal(matrix, width)) if width else library.syevd(matrix)


@cache
def cpu_vendor() -> str:
    """The processor's maker as the kernel calls it, "" where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def _by_scipy(matrix: Real) -> npt.NDArray[np.float64]:
    from scipy.linalg import eigh

    values = eigh(matrix, lower=True, eigvals_only=True, overwrite_a=True, check_finite=False, driver="evd")
    return np.asarray(values, np.float64)
