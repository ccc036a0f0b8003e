"""Our figures against WeightWatcher 0.7.7 with powerlaw 1.5, on 78 matrices, random and trained.

WeightWatcher lives in a folder of its own (``make peers``), no dependency; without it the tests are skipped. Where
it defines a figure otherwise than we do, the test says how, and compares with that.
"""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from benchmarks._peers import FOLDER
from tests.esd.peers.matrices import Float32, all_of_them

from gpuherd.esd import FitSettings, LayerRow, analyse_layer, eigenvalues

pytestmark = pytest.mark.slow
PEER = FOLDER / "weightwatcher"
RUNNER = Path(__file__).parent / "peers" / "weightwatcher_run.py"

# The tolerances of the specification: relative, of float64 figures.
CLOSE = 1e-8
SAME_MEANING = (
    *("norm", "log_norm", "spectral_norm", "log_spectral_norm", "stable_rank", "matrix_rank", "rank_loss"),
    *("weak_rank_loss", "alpha", "D", "xmin", "xmax", "sigma", "alpha_weighted", "log_alpha_norm", "num_pl_spikes"),
    *("Q", "sv_max"),
)


@dataclass(frozen=True)
class Compared:
    """The matrices and what WeightWatcher says of each."""

    matrices: dict[str, Float32]
    theirs: dict[str, dict[str, str]]


def weightwatcher(folder: Path, matrices: dict[str, Float32], *words: str) -> dict[str, dict[str, str]]:
    """WeightWatcher's rows by name."""
    if not PEER.is_dir():
        pytest.skip(f"WeightWatcher is not in {PEER}: make peers")
    np.savez(folder / "matrices.npz", **matrices)  # type: ignore[arg-type]
    subprocess.run(
        [sys.executable, str(RUNNER), str(folder / "matrices.npz"), str(folder / "table.csv"), *words],
        env={**os.environ, "PYTHONPATH": str(PEER), "MPLBACKEND": "agg"},
        check=True,
        capture_output=True,
        timeout=600,
    )
    with (folder / "table.csv").open(newline="") as file:
        return {row["matrix"]: row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    matrices = all_of_them()
    theirs = weightwatcher(tmp_path_factory.mktemp("ww"), matrices)
    assert len(matrices) >= 60
    assert theirs.keys() == matrices.keys()
    return Compared(matrices, theirs)


@pytest.fixture(scope="module")
def ours(compared: Compared) -> dict[str, LayerRow]:
    settings = FitSettings("DKS")
    return {name: analyse_layer(name, [W], settings) for name, W in compared.matrices.items()}


@pytest.mark.parametrize("column", SAME_MEANING)
def test_a_figure_is_weightwatchers(compared: Compared, ours: dict[str, LayerRow], column: str) -> None:
    for name, row in ours.items():
        mine, theirs = getattr(row, column), float(compared.theirs[name][column])
        assert mine == pytest.approx(theirs, rel=CLOSE, abs=1e-12), name


def test_the_least_singular_value(compared: Compared, ours: dict[str, LayerRow]) -> None:
    """The Gram matrix halves its digits."""
    for name, row in ours.items():
        largest = float(compared.theirs[name]["sv_max"])
        assert row.sv_min == pytest.approx(float(compared.theirs[name]["sv_min"]), rel=1e-4, abs=1e-8 * largest), name


def test_their_entropy_has_a_constant_added(compared: Compared, ours: dict[str, LayerRow]) -> None:
    """-sum p ln p / ln(rank + e) with p = λ / norm + e, e = 1e-10; ours has no e."""
    e = 1e-10
    for name, row in ours.items():
        theirs = float(compared.theirs[name]["entropy"])
        evals = eigenvalues(compared.matrices[name])
        p = evals / evals.sum() + e
        assert row.matrix_rank is not None
        assert float(-(p * np.log(p)).sum()) / math.log(row.matrix_rank + e) == pytest.approx(theirs, rel=CLOSE), name
        assert row.entropy == pytest.approx(theirs, rel=1e-6), name


def test_they_count_all_eigenvalues_we_those_above_the_threshold(compared: Compared, ours: dict[str, LayerRow]) -> None:
    for name, row in ours.items():
        evals = eigenvalues(compared.matrices[name])
        assert len(evals) == float(compared.theirs[name]["num_evals"])
        assert row.num_evals == int((evals > 1e-5).sum())


def exhaustive(x: npt.NDArray[np.float64], candidates: Iterable[int]) -> tuple[int, float]:
    """The index and the alpha of the first smallest one-sided distance, by trying every candidate."""
    best = (math.inf, -1, math.nan)
    for i in candidates:
        tail = x[i:]
        logs = np.log(tail / tail[0]).sum()
        if logs <= 0:
            continue
        alpha = 1 + len(tail) / logs
        distance = float(np.abs(1 - (tail / tail[0]) ** (1 - alpha) - np.arange(len(tail)) / len(tail)).max())
        if distance < best[0]:
            best = (distance, i, alpha)
    return best[1], best[2]


def test_a_float64_svd_with_an_exhaustive_search_finds_the_same(compared: Compared, ours: dict[str, LayerRow]) -> None:
    for name, W in compared.matrices.items():
        x = np.sort(np.linalg.svd(W.astype(np.float64), compute_uv=False) ** 2)
        x = x[x > 1e-5]
        index, alpha = exhaustive(x, range(len(x) - 1))
        assert ours[name].alpha == pytest.approx(alpha, rel=1e-9), name
        assert ours[name].xmin == pytest.approx(x[index], rel=1e-9), name


def test_the_wide_peak_window_is_weightwatchers(compared: Compared, tmp_path: Path) -> None:
    """The window of the older codes; but WeightWatcher goes through the powerlaw package, which does not try the last
    xmin of its range."""
    some = dict(list(compared.matrices.items())[::6])
    theirs = weightwatcher(tmp_path, some, "--fix-fingers", "xmin_peak")
    for name, W in some.items():
        assert theirs[name]["status"] == "success"
        x = eigenvalues(W)
        x = x[x > 1e-5]
        counts, edges = np.histogram(np.log10(x), bins=100)
        peak = 10 ** edges[counts.argmax()]
        window = np.flatnonzero((np.log10(0.95 * peak) <= x) & (x <= 1.5 * peak) & (np.arange(len(x)) < len(x) - 1))
        row = analyse_layer(name, [W], FitSettings("xmin_peak_wide"))
        assert row.alpha == pytest.approx(exhaustive(x, window)[1], rel=1e-9), name
        assert exhaustive(x, window[:-1])[1] == pytest.approx(float(theirs[name]["alpha"]), rel=CLOSE), name
