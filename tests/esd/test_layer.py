"""One row a matrix: the reference values, every column's definition, and every reason for having none."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from gpuherd.errors import UsageError
from gpuherd.esd import FitSettings, LayerRow, analyse_layer, eigenvalues

Float64 = npt.NDArray[np.float64]

DKS = FitSettings("DKS")
MID = FitSettings("xmin_mid")
PEAK = FitSettings("xmin_peak")
FIGURES = [
    column.name
    for column in dataclasses.fields(LayerRow)
    if column.name not in ("longname", "M", "N", "params", "fit_status") and "option" not in column.metadata
]
FIT_COLUMNS = ["alpha", "alpha_lo", "alpha_hi", "sigma", "D", "xmin", "xmax", "num_pl_spikes"]
FIT_COLUMNS += ["alpha_weighted", "log_alpha_norm"]

SPECTRA: dict[str, npt.NDArray[np.floating]] = {
    "1..10": np.arange(1.0, 11.0),
    "Pareto": (1 - (np.arange(100) + 0.5) / 100) ** -0.5,
    "powers of 2": np.exp2(np.arange(8.0)),
}

# The values that the estimator of the guides' own repository gives for W = diag(sqrt λ). It computes in float32, hence
# the tolerance of 1e-5. Its entropy adds 6e-5 to every p, which ours does not.
REFERENCE: list[tuple[str, FitSettings, dict[str, float]]] = [
    ("1..10", DKS, {"alpha": 4.68155, "D": 0.253238, "norm": 55, "spectral_norm": 10, "stable_rank": 5.5}),
    ("1..10", DKS, {"log_norm": 1.740363, "log_alpha_norm": 5.043095, "matrix_rank": 10}),
    ("1..10", MID, {"alpha": 4.681552, "D": 0.253238}),
    ("1..10", PEAK, {"alpha": 1.662058, "D": 0.31681}),
    ("Pareto", DKS, {"alpha": 3.017093, "D": 0.006733, "log_norm": 2.287693, "stable_rank": 13.714421}),
    ("Pareto", DKS, {"spectral_norm": 14.142137, "norm": 14.142137 * 13.714421}),
    ("Pareto", MID, {"alpha": 3.034516, "D": 0.01348}),
    ("powers of 2", DKS, {"alpha": 1.412199, "D": 0.200627, "stable_rank": 1.992188, "norm": 255}),
    ("powers of 2", MID, {"alpha": 1.961797, "D": 0.236583, "spectral_norm": 128}),
]


def diagonal(evals: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    return np.diag(np.sqrt(evals)).astype(np.float32)


@pytest.mark.parametrize(("spectrum", "fit", "expected"), REFERENCE)
def test_reference_values(spectrum: str, fit: FitSettings, expected: dict[str, float]) -> None:
    row = analyse_layer("w", [diagonal(SPECTRA[spectrum])], fit)
    assert row.fit_status == "ok"
    for column, value in expected.items():
        assert getattr(row, column) == pytest.approx(value, rel=1e-5, abs=1e-6), column  # they are printed to 1e-6


def test_columns_by_their_definitions() -> None:
    rng = np.random.default_rng(5)
    W = rng.standard_normal((30, 80)) * rng.lognormal(0, 1, (30, 1)) * 0.01
    evals = np.linalg.svd(W, compute_uv=False)[::-1] ** 2
    thresh = float(evals[7])  # strictly above: this one is out
    row = analyse_layer("model.w", [W], FitSettings("DKS", evals_thresh=thresh * (1 + 1e-9)))
    alpha = row.alpha
    assert alpha is not None
    assert (row.longname, row.M, row.N, row.params, row.fit_status) == ("model.w", 30, 80, 2400, "ok")
    assert row.num_evals == 22
    assert (row.matrix_rank, row.rank_loss) == (30, 0)
    assert row.weak_rank_loss == (evals < 1e-6).sum()
    assert pytest.approx(80 / 30) == row.Q
    assert (row.sv_max, row.sv_min) == pytest.approx((math.sqrt(evals[-1]), math.sqrt(evals[0])), rel=1e-5)
    assert row.xmin is not None
    assert row.num_pl_spikes is not None
    assert row.num_pl_spikes == (evals >= row.xmin * (1 - 1e-9)).sum()
    assert row.sigma == pytest.approx((alpha - 1) / math.sqrt(row.num_pl_spikes))
    assert row.alpha_lo is not None
    assert row.alpha_hi is not None
    assert row.alpha_lo <= alpha <= row.alpha_hi
    assert row.spectral_norm == pytest.approx(evals[-1])
    assert row.xmax == row.spectral_norm
    assert row.xmin in eigenvalues(W)[8:]
    assert row.norm == pytest.approx((W**2).sum())
    assert row.log_norm == pytest.approx(math.log10((W**2).sum()))
    assert row.log_spectral_norm == pytest.approx(math.log10(evals[-1]))
    assert row.alpha_weighted == pytest.approx(alpha * math.log10(evals[-1]))
    assert row.log_alpha_norm == pytest.approx(math.log10((evals**alpha).sum()))
    assert row.stable_rank == pytest.approx((W**2).sum() / evals[-1])
    p = evals / evals.sum()
    assert row.entropy == pytest.approx(-(p * np.log(p)).sum() / math.log(30))


def test_the_threshold_itself_is_left_out() -> None:
    row = analyse_layer("w", [np.diag([1.0, 2.0, 3.0, 4.0])], FitSettings("xmin_mid", evals_thresh=4.0))
    assert (row.num_evals, row.xmin, row.xmax) == (2, 9.0, 16.0)


@pytest.mark.parametrize("fit", [DKS, MID, PEAK])
def test_rows_and_columns_may_change_places(fit: FitSettings) -> None:
    W = np.random.default_rng(1).standard_normal((40, 90))
    row, turned = analyse_layer("w", [W], fit), analyse_layer("w", [W.T], fit)
    assert (turned.M, turned.N) == (row.N, row.M)
    for column in FIGURES:
        # sv_min is the root of the least eigenvalue: a Gram matrix holds half of its digits.
        tolerance = 1e-6 if column == "sv_min" else 1e-10
        assert getattr(turned, column) == pytest.approx(getattr(row, column), rel=tolerance), column


def test_scaling_by_a_power_of_two() -> None:
    W = np.random.default_rng(2).standard_normal((50, 70))
    keep_all = FitSettings("DKS", evals_thresh=0)
    row, scaled = analyse_layer("w", [W], keep_all), analyse_layer("w", [W * 1024], keep_all)
    for column in ("alpha", "D", "stable_rank", "entropy", "matrix_rank", "num_evals"):
        assert getattr(scaled, column) == pytest.approx(getattr(row, column), rel=1e-12), column
    assert row.norm is not None
    assert scaled.norm == pytest.approx(row.norm * 2.0**20, rel=1e-14)


@pytest.mark.parametrize("rank", [8, 64])
@pytest.mark.parametrize("shape", [(414, 636), (636, 414), (128, 900)])
def test_rank_of_deficient_matrices(rank: int, shape: tuple[int, int]) -> None:
    """A product of two factors, as a LoRA update is, and a matrix padded with zeros. Rounded to float32, the product
    has full rank: what is left of it is then told by num_evals."""
    rng = np.random.default_rng(rank)
    W = rng.standard_normal((shape[0], rank)) @ rng.standard_normal((rank, shape[1]))
    assert analyse_layer("w", [W], DKS).matrix_rank == rank
    rounded = analyse_layer("w", [W.astype(np.float32)], DKS)
    assert (rounded.matrix_rank, rounded.num_evals) == (min(shape), rank)
    padded = np.zeros(shape, dtype=np.float32)
    padded[:rank] = rng.standard_normal((rank, shape[1]))
    row = analyse_layer("w", [padded], DKS)
    assert (row.matrix_rank, row.num_evals) == (rank, rank)


@pytest.mark.parametrize("seed", range(12))
def test_rank_one_below_full(seed: int) -> None:
    """The Gram matrix's smallest eigenvalue is then rounding of either sign, and must not count either way."""
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((40, 39)) @ rng.standard_normal((39, 60))
    assert analyse_layer("w", [W], DKS).matrix_rank == 39


