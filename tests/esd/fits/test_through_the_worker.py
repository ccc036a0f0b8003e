"""Each option of the fits through the worker: its columns are in the file, filled in, and say what the option says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gpuherd.esd import FitSettings, fit_power_law
from gpuherd.esd.fits.power_law import fit_by_settings
from gpuherd.esd.views import read_table
from gpuherd.models.names import safe_filename

MakeModel = Callable[..., Path]


@pytest.fixture(autouse=True)
def _no_gpu(standin: Callable[..., object]) -> None:
    standin("1x40GB")


def rows_of(folder: Path, model: Path, *words: str) -> list[dict[str, str]]:
    """The fitted rows of a worker with these options."""
    told = ["--model-id", str(model), "--output-dir", str(folder), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gpuherd.esd.worker", *told]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    rows = read_table(folder / "stats" / f"{safe_filename(str(model))}.csv")
    fitted = [row for row in rows if row["fit_status"] == "ok"]
    assert fitted
    return fitted


def spectrum(model: Path, row: dict[str, str]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    W = load_file(model / "model.safetensors")[row["longname"] + ".weight"].astype(np.float64)
    x = np.linalg.svd(W, compute_uv=False)[::-1] ** 2
    return x[x > 1e-5]


def test_the_options_change_the_figures_as_they_say(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a", width=40)
    words = "--fix-fingers xmin_peak_wide --ks two-sided --bins 11 --delta 0.02"
    settings = FitSettings("xmin_peak_wide", ks="two-sided", bins=11, delta=0.02)
    for row in rows_of(tmp_path, model, *words.split()):
        fit = fit_by_settings(spectrum(model, row), settings)
        found = [float(row[name]) for name in ("alpha", "D", "alpha_lo", "alpha_hi", "sigma")]
        assert found == pytest.approx([fit.alpha, fit.D, fit.alpha_lo, fit.alpha_hi, fit.sigma], rel=1e-8)
        assert row["ks"] == "two-sided"
        assert not {"p_value", "num_fingers", "raw_alpha", "tpl_alpha"} & row.keys()


def test_the_columns_of_options_that_are_on(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a", width=40)
    words = ("--xmin-pos", "3", "--clip-xmax", "--bootstrap", "20", "--tpl", "--seed", "5")
    first, again = (rows_of(tmp_path / folder, model, *words) for folder in ("one", "two"))
    assert first == again
    for row in first:
        fit = fit_power_law(spectrum(model, row), "xmin_mid", xmin_pos=3)
        assert float(row["raw_alpha"]) == pytest.approx(fit.alpha, rel=1e-8)
        assert int(row["num_fingers"]) >= 0
        assert 0 <= float(row["p_value"]) <= 1
        assert row["tpl_status"] == "ok"
        assert float(row["tpl_lambda"]) > 0
        assert row["seed"] == "5"
