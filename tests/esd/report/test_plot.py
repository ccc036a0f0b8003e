"""Plots: what is drawn is what was fitted, and the same results give the same picture."""

from __future__ import annotations

import doctest
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpuherd.errors import UsageError
from gpuherd.esd.report import plot
from gpuherd.esd.report.plot import MOST_LAYERS, alpha_figure, bins_together, matching, spectra_figure
from gpuherd.esd.report.reading import RunResults
from gpuherd.esd.results import stored_spectra
from gpuherd.esd.spectrum_files import Sketch, StoredSpectrum
from gpuherd.report.charts import check_format, picture_bytes


@pytest.fixture
def layers(small_run: RunResults) -> tuple[StoredSpectrum, ...]:
    return stored_spectra(small_run.directory, "org--base").layers


def test_the_law_is_drawn_from_xmin_on_with_its_alpha(layers: tuple[StoredSpectrum, ...]) -> None:
    layer = layers[1]
    assert layer.alpha is not None and layer.xmin is not None
    figure = spectra_figure(layers[1:2], "ccdf", "org/base")
    spectrum, law, mark = figure.axes[0].get_lines()
    x, y = (np.asarray(each, float) for each in law.get_data())
    assert x[0] == pytest.approx(layer.xmin, rel=1e-6)
    slopes = np.diff(np.log(y)) / np.diff(np.log(x))
    np.testing.assert_allclose(slopes, 1 - layer.alpha, rtol=1e-6)
    np.testing.assert_allclose(np.log10(np.asarray(spectrum.get_xdata())), layer.sketch.log10_lambda, atol=1e-5)
    # It begins where the spectrum is: the share of eigenvalues from xmin on.
    kept = 10.0 ** np.interp(np.log10(x[0]), layer.sketch.log10_lambda, layer.sketch.log10_ccdf)
    assert y[0] == pytest.approx(kept, rel=1e-4)
    assert np.asarray(mark.get_xdata())[0] == layer.xmin


def test_the_histogram_is_a_density(layers: tuple[StoredSpectrum, ...]) -> None:
    bars = spectra_figure(layers[:1], "hist", "x").axes[0].patches
    logs = [np.log10((bar.get_x(), bar.get_x() + bar.get_width())) for bar in bars]  # type: ignore[attr-defined]
    areas = [bar.get_height() * np.ptp(ends) for bar, ends in zip(bars, logs, strict=True)]  # type: ignore[attr-defined]
    assert sum(areas) == pytest.approx(1, abs=1e-3)


def test_labels_of_a_short_axis_are_plain_numbers_that_do_not_overlap(layers: tuple[StoredSpectrum, ...]) -> None:
    layer = layers[0]
    logs, shares = np.array([[1.0, 1.3, 2.0], [0.0, -0.2, -1.2]], np.float32)
    short = Sketch(logs, shares, layer.sketch.histogram, 24, 0)
    figure = spectra_figure([replace(layer, sketch=short, xmin=None)], "ccdf", "x")
    figure.canvas.draw()
    axes = figure.axes[0]
    shown = [label.get_text() for label in axes.get_xticklabels() if 10 <= label.get_position()[0] <= 100]
    assert shown == ["10", "20", "50", "100"]
    assert not any(label.get_text() for label in axes.get_xticklabels(minor=True))


def test_few_eigenvalues_have_few_bars(layers: tuple[StoredSpectrum, ...]) -> None:
    assert layers[0].sketch.count == 24
    assert len(spectra_figure(layers[:1], "hist", "x").axes[0].patches) == 16
    axes = spectra_figure(layers[:1], "hist", "x").axes[0]
    assert axes.get_ylim()[0] < min(bar.get_height() for bar in axes.patches if bar.get_height())  # type: ignore[attr-defined]
    assert [bins_together(count) for count in (24, 120, 1000)] == [4, 2, 1]


def test_the_lines_are_explained_and_the_convention_named(layers: tuple[StoredSpectrum, ...]) -> None:
    figure = spectra_figure(layers[:1], "ccdf", "x")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["eigenvalues", "fitted power law", "xmin"]
    assert doctest.testmod(plot).failed == 0


@pytest.mark.parametrize(("kind", "panels"), [("ccdf", 3), ("hist", 3), ("both", 6)])
def test_every_layer_has_its_panel(layers: tuple[StoredSpectrum, ...], kind: str, panels: int) -> None:
    figure = spectra_figure(layers[:3], kind, "x")  # type: ignore[arg-type]
    assert sum(axes.axison for axes in figure.axes) == panels
    titles = [axes.get_title() for axes in figure.axes if axes.axison]
    assert titles[0] == layers[0].longname


@pytest.mark.parametrize("file_format", ["png", "svg", "pdf"])
def test_the_same_results_give_the_same_bytes(layers: tuple[StoredSpectrum, ...], file_format: str) -> None:
    first, second = (picture_bytes(spectra_figure(layers[:1], "both", "$x_1$"), file_format) for _ in range(2))
    assert first == second
    assert first.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[file_format])


def test_a_name_is_no_formula() -> None:
    figure = alpha_figure([("$\\frac{.0.a", 2.0), ("b$.0.c", None), ("\x07\u202e.0.d", 3.0)], "t")
    assert len(picture_bytes(figure, "png")) > 1000


def test_alphas_by_layer_and_module_with_what_is_missing() -> None:
    figure = alpha_figure([("h.0.q", 2.0), ("h.0.k", 99.0), ("h.1.q", None), ("head", 4.0)], "t")
    shown = figure.axes[0].images[0].get_array()
    assert shown is not None
    assert np.ma.getmaskarray(shown).tolist() == [[False, True, True], [False, True, True], [True, True, False]]
    assert shown[0, 0] == pytest.approx(0.25)
    assert shown[1, 0] == 1.0
    assert shown[2, 2] == pytest.approx(0.5)
    # Hatched is the one matrix without a fit: layer 1, module q; layer 1 has no k, which is no failure.
    assert [patch.get_xy() for patch in figure.axes[0].patches] == [(0.5, -0.5)]  # type: ignore[attr-defined]
    assert figure.axes[0].get_ylabel() == "module"


def test_a_pattern_or_a_part_of_a_name(layers: tuple[StoredSpectrum, ...]) -> None:
    assert len(matching(layers, "*.q_proj")) == 2
    assert [layer.longname for layer in matching(layers, "1.mlp")] == ["model.layers.1.mlp.up_proj"]
    with pytest.raises(UsageError, match=r"no layer matches 'q_prj'; for example: .*q_proj"):
        matching(layers, "q_prj")


def test_too_many_layers_or_none_are_refused(layers: tuple[StoredSpectrum, ...]) -> None:
    for number in (0, MOST_LAYERS + 1):
        with pytest.raises(UsageError, match=f"1 to {MOST_LAYERS} fit"):
            spectra_figure(list(layers[:1]) * number, "ccdf", "x")


@pytest.mark.parametrize("name", ["x", "x.jpg", "x.png.exe", str(Path("a.png") / "b")])
def test_a_format_that_is_not_written_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"\.png, \.svg, \.pdf"):
        check_format(Path(name).name)