def test_convolution_pools_its_slices_at_half_weight() -> None:
    kernel = np.random.default_rng(3).standard_normal((12, 20, 3, 3))  # out, in, height, width
    slices = [kernel[:, :, i, j] for i in range(3) for j in range(3)]
    row = analyse_layer("conv", slices, DKS, conv=True)
    evals = np.sort(np.concatenate([np.linalg.svd(s, compute_uv=False) ** 2 for s in slices])) / 2
    assert (row.M, row.N, row.params, row.num_evals) == (12, 20, 12 * 20 * 9, 12 * 9)
    assert row.norm == pytest.approx((kernel**2).sum() / 2)
    assert row.spectral_norm == pytest.approx(evals[-1])
    given = analyse_layer("conv", slices, DKS, conv=True, eigenvalues=evals[::-1])
    for column in FIGURES:
        tolerance = 1e-6 if column == "sv_min" else 1e-9
        assert getattr(given, column) == pytest.approx(getattr(row, column), rel=tolerance), column
    one = analyse_layer("conv1x1", slices[:1], DKS, conv=True)
    assert one.norm == pytest.approx((slices[0] ** 2).sum() / 2)


def test_a_float16_matrix_is_the_same_matrix_in_float64() -> None:
    W = np.random.default_rng(4).standard_normal((32, 48)).astype(np.float16)
    assert analyse_layer("w", [W], DKS) == analyse_layer("w", [W.astype(np.float64)], DKS)


