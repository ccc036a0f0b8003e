"""The first half of a symmetric eigenvalue problem on a GPU: an orthogonal similarity that leaves a narrow band.

All of its n³ work is products of matrices, which a GPU does well and a CPU slowly; what follows (from the band to a
tridiagonal matrix and its eigenvalues) is a chain of small steps in a cache, which a core of a CPU does well and a GPU
slowly. Only the band crosses over. It knows Gram matrices and bands; it doesn't know cards or layers.

Source: the two-stage reduction of Haidar, Ltaief & Dongarra ("Parallel reduction to condensed forms for symmetric
eigenvalue problems using aggregated fine-grained and memory-aware kernels", SC 2011), here with dense products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpuherd.esd.spectra.lapack import LapackError, loaded_library

if TYPE_CHECKING:
    import torch

Float64 = npt.NDArray[np.float64]

# A wider band makes fewer steps for the GPU and more work for the CPU: for n = 4096 a core takes 0.65, 0.71 and 0.88 s
# for 32, 48 and 64 diagonals.
BAND = 48


@dataclass(frozen=True, slots=True)
class Band:
    """A symmetric band matrix. ``diagonals``: (width + 1, n) in LAPACK's lower band storage, Fortran order."""

    diagonals: Float64

    def eigenvalues(self) -> Float64:
        """All of them, ascending; by one core. The band is left as it is.

        Raises:
            numpy.linalg.LinAlgError: they can't be found.
        """
        library = loaded_library()
        if library is None or self.diagonals.shape[0] < 3:
            from scipy.linalg import eigvals_banded

            return np.asarray(eigvals_banded(self.diagonals, lower=True, check_finite=False), np.float64)
        try:
            return np.asarray(library.sterf(*library.band_to_tridiagonal(self.diagonals)), np.float64)
        except LapackError as problem:
            raise np.linalg.LinAlgError(str(problem)) from None


def to_band(gram: torch.Tensor, width: int = BAND) -> Band:
    """A band matrix with the eigenvalues of ``gram`` (float64, symmetric, both triangles), which is overwritten.

    Each step takes the next ``width`` columns below the band, P = Q R with Q = I - V T Vᵀ, and turns the rest A into
    Qᵀ A Q = A - V Wᵀ - W Vᵀ with W = (A V - ½ V Tᵀ (Vᵀ A V)) T. Backward stable, as every sequence of orthogonal
    similarities. Memory on the device: 4 n ``width`` numbers beside the matrix.
    """
    n = len(gram)
    width = min(width, max(1, n - 1))
    for start in range(0, n - width - 1, width):
        rest = start + width
        reflectors, factor, triangle = _reflect(gram[rest:, start:rest])
        gram[rest:, start:rest] = 0.0
        gram[rest : rest + len(triangle), start:rest] = triangle
        trailing = gram[rest:, rest:]
        product = trailing @ reflectors
        inner = factor.T @ (reflectors.T @ product)
        other = (product - 0.5 * (reflectors @ inner)) @ factor
        trailing.addmm_(_beside(reflectors, other), _beside(other, reflectors).T, alpha=-1.0)
    return Band(_diagonals(gram, width))


def _reflect(panel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Householder vectors V, the triangle T and R, so that panel = (I - V T Vᵀ) R.

    T is the inverse of the upper triangle of Vᵀ V with 1/τ on its diagonal (Puglisi, SIAM J. Sci. Stat. Comput. 13,
    1992). A column that needs no reflection has τ = 0: its vector is made 0.
    """
    import torch

    packed, tau = torch.geqrf(panel)
    count = tau.shape[0]
    vectors = torch.tril(packed, -1)[:, :count]
    vectors.diagonal().fill_(1.0)
    needed = tau != 0
    vectors = vectors * needed
    inverse = torch.triu(vectors.T @ vectors, 1)
    inverse.diagonal().copy_(torch.where(needed, 1.0 / torch.where(needed, tau, 1.0), 1.0))
    identity = torch.eye(count, dtype=panel.dtype, device=panel.device)
    factor = torch.linalg.solve_triangular(inverse, identity, upper=True)
    return vectors, factor, torch.triu(packed[:count])


def _beside(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat((left, right), dim=1)


def _diagonals(matrix: torch.Tensor, width: int) -> Float64:
    """The main diagonal and those below it, on the CPU; what sticks out at the end of a diagonal is 0."""
    import torch

    n = len(matrix)
    found = torch.zeros((n, width + 1), dtype=matrix.dtype, device=matrix.device)
    for below in range(width + 1):
        found[: n - below, below] = matrix.diagonal(-below)
    return np.asfortranarray(found.cpu().numpy().T)
