"""Spectra of weight matrices and heavy-tail fits.

The public names are loaded when they are first used (PEP 562), so that ``gpuherd --help`` does not pay for numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuherd.exports import on_first_use

if TYPE_CHECKING:
    from gpuherd.esd.api import analyze_matrix, analyze_model, net_esd_estimator
    from gpuherd.esd.config import ExperimentConfig, FitSettings
    from gpuherd.esd.experiment import ESDExperiment
    from gpuherd.esd.fits.power_law import PowerLawFit, fit_power_law
    from gpuherd.esd.pipeline import analyse_layer
    from gpuherd.esd.schema import LayerRow
    from gpuherd.esd.spectra.eigenvalues import eigenvalues

# Public name -> the module of this room that defines it.
_HOME = {
    "ESDExperiment": "experiment",
    "ExperimentConfig": "config",
    "FitSettings": "config",
    "LayerRow": "schema",
    "PowerLawFit": "fits.power_law",
    "analyse_layer": "pipeline",
    "analyze_matrix": "api",
    "analyze_model": "api",
    "eigenvalues": "spectra.eigenvalues",
    "fit_power_law": "fits.power_law",
    "net_esd_estimator": "api",
}

__all__ = [
    "ESDExperiment",
    "ExperimentConfig",
    "FitSettings",
    "LayerRow",
    "PowerLawFit",
    "analyse_layer",
    "analyze_matrix",
    "analyze_model",
    "eigenvalues",
    "fit_power_law",
    "net_esd_estimator",
]


# What this room's modules import that comes with the extra gpuherd[esd].
_EXTRA = ("numpy", "scipy", "huggingface_hub", "torch", "pyarrow", "h5py")

__getattr__, __dir__ = on_first_use(__name__, _HOME, extra="esd", brings=_EXTRA)