def rank_one() -> Float64:
    return np.outer(np.arange(1.0, 6.0), np.arange(1.0, 8.0))


def with_entry(value: float) -> Float64:
    W = np.ones((5, 7))
    W[2, 3] = value
    return W


@pytest.mark.parametrize(
    ("W", "reason"),
    [
        (with_entry(np.nan), "1 of 35 weights are NaN or infinite"),
        (with_entry(-np.inf), "1 of 35 weights are NaN or infinite"),
        (np.full((4, 4), np.nan, dtype=np.float32), "16 of 16 weights are NaN or infinite"),
        (np.zeros((5, 7)), "all weights are zero"),
        (np.ones((1, 9)), "too small: 1x9 gives 1 eigenvalue, a fit needs 2"),
        (np.ones((9, 1)), "too small: 9x1 gives 1 eigenvalue, a fit needs 2"),
        (np.ones((1, 1)), "too small: 1x1 gives 1 eigenvalue, a fit needs 2"),
        (np.ones((0, 4)), "too small: 0x4 gives 0 eigenvalues, a fit needs 2"),
        (np.diag([1e200, 2e200]), "the eigenvalues are too large for float64"),
        (np.diag([1.2e154, 1.3e154]), "the eigenvalues are too large for float64"),  # only their sum is
        (np.diag([1e-200, 2e-200]), "all eigenvalues are zero: the weights are too small for float64"),
    ],
)
@pytest.mark.parametrize("fit", [DKS, MID, PEAK])
def test_a_matrix_that_cannot_be_analysed_is_a_row_with_a_reason(W: Float64, reason: str, fit: FitSettings) -> None:
    row = analyse_layer("w", [W], fit)
    assert row.fit_status == reason
    assert (row.M, row.N, row.params) == (*W.shape, W.size)
    assert {name: getattr(row, name) for name in FIGURES} == dict.fromkeys(FIGURES)


