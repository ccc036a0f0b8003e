"""Run folders as workers leave them, of small models, by the real analysis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.model_files import ModelResultFiles
from gpuherd.esd.pipeline import analyse_layer
from gpuherd.esd.schema import LayerRow
from gpuherd.esd.spectra.pooled import layer_spectrum
from gpuherd.esd.views import Origin

Weights = Mapping[str, "np.ndarray[Any, np.dtype[np.float32]]"]
AddModel = Callable[..., None]


def heavy(seed: int, layers: int = 2, width: int = 24, change: float = 0.0) -> dict[str, Any]:
    """Weights of a small model; ``change`` moves each by so many standard deviations, as a fine-tune would."""
    rng, noise = np.random.default_rng(seed), np.random.default_rng(seed + 1000)
    weights = {}
    for layer in range(layers):
        for part, shape in (("self_attn.q_proj", (width, width)), ("mlp.up_proj", (2 * width, width))):
            W = rng.standard_t(3, shape)
            weights[f"model.layers.{layer}.{part}"] = (W + change * noise.standard_normal(shape)).astype(np.float32)
    return weights


def put_model(
    folder: Path,
    model_id: str,
    weights: Weights,
    *,
    source: str | None = None,
    relation: str = "base",
    skipped: Sequence[str] = (),
    options: AnalysisOptions | None = None,
    version: str = "0.3.0",
) -> None:
    """Puts a model's result files into a run folder."""
    options = options or AnalysisOptions(fix_fingers="DKS")
    names = [*weights, *skipped]
    with ModelResultFiles(ESDDirectory(folder), model_id, names, evals_thresh=1e-5, save_eigs=False) as files:
        rows, analysed = [], {}
        for index, (name, W) in enumerate(weights.items()):
            if id(W) not in analysed:  # one matrix under many names is analysed once
                analysed[id(W)] = layer_spectrum([W]), analyse_layer(name, [W], options)
            spectrum, row = analysed[id(W)]
            files.keep_spectrum(index, spectrum)
            rows.append(replace(row, longname=name))
        for name in skipped:
            rows.append(LayerRow(longname=name, M=9, N=9, params=81, fit_status="not analysed: embedding"))
        files.write(Origin(model_id, source, relation, options.convention_columns, version), rows, "tensor\n")
    files.paths.coverage.unlink()  # no checkpoint, no coverage: as with published results


def put_small_run(folder: Path) -> None:
    """A base, its fine-tune, a stranger, a model with a layer of NaN, two failures, and half a line of a third."""
    spoilt = heavy(3)
    spoilt["model.layers.1.mlp.up_proj"][0, 0] = np.nan
    put_model(folder, "org/base", heavy(1), skipped=["model.embed_tokens"])
    put_model(folder, "org/tuned", heavy(1, change=0.01), source="org/base", relation="finetune")
    put_model(folder, "org/other", heavy(2))
    put_model(folder, "org/spoilt", spoilt)
    (folder / "failures.jsonl").write_text(
        '{"job": "a.1", "title": "org/broken", "class": "bad input", "reason": "no config.json"}\n'
        '{"job": null, "title": "org/odd", "class": "refused", "reason": "unknown relation \'cousin\'"}\n'
        '{"job": "b.1", "title": "org/ba'
    )
