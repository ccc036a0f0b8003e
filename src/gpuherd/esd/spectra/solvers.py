"""Eigenvalues of a symmetric matrix, values only: which library and which reduction for which size, and the calls.

LAPACK's routines are called directly in the library that numpy or scipy brought, or in an installed MKL. Two ways
lead to the tridiagonal form. One-stage (dsytrd) does half of its work by products of the matrix with one vector after
another: quick while the matrix lies in a cache, bound by memory beyond. Two-stage (dsytrd_2stage) reduces to a band
by products of matrices, then chases the band: more operations, nearly all at full speed. MKL's dsyevd is two-stage
from some size on by itself.

The choice is a table of sizes (benchmarks/esd.py measures what it rests on), not a race at the start of each process:
the same machine takes the same way every time, so that results are the same to the last bit.
"""

from __future__ import annotations

import ctypes
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

# ---- the libraries that are there, called directly
#
# scipy's wrappers leave out what makes the difference here: MKL, where scipy was built with another library; the
# two-stage reduction that every OpenBLAS has; and a call that leaves a large matrix where it is. So the library files
# are found (in what numpy and scipy have brought into this process, and in an installed MKL), opened by ctypes, and
# tried on a small matrix whose eigenvalues are known before anything depends on them.

logger = logging.getLogger(__name__)

Real = npt.NDArray[np.floating[Any]]
Maker = Literal["mkl", "openblas"]

# Prefix and suffix of the Fortran names: those of scipy's and numpy's wheels, of plain builds, of ILP64 builds.
NAMES = (("scipy_", "_"), ("scipy_", "_64_"), ("", "_"), ("", "_64_"), ("", "64_"))
ROUTINES = ("syrk", "syevd", "sytrd", "sytrd_sy2sb", "sytrd_sb2st", "sterf")

# BLAS may round otherwise where data begin elsewhere; on a boundary of a cache line they always begin alike.
ALIGNMENT = 64

# The library is tried on a matrix of this side: large enough for blocked code, and for a band of TRIAL_BAND.
TRIAL_SIDE, TRIAL_BAND, TRIAL_BLOCK = 80, 8, 16


class LapackError(RuntimeError):
    """A routine reported a failure (its ``info`` is not 0)."""


