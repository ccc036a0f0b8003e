"""The figures of a matrix that compare its spectrum with noise, and those of its windows: columns by name.

It knows which option asks for which fit, and that a fit's fields are columns. The fits themselves are in ``fits``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuherd.esd.fits.detx import detx_tail
from gpuherd.esd.fits.farms import fit_farms
from gpuherd.esd.fits.marchenko_pastur import fit_marchenko_pastur
from gpuherd.esd.fits.randomised import compare_with_random_order
from gpuherd.esd.row import Cell, LayerRow
from gpuherd.esd.settings import FitSettings

Matrix = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]


def bulk_columns(
    row: LayerRow,
    evals: Float64,
    settings: FitSettings,
    *,
    slices: Sequence[Matrix] | None = None,
    conv: bool = False,
    device: str = "cpu",
) -> dict[str, Cell]:
    """The columns of det X, and of ``mp_fit``, ``randomize`` and ``farms`` where they are on.

    Args:
        row: of this matrix, its power law filled in.
        evals: all λ, ascending; the spectrum is sound.
        settings: which figures, and how the tail starts.
        slices: the weights. May be None where ``settings.needs_weights`` is false.
        conv: they are the slices of a convolution.
        device: where the eigenvalues of the same weights in random order are computed.

    Raises:
        ValueError: the weights are needed and not there.
    """
    tail = detx_tail(evals)
    columns: dict[str, Cell] = asdict(tail)
    if tail.detX_num is not None and row.num_pl_spikes is not None:
        columns["ERG_gap"] = tail.detX_num - row.num_pl_spikes
    if settings.mp_fit:
        columns |= asdict(fit_marchenko_pastur(evals, row.M, row.N))
    if not settings.needs_weights:
        return columns
    if slices is None:
        raise ValueError(f"{row.longname}: randomize and farms need the weights")
    if settings.randomize:
        columns |= asdict(compare_with_random_order(row.longname, slices, evals, settings, conv=conv, device=device))
    if settings.farms:
        columns |= asdict(fit_farms(slices, settings, conv=conv))
    return columns
