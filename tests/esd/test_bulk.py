"""The columns of det X, Marchenko-Pastur, random order and FARMS: there when asked for, by every way to a row."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpuherd.esd import FitSettings, LayerRow, analyse_layer, eigenvalues
from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.fits.farms import fit_farms
from gpuherd.esd.fits.marchenko_pastur import detx_tail, fit_marchenko_pastur
from gpuherd.esd.fits.randomised import compare_with_random_order
from gpuherd.esd.pipeline import analyse_matrices, with_figures
from gpuherd.esd.schema import NOT_METRICS
from gpuherd.esd.spectra.pooled import layer_spectrum
from gpuherd.esd.views import read_table
from gpuherd.models.names import safe_filename
from gpuherd.models.tensors.matrices import WeightMatrix

ALL = FitSettings("xmin_mid", mp_fit=True, randomize=True, farms=True)
OPTIONS = ("mp_fit", "randomize", "farms")


def columns_of(option: str) -> set[str]:
    return {column.name for column in dataclasses.fields(LayerRow) if column.metadata.get("option") == option}


def weights(seed: int = 0, shape: tuple[int, int] = (150, 220)) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_t(3, shape).astype(np.float32)


def test_the_figures_of_a_row_are_those_of_the_fits() -> None:
    W = weights()
    evals = eigenvalues(W)
    row = asdict(analyse_layer("w", [W], ALL))
    expected: dict[str, Any] = {
        **asdict(detx_tail(evals, row["num_pl_spikes"])),
        **asdict(fit_marchenko_pastur(evals, 150, 220)),
        **asdict(compare_with_random_order("w", [W], evals, ALL)),
        **asdict(fit_farms([W], ALL)),
    }
    assert {name: row[name] for name in expected} == expected
    assert None not in expected.values()
    assert row["ERG_gap"] == row["detX_num"] - row["num_pl_spikes"]
    assert set(expected) == {"detX_num", "detX_val", "ERG_gap"}.union(*map(columns_of, OPTIONS))


@pytest.mark.parametrize("option", OPTIONS)
def test_columns_are_there_where_the_option_is_on(option: str) -> None:
    options = AnalysisOptions(mp_fit=option == "mp_fit", randomize=option == "randomize", farms=option == "farms")
    row = analyse_layer("w", [weights()], options)
    cells = row.cells(options.convention_columns)
    for other in OPTIONS:
        assert columns_of(other)
        assert (columns_of(other) <= cells.keys()) == (other == option)
        assert all((getattr(row, name) is not None) == (other == option) for name in columns_of(other))
    assert {"detX_num", "detX_val", "ERG_gap"} <= cells.keys()


def test_reasons_are_no_figures() -> None:
    assert {"mp_status", "rand_status", "farms_status"} <= NOT_METRICS


def test_other_columns_do_not_depend_on_these() -> None:
    plain, full = (asdict(analyse_layer("w", [weights()], settings)) for settings in (FitSettings("xmin_mid"), ALL))
    for name in full.keys() - set().union(*map(columns_of, OPTIONS)):
        assert full[name] == plain[name], name


def test_the_slices_of_a_convolution() -> None:
    slices = list(np.random.default_rng(1).standard_t(3, (9, 48, 32)).astype(np.float32))
    row = analyse_layer("conv", slices, ALL, conv=True)
    evals = layer_spectrum(slices, conv=True).evals
    assert row.sigma_mp == fit_marchenko_pastur(evals, 48, 32).sigma_mp
    assert row.max_rand_eval == compare_with_random_order("conv", slices, evals, ALL, conv=True).max_rand_eval
    assert (row.farms_num_evals, row.farms_status) == (9 * 16, "ok")


def test_a_matrix_without_a_power_law_has_the_other_figures() -> None:
    row = analyse_layer("w", [weights() * np.float32(1e-6)], ALL)
    assert row.fit_status.startswith("too few eigenvalues")
    assert (row.mp_status, row.rand_status) == ("ok", "ok")
    assert row.detX_num is not None
    assert row.ERG_gap is None
    assert row.farms_status is not None
    assert row.farms_status.startswith("too few eigenvalues")


def test_a_matrix_that_cannot_be_analysed_has_one_reason() -> None:
    row = analyse_layer("w", [np.full((150, 220), np.nan)], ALL)
    assert "NaN" in row.fit_status
    assert all(getattr(row, name) is None for option in OPTIONS for name in columns_of(option))


def test_known_eigenvalues_do_not_replace_the_weights() -> None:
    W = weights()
    assert analyse_layer("w", [W], ALL, eigenvalues=eigenvalues(W)) == analyse_layer("w", [W], ALL)
    with pytest.raises(ValueError, match="need the weights"):
        with_figures(LayerRow(longname="w", M=150, N=220, params=1), layer_spectrum([W]), ALL)


def as_matrix(name: str, slices: list[npt.NDArray[np.float32]], kind: Any = "linear") -> WeightMatrix:
    rows, columns = slices[0].shape
    return WeightMatrix(name, kind, (rows, columns), rows * columns * len(slices), None, lambda: list(slices))


@pytest.mark.parametrize("devices", [("cpu",), ("cpu:0",), ("cpu:0", "cpu:0")])
def test_rows_of_a_model_are_those_of_its_matrices(devices: tuple[str, ...]) -> None:
    kernel = [weights(seed, (40, 24)) for seed in range(3)]
    matrices = [as_matrix(f"m{seed}", [weights(seed)]) for seed in range(4)] + [as_matrix("c", kernel, "conv")]
    rows = analyse_matrices(matrices, ALL, devices, parallel=True, on_progress=lambda _: None)
    for row, matrix in zip(rows, matrices, strict=True):
        alone = analyse_layer(matrix.longname, matrix.slices(), ALL, conv=matrix.kind == "conv")
        assert (row.rand_num_spikes, row.num_spikes) == (alone.rand_num_spikes, alone.num_spikes)
        for name in ("sigma_mp", "max_rand_eval", "rand_distance", "rand_sigma_mp", "farms_alpha", "farms_D"):
            assert getattr(row, name) == pytest.approx(getattr(alone, name), rel=1e-9), name


def test_the_worker_writes_them_and_the_same_again(tmp_path: Path, make_model: Callable[..., Path]) -> None:
    model = make_model("a", width=48)
    flags = ("--mp-fit", "--randomize", "--farms", "--seed", "3")
    tables = []
    for folder in ("one", "two", "other seed"):
        words = flags if folder != "other seed" else (*flags[:-1], "4")
        command = [sys.executable, "-m", "gpuherd.esd.worker", "--model-id", str(model)]
        command += ["--output-dir", str(tmp_path / folder)]
        subprocess.run([*command, "--device-map", "cpu", *words], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        tables.append(tmp_path / folder / "stats" / f"{safe_filename(str(model))}.csv")
    assert tables[0].read_bytes() == tables[1].read_bytes()
    first, other = (read_table(table) for table in (tables[0], tables[2]))
    for row, changed in zip(first, other, strict=True):
        if row["fit_status"] != "ok":
            continue
        assert (row["mp_status"], row["rand_status"], row["farms_status"]) == ("ok", "ok", "ok")
        assert row["sigma_mp"] == changed["sigma_mp"]
        assert row["max_rand_eval"] != changed["max_rand_eval"]
        assert 0 < float(row["rand_distance"]) < 1
