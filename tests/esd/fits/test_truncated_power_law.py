"""The truncated power law against the powerlaw package's own search, its integral against mpmath, and its refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mpmath
import numpy as np
import powerlaw
import pytest
from tests.esd.fits.plain import Float64

from gpuherd.esd import FitSettings, analyse_layer
from gpuherd.esd.fits.power_law import peak_window
from gpuherd.esd.fits.truncated_power_law import (
    TruncatedPowerLaw,
    exponential_integral,
    fit,
    version_problem,
)


def truncated(n: int, seed: int, rate: float) -> Float64:
    """Values of x^-2.5 e^(-rate x) from 1 up, by rejection."""
    rng = np.random.default_rng(seed)
    kept: list[float] = []
    while len(kept) < n:
        x = rng.pareto(1.5) + 1
        if rng.random() < np.exp(-rate * (x - 1)):
            kept.append(x)
    return np.sort(kept)


def by_the_package(x: Float64, xmin: float | tuple[float, float] | None) -> tuple[float, float, float, float]:
    with np.errstate(all="ignore"):
        fit = powerlaw.Fit(x, xmin=xmin, verbose=False, xmin_distribution="truncated_power_law")
        law = fit.truncated_power_law
    return law.alpha, law.Lambda, fit.xmin, law.D


def figures(fit: TruncatedPowerLaw) -> tuple[float | None, ...]:
    assert fit.tpl_status == "ok"
    return (fit.tpl_alpha, fit.tpl_lambda, fit.tpl_xmin, fit.tpl_D)


@pytest.mark.parametrize(("seed", "rate"), [(0, 0.3), pytest.param(1, 0.02, marks=pytest.mark.slow)])
def test_over_all_xmin_it_is_the_packages_search(seed: int, rate: float) -> None:
    x = truncated(30, seed, rate)
    expected = by_the_package(x, None)
    assert figures(fit(x, FitSettings("DKS"))) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_in_the_wide_window_it_is_what_weightwatcher_calls_e_tpl() -> None:
    """The package leaves out the last xmin of a window; one beyond it makes that no difference."""
    x = truncated(40, 3, 0.05)
    low, high = peak_window(x, 100, "xmin_peak_wide")
    beyond = float(x[np.searchsorted(x, high, side="right")])
    expected = by_the_package(x, (low, beyond))
    assert figures(fit(x, FitSettings("xmin_peak_wide"))) == pytest.approx(expected, rel=1e-6)


def test_from_the_median_it_is_the_packages_fit_from_there() -> None:
    x = np.concatenate([truncated(60, 4, 0.1), [9.0, 9.0, 9.0]])
    x.sort()
    expected = by_the_package(x, float(x[len(x) // 2]))
    assert figures(fit(x, FitSettings("xmin_mid"))) == pytest.approx(expected, rel=1e-6)


def test_the_parameters_of_a_known_law_are_found() -> None:
    found = fit(truncated(4000, 5, 0.1), FitSettings("xmin_mid", xmin_pos=1e9))
    assert figures(found)[:2] == pytest.approx((2.5, 0.1), abs=0.15)


@pytest.mark.parametrize("p", [0.3, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.7, 10.0, 33.3, 150.2])
def test_the_integral(p: float) -> None:
    z = np.array([1e-12, 1e-6, 1e-3, 0.1, 0.5, 0.99, 1.0, 1.01, 1.5, 3.0, 10.0, 50.0, 300.0, 700.0])
    expected = [float(mpmath.expint(p, value)) for value in z]
    assert exponential_integral(p, z) == pytest.approx(expected, rel=1e-13)
    assert exponential_integral(p, 0.5).shape == ()


def test_a_row_has_the_columns_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    W = np.random.default_rng(0).standard_normal((40, 70))
    row = analyse_layer("w", [W], FitSettings("xmin_mid", tpl=True)).cells()
    assert row["tpl_status"] == "ok"
    assert row["tpl_xmin"] == row["xmin"]
    assert row["tpl_D"] is not None
    assert None not in (row["tpl_alpha"], row["tpl_lambda"])
    assert analyse_layer("w", [W], FitSettings("xmin_mid")).cells()["tpl_status"] is None
    equal = analyse_layer("w", [np.eye(5)], FitSettings("DKS", tpl=True)).cells()
    assert equal["tpl_status"] == "all 5 eigenvalues are equal: alpha is infinite"
    assert equal["tpl_alpha"] is None
    assert capfd.readouterr() == ("", "")


def test_no_law_within_its_range_is_a_reason(capfd: pytest.CaptureFixture[str]) -> None:
    """600 decades: the package's start has a lambda whose powers are beyond float64."""
    found = fit(10.0 ** np.linspace(-300, 300, 30), FitSettings("xmin_mid", xmin_pos=1e9))
    status = "no xmin has a truncated power law with alpha above 1 and lambda above 0"
    assert found == TruncatedPowerLaw(None, None, None, None, status)
    assert capfd.readouterr() == ("", "")


def test_versions() -> None:
    assert version_problem("1.5") is None
    assert version_problem("1.5.1") is None
    absent, second = version_problem(None), version_problem("2.0.0")
    assert absent is not None
    assert second is not None
    assert "pip install 'gpuherd[tpl]'" in absent
    assert "powerlaw 2.0.0 is installed" in second


def with_version_2(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python where powerlaw 2.0.0 stands before the version that is really installed."""
    installed = folder / "powerlaw-2.0.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: powerlaw\nVersion: 2.0.0\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)


def test_an_installed_version_2_is_refused_by_name(tmp_path: Path) -> None:
    code = (
        "import numpy as np\n"
        "from gpuherd.errors import MissingExtra\n"
        "from gpuherd.esd import FitSettings, analyse_layer\n"
        "try:\n"
        "    analyse_layer('w', [np.diag([1.0, 2.0, 3.0])], FitSettings(tpl=True))\n"
        "except MissingExtra as problem:\n"
        "    print(problem)\n"
    )
    done = with_version_2(tmp_path, "-c", code)
    assert "powerlaw 2.0.0 is installed" in done.stdout


def test_an_experiment_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    words = ["esd", "--single-model", "any/model", "--tpl", "--output-dir", str(tmp_path / "out")]
    done = with_version_2(tmp_path, "-m", "gpuherd", *words)
    assert done.returncode == 2
    assert "powerlaw 2.0.0 is installed" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_integral_of_a_huge_order_takes_no_time() -> None:
    """E_p(z) is close to e^-z / (p + z) for large p; a step for each whole number would take years."""
    z = np.array([1e-9, 0.01, 0.5])
    np.testing.assert_allclose(exponential_integral(1e15, z), np.exp(-z) / 1e15, rtol=1e-12)
    np.testing.assert_allclose(exponential_integral(1000.0, z), exponential_integral(999.9999999, z), rtol=1e-9)