@dataclass(frozen=True)
class Lapack:
    """One library, opened.

    Integers go by reference as 64-bit numbers. On the little-endian machines that Python's wheels exist for, a library
    with 32-bit integers reads their lower half, so one way of calling serves both.

    Attributes:
        maker: who made it.
        path: its file.
        prefix, suffix: what stands around the Fortran names.
    """

    maker: Maker
    path: str
    prefix: str
    suffix: str
    handle: ctypes.CDLL

    def syrk(self, panel: Real, gram: Real, *, transposed: bool, first: bool) -> None:
        """Adds ``panel panelᵀ`` (``transposed``: ``panelᵀ panel``) to the lower triangle of ``gram``, in place.

        Args:
            panel: float32 or float64, Fortran order, shape (n, k) or, transposed, (k, n).
            gram: shape (n, n), Fortran order, of the panel's type. What is above the diagonal is not touched.
            first: nothing is in ``gram`` yet; it is written, not added to.
        """
        n, k = len(gram), panel.shape[0 if transposed else 1]
        letters = (b"L", b"T" if transposed else b"N")
        self._call("syrk", gram.dtype, *letters, n, k, 1.0, panel, panel.shape[0], 0.0 if first else 1.0, gram, n)

    def syevd(self, matrix: Real) -> Real:
        """Eigenvalues of a symmetric matrix, ascending, from its lower triangle, which is overwritten.

        One call of the library's dsyevd or ssyevd for values only: one-stage in OpenBLAS, two-stage within MKL.
        Raises LapackError if it does not converge.
        """
        n = len(matrix)
        values = np.empty(n, matrix.dtype)
        self._call_with_work("syevd", matrix.dtype, (matrix.dtype, np.int64), b"N", b"L", n, matrix, n, values)
        return values

    def to_tridiagonal(self, matrix: Real, block: int) -> tuple[Real, Real]:
        """One stage: diagonal (n,) and subdiagonal (n - 1,) of a tridiagonal matrix of the same eigenvalues.

        Args:
            matrix: symmetric, Fortran order; its lower triangle is read and overwritten.
            block: columns reduced at a time, 1 or more. The workspace tells: LAPACK's dsytrd takes as many as fit, at
                most its own 32.
        """
        n, dtype = len(matrix), matrix.dtype
        diagonal, below, tau = (np.empty(n, dtype) for _ in range(3))
        work = np.empty(block * n, dtype)
        self._call("sytrd", dtype, b"L", n, matrix, n, diagonal, below, tau, work, len(work))
        return diagonal, below[: n - 1]

    def to_band(self, matrix: Real, band: int) -> Real:
        """The first stage: an orthogonal similarity that leaves ``band`` diagonals below the main one.

        Args:
            matrix: symmetric, Fortran order; its lower triangle is read and overwritten.
            band: 1 to n - 1.

        Returns:
            Shape (band + 1, n), Fortran order, in LAPACK's lower band storage.

        Source: LAPACK's dsytrd_sy2sb (Haidar, Ltaief & Dongarra, SC 2011): all of its work is in level-3 BLAS.
        """
        n, dtype = len(matrix), matrix.dtype
        banded = np.zeros((band + 1, n), dtype, order="F")
        tau = np.empty(n, dtype)
        self._call_with_work("sytrd_sy2sb", dtype, (dtype,), b"L", n, band, matrix, n, banded, band + 1, tau)
        return banded

    def band_to_tridiagonal(self, banded: Real) -> tuple[Real, Real]:
        """The second stage: diagonal (n,) and subdiagonal (n - 1,) of a tridiagonal matrix of the same eigenvalues.

        ``banded`` is left as it is. Source: LAPACK's dsytrd_sb2st, which chases bulges within the cache.
        """
        band, n, dtype = banded.shape[0] - 1, banded.shape[1], banded.dtype
        diagonal, below = np.empty(n, dtype), np.empty(n, dtype)
        about = (b"Y", b"N", b"L", n, band, banded, band + 1, diagonal, below)
        self._call_with_work("sytrd_sb2st", dtype, (dtype, dtype), *about)
        return diagonal, below[: n - 1]

    def sterf(self, diagonal: Real, below: Real) -> Real:
        """Eigenvalues of a symmetric tridiagonal matrix, ascending, by the square-root-free QR; both are overwritten.

        Raises LapackError if it does not converge.
        """
        self._call("sterf", diagonal.dtype, len(diagonal), diagonal, below)
        return diagonal

    def _call_with_work(self, routine: str, dtype: np.dtype[Any], kinds: Sequence[npt.DTypeLike], *about: Any) -> None:
        """Calls a routine that takes workspaces of these types behind its other arguments, each as large as it says."""
        asked = [np.zeros(1, kind) for kind in kinds]
        self._call(routine, dtype, *about, *(each for work in asked for each in (work, -1)))
        sizes = [int(work[0]) if work.dtype.kind == "f" else _low(int(work[0])) for work in asked]
        works = [np.empty(max(1, size), kind) for size, kind in zip(sizes, kinds, strict=True)]
        self._call(routine, dtype, *about, *(each for work in works for each in (work, len(work))))

    def _call(self, routine: str, dtype: np.dtype[Any], *arguments: Any) -> None:
        """Calls a Fortran routine, all arguments by reference: letters first, as all of these have it, and their hidden
        lengths last, behind ``info``, which syrk does not have. Raises LapackError where that is not 0."""
        letter, real = ("s", ctypes.c_float) if dtype == np.float32 else ("d", ctypes.c_double)
        function = getattr(self.handle, f"{self.prefix}{letter}{routine}{self.suffix}")

        def reference(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                return ctypes.c_void_p(value.ctypes.data)
            return (
                value
                if isinstance(value, bytes)
                else ctypes.byref((ctypes.c_int64 if isinstance(value, int) else real)(value))
            )

        info = ctypes.c_int64(0)
        behind = [] if routine == "syrk" else [ctypes.byref(info)]
        lengths = [ctypes.c_size_t(1) for each in arguments if isinstance(each, bytes)]
        function(*map(reference, arguments), *behind, *lengths)
        if code := _low(info.value):
            raise LapackError(f"{routine} failed with info = {code}")


@cache
def loaded_library() -> Lapack | None:
    """The library that numpy (else scipy) has brought into this process, if it can be called and counts right.

    numpy's comes first: it is there in any case, so that its products and ours share one pool of threads, and importing
    scipy.linalg would cost a worker 0.3 s.
    """
    found = _first_good(_in_this_process())
    if found is not None:
        return found
    import scipy.linalg  # noqa: F401 - loads it

    return _first_good(_in_this_process())


@cache
def installed_mkl() -> Lapack | None:
    """MKL, if it is installed; it is loaded by this. None on the many machines without it."""
    return _first_good(_mkl_files())


def _first_good(files: Iterable[tuple[Maker, str]]) -> Lapack | None:
    for maker, path in files:
        library = _opened(maker, path)
        if library is not None:
            logger.debug("LAPACK: %s, %s", maker, path)
            return library
    return None


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Real:
    """An array in Fortran order, not initialised, whose data begin at a multiple of 64 bytes."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(kind).reshape(shape, order="F")


def _in_this_process() -> Iterator[tuple[Maker, str]]:
    """OpenBLAS or MKL files that are mapped into this process, those of numpy first."""
    try:
        text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return
    paths = {line.split(maxsplit=5)[5] for line in text.splitlines() if line.count(" ") > 4 and "/" in line}
    for path in sorted(paths, key=lambda path: ("numpy" not in Path(path).parent.name, path)):
        name = Path(path).name
        if "openblas" in name:
            yield "openblas", path
        elif name.startswith("libmkl_rt"):
            yield "mkl", path


def _mkl_files() -> Iterator[tuple[Maker, str]]:
    """MKL's single dynamic library, where pip or conda puts it in this environment."""
    for folder in dict.fromkeys((sys.prefix, sys.exec_prefix)):
        for path in sorted(Path(folder, "lib").glob("libmkl_rt.so*"), reverse=True):
            if re.fullmatch(r"libmkl_rt\.so(\.\d+)*", path.name):
                yield "mkl", str(path)


def _opened(maker: Maker, path: str) -> Lapack | None:
    """The library, if it can be opened, has all routines under one of the known names, and counts right."""
    from gpuherd.esd.resources import before_mkl

    if maker == "mkl":
        before_mkl()
    try:
        handle = ctypes.CDLL(path)
    except OSError as problem:
        logger.info("%s can't be opened: %s", path, problem)
        return None
    for prefix, suffix in NAMES:
        if all(hasattr(handle, f"{prefix}{letter}{name}{suffix}") for letter in "sd" for name in ROUTINES):
            library = Lapack(maker, path, prefix, suffix, handle)
            return library if _passes_trial(library) else None
    logger.info("%s has not all of %s", path, ", ".join(ROUTINES))
    return None


def _passes_trial(library: Lapack) -> bool:
    """Whether every routine, in both types, gives the eigenvalues 4 sin²(kπ / 2(n+1)) of the second difference.

    The matrix is rotated by I - 2vvᵀ first, so that it is full; its square root stands in for weights.
    """
    n = TRIAL_SIDE
    angles = np.pi * np.arange(1, n + 1) / (n + 1)
    expected = 4 * np.sin(angles / 2) ** 2
    v = np.ones(n) / np.sqrt(n)
    waves = np.sqrt(2 / (n + 1)) * np.sin(np.outer(np.arange(1, n + 1), angles))
    weights = (np.eye(n) - 2 * np.outer(v, v)) @ waves * np.sqrt(expected)
    for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 1e-4)):
        panel = np.asfortranarray(weights.astype(dtype))
        try:
            values = [library.syevd(_trial_gram(library, panel))]
            values.append(library.sterf(*library.to_tridiagonal(_trial_gram(library, panel), TRIAL_BLOCK)))
            banded = library.to_band(_trial_gram(library, panel), TRIAL_BAND)
            values.append(library.sterf(*library.band_to_tridiagonal(banded)))
        except LapackError as problem:
            logger.info("%s is not used: %s", library.path, problem)
            return False
        if not all(np.allclose(found, expected, rtol=0, atol=tolerance) for found in values):
            logger.warning("%s is not used: it gets the eigenvalues of a known matrix wrong", library.path)
            return False
    return True


