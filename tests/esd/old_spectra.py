"""Spectra as earlier versions stored them: the arrays of ``spectra/<model>.npz``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.spectrum_files import Sketch


def old_arrays(model_id: str, sketches: Mapping[str, Sketch], alpha: float = 2.5) -> dict[str, Any]:
    """The arrays of a model, by the names of its matrices."""
    each = list(sketches.values())
    about = {"model_id": model_id, "convention": AnalysisOptions().convention_columns}
    figures = np.full(len(each), alpha)
    return {
        "about": np.array(json.dumps(about)),
        "longname": np.array(list(sketches), dtype=np.str_),
        "offsets": np.cumsum([0, *(len(sketch.log10_lambda) for sketch in each)]),
        "log10_lambda": np.concatenate([sketch.log10_lambda for sketch in each]),
        "log10_ccdf": np.concatenate([sketch.log10_ccdf for sketch in each]),
        "histogram": np.array([sketch.histogram for sketch in each], np.uint32),
        "count": np.array([sketch.count for sketch in each]),
        "below": np.array([sketch.below for sketch in each]),
        "alpha": figures,
        "xmin": figures,
        "D": figures,
    }