@pytest.mark.parametrize(
    ("W", "num_evals", "reason"),
    [
        (np.eye(6), 6, "all 6 eigenvalues are equal: alpha is infinite"),
        (rank_one(), 1, "too few eigenvalues above 1e-05 (1 of 5)"),
        (np.eye(6) * 1e-3 + np.diag(np.arange(6) * 1e-4), 0, "too few eigenvalues above 1e-05 (0 of 6)"),
    ],
)
@pytest.mark.parametrize("fit", [DKS, MID, PEAK])
def test_a_sound_spectrum_without_a_fit_keeps_its_norms(
    W: Float64, num_evals: int, reason: str, fit: FitSettings
) -> None:
    row = analyse_layer("w", [W], fit)
    assert row.fit_status == reason
    assert row.num_evals == num_evals
    assert row.norm == pytest.approx((W**2).sum())
    for column in FIGURES:
        expect_none = column in FIT_COLUMNS or (column == "entropy" and row.matrix_rank == 1)
        # The product of equal eigenvalues of mean 1 is 1, whatever their number.
        expect_none |= column == "ERG_gap" or (column in ("detX_num", "detX_val") and "are equal" in reason)
        assert (getattr(row, column) is None) == expect_none, column


def test_entropy_is_one_for_equal_eigenvalues_and_none_for_rank_one() -> None:
    assert analyse_layer("w", [np.eye(6)], DKS).entropy == pytest.approx(1.0)
    row = analyse_layer("w", [rank_one()], DKS)
    assert (row.matrix_rank, row.entropy) == (1, None)


def test_huge_alpha_does_not_overflow() -> None:
    """Eigenvalues within a part in a million: alpha is about a million, λ^alpha far beyond float64."""
    evals = 1e3 * (1 + 1e-6 * np.random.default_rng(0).uniform(0, 1, 50))
    row = analyse_layer("w", [np.diag(np.sqrt(evals))], MID)
    assert row.alpha is not None
    assert row.alpha > 1e5
    assert row.log_alpha_norm == pytest.approx(3 * row.alpha, rel=1e-4)


def test_wrong_settings_and_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="fix_fingers='median'"):
        FitSettings("median")  # type: ignore[arg-type]
    for thresh in (-1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="evals_thresh"):
            FitSettings("DKS", evals_thresh=thresh)
    with pytest.raises(UsageError, match="bins"):
        FitSettings("DKS", bins=0)
    with pytest.raises(ValueError, match="one shape"):
        analyse_layer("w", [np.ones((2, 3)), np.ones((3, 2))], DKS)
    with pytest.raises(ValueError, match="one shape"):
        analyse_layer("w", [], DKS)
    with pytest.raises(ValueError, match="negative or NaN"):
        analyse_layer("w", [np.eye(2)], DKS, eigenvalues=np.array([-1.0, 2.0]))


def published_tables() -> list[Path]:
    folder = Path(os.environ.get("GPUHERD_SHARED_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
    return sorted((folder / "esd-stats").glob("*.csv"))


def test_published_tables_keep_the_identities_that_our_columns_keep() -> None:
    """norm, spectral_norm, alpha_weighted and stable_rank mean in the published results what they mean here."""
    tables = published_tables()
    if not tables:
        pytest.skip("no published results: set GPUHERD_SHARED_DATA to the folder that has esd-stats/")
    rows = [row for table in tables for row in csv.DictReader(table.read_text().splitlines())]
    ours = dataclasses.asdict(analyse_layer("w", [np.random.default_rng(0).standard_normal((60, 90))], DKS))
    checked = 0
    for row in [*rows, ours]:
        if float(row["alpha"]) < 0:  # their sentinel for "no fit"
            continue
        checked += 1
        norm, largest, alpha = float(row["norm"]), float(row["spectral_norm"]), float(row["alpha"])
        assert float(row["stable_rank"]) == pytest.approx(norm / largest, rel=1e-6)
        assert float(row["log_norm"]) == pytest.approx(math.log10(norm), abs=1e-6)
        assert float(row["log_spectral_norm"]) == pytest.approx(math.log10(largest), abs=1e-6)
        assert float(row["alpha_weighted"]) == pytest.approx(alpha * math.log10(largest), rel=1e-6, abs=1e-6)
        assert float(row["xmax"]) == pytest.approx(largest, rel=1e-6)
        assert int(row["matrix_rank"]) <= min(int(row["M"]), int(row["N"]))
    assert checked > len(tables)