def _trial_gram(library: Lapack, panel: Real) -> Real:
    gram = aligned((len(panel), len(panel)), panel.dtype)
    library.syrk(panel[:, :30], gram, transposed=False, first=True)
    library.syrk(np.asfortranarray(panel[:, 30:].T), gram, transposed=True, first=False)
    return gram


def _low(number: int) -> int:
    """The lower 32 bits as a signed number: what a library with 32-bit integers has written."""
    return ctypes.c_int32(number & 0xFFFFFFFF).value


# ---- which of them, and which way, for which size

Way = Literal["one-stage", "two-stage"]

# From this side on the two-stage reduction of OpenBLAS is faster (measured: equal at 2304, 0.77 of the time at 2560,
# half at 4096, with one thread and with two). Below, the matrix lies in the last cache.
TWO_STAGE_FROM = 2400

# On Intel's processors MKL's dsyevd is faster than OpenBLAS from about here (4096: 3.7 against 4.7 CPU-seconds; 768:
# equal). On others it is not: on an AMD EPYC it takes 1.9 times as long at 768 and 1.07 times at 4096.
MKL_FROM = 1024
INTEL = "GenuineIntel"


@dataclass(frozen=True)
class SolverChoice:
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


def choice_for(n: int) -> SolverChoice:
    """What this process takes for a matrix of side ``n``. An MKL is loaded only where it would be taken."""
    loaded, vendor = loaded_library(), cpu_vendor()
    maker = None if loaded is None else loaded.maker
    first, way = choose(n, maker, vendor, mkl=True)
    if first == "mkl" and maker != "mkl":
        found = installed_mkl()
        if found is not None:
            return SolverChoice(found, way)
        _, way = choose(n, maker, vendor, mkl=False)
    if way == "two-stage":
        return SolverChoice(loaded, way, band_for(n))
    return SolverChoice(loaded, way, block_for(n) if maker == "openblas" else 0)


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
