"""Run folders as workers leave them, of small models, by the real analysis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.esd.look.weights import AddModel, Weights, heavy

from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.layer import analyse_layer
from gpuherd.esd.look.results import RunResults, read_results
from gpuherd.esd.row import LayerRow
from gpuherd.esd.spectra.pooled import layer_spectrum
from gpuherd.esd.tables.model_files import ModelFiles
from gpuherd.esd.tables.stats import Origin


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """An empty run folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def add_model(run_folder: Path) -> AddModel:
    """``add_model("org/a", heavy(1), source=..., relation=...)`` puts a model's result files into the run folder."""

    def add(
        model_id: str,
        weights: Weights,
        *,
        source: str | None = None,
        relation: str = "base",
        skipped: Sequence[str] = (),
        options: AnalysisOptions | None = None,
    ) -> None:
        options = options or AnalysisOptions(fix_fingers="DKS")
        names = [*weights, *skipped]
        with ModelFiles(ESDDirectory(run_folder), model_id, names, evals_thresh=1e-5, save_eigs=False) as files:
            rows = []
            for index, (name, W) in enumerate(weights.items()):
                files.keep_spectrum(index, layer_spectrum([W]))
                rows.append(analyse_layer(name, [W], options))
            for name in skipped:
                rows.append(LayerRow(longname=name, M=9, N=9, params=81, fit_status="not analysed: embedding"))
            files.write(Origin(model_id, source, relation, options.convention_columns, "0.3.0"), rows)

    return add


@pytest.fixture
def small_run(run_folder: Path, add_model: AddModel) -> RunResults:
    """A base, its fine-tune, a stranger, a model with a layer of NaN, and two failures."""
    spoilt = heavy(3)
    spoilt["model.layers.1.mlp.up_proj"][0, 0] = np.nan
    add_model("org/base", heavy(1), skipped=["model.embed_tokens"])
    add_model("org/tuned", heavy(1, change=0.01), source="org/base", relation="finetune")
    add_model("org/other", heavy(2))
    add_model("org/spoilt", spoilt)
    (run_folder / "failures.jsonl").write_text(
        '{"job": "a.1", "title": "org/broken", "class": "bad input", "reason": "no config.json"}\n'
        '{"job": null, "title": "org/odd", "class": "refused", "reason": "unknown relation \'cousin\'"}\n'
        '{"job": "b.1", "title": "org/ba'
    )
    return read_results(run_folder)
