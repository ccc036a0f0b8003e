"""The page of published results of real models, imported; skipped where they are not at hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from gpuherd.cli.main import run
from gpuherd.errors import ExitCode
from gpuherd.esd.report.contents import Contents
from gpuherd.esd.report.page import make_page
from gpuherd.esd.report.reading import RunResults, read_results
from gpuherd.report.page import vega_bundle

SHARED = Path(os.environ.get("GPUHERD_SHARED_DATA", Path(__file__).parents[3].parent / "shared" / "data"))
pytestmark = pytest.mark.skipif(
    not (SHARED / "esd-stats").is_dir(),
    reason="no published results: set GPUHERD_SHARED_DATA to the folder that has esd-stats/",
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> RunResults:
    folder = tmp_path_factory.mktemp("published")
    assert run(["esd", "import", str(SHARED / "esd-stats"), "--output-dir", str(folder)]) == ExitCode.OK
    return read_results(folder)


def test_medians_are_those_that_were_published(published: RunResults) -> None:
    medians = {model.model_id: float(np.nanmedian(model.alpha)) for model in published.models}
    assert medians["EleutherAI/pythia-70m"] == pytest.approx(3.913, abs=5e-4)
    assert medians["openai-community/gpt2"] == pytest.approx(3.591, abs=5e-4)
    assert medians["HuggingFaceTB/SmolLM2-135M"] == pytest.approx(5.323, abs=5e-4)


def test_two_runs_of_one_model_are_found_to_be_near(published: RunResults) -> None:
    models = {model["id"]: model for model in Contents(published).index()["models"]}
    ids = list(models)
    nearest, distance, layers = models["gpt2"]["nearest"]
    assert (ids[nearest], layers) == ("openai-community/gpt2", 72)
    assert distance < 0.001
    assert ids[models["distilbert/distilgpt2"]["nearest"][0]] in ("gpt2", "openai-community/gpt2")
    assert models["EleutherAI/pythia-70m"]["nearest"] is None  # nobody else has its layers


def test_the_page_is_small_and_says_what_is_not_known(published: RunResults) -> None:
    page = make_page(published)
    assert (page.models, page.with_figures, page.with_spectra) == (8, 8, 0)
    assert len(page.html) - len(vega_bundle().packed) < 200_000
    assert b"8 of 8 models are published results that were imported" in page.html
