"""``spectra/<model>.npz``: a few points of each spectrum of a model, for plots.

A compressed NumPy archive without pickled objects. Knows its arrays; what a point is, is ``sketch``'s business.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuherd.errors import BadModel
from gpuherd.esd.row import LayerRow
from gpuherd.esd.tables.sketch import HISTOGRAM_BINS, Sketch
from gpuherd.esd.tables.stats import stored_text

Float64 = npt.NDArray[np.float64]

# What NumPy and zipfile raise for a damaged archive. RuntimeError: its head says that it is encrypted, or of a later
# version of the format.
_DAMAGED = (
    *(OSError, ValueError, KeyError, EOFError, IndexError, TypeError),
    *(zipfile.BadZipFile, zlib.error, RuntimeError),
)


@dataclass(frozen=True, slots=True, eq=False)
class StoredSpectrum:
    """One layer's sketch with its fit; ``xmin``, ``alpha`` and ``D`` are None without one."""

    longname: str
    sketch: Sketch
    xmin: float | None
    alpha: float | None
    D: float | None


@dataclass(frozen=True, slots=True, eq=False)
class StoredSpectra:
    """What the file of one model holds: its layers in order, and what their figures depend on."""

    model_id: str
    convention: Mapping[str, Any]
    layers: tuple[StoredSpectrum, ...]


def spectra_bytes(
    model_id: str, convention: Mapping[str, Any], rows: Sequence[LayerRow], sketches: Mapping[int, Sketch]
) -> bytes:
    """The file of a model.

    Arrays, with L layers and P points in all: ``longname`` str (L,); ``offsets`` int64 (L + 1,): layer i has the points
    ``offsets[i]`` to ``offsets[i + 1]``; ``log10_lambda`` and ``log10_ccdf`` float32 (P,); ``histogram`` uint32
    (L, 64); ``count`` and ``below`` int64 (L,), see ``Sketch``; ``alpha``, ``xmin`` and ``D`` float64 (L,), NaN where
    there is no fit, which no reader of ours passes on; ``about`` str (), JSON with ``model_id`` and ``convention``.

    Args:
        sketches: by the row's index; rows without one (not analysed) are left out.
    """
    kept = [(rows[index], sketches[index]) for index in sorted(sketches)]
    points = [len(sketch.log10_lambda) for _, sketch in kept]
    arrays: dict[str, npt.NDArray[Any]] = {
        "about": np.array(json.dumps({"model_id": stored_text(model_id), "convention": dict(convention)})),
        "longname": np.array([stored_text(row.longname) for row, _ in kept], dtype=np.str_),
        "offsets": np.concatenate([[0], np.cumsum(points, dtype=np.int64)]).astype(np.int64),
        "log10_lambda": _joined([sketch.log10_lambda for _, sketch in kept]),
        "log10_ccdf": _joined([sketch.log10_ccdf for _, sketch in kept]),
        "histogram": np.array([sketch.histogram for _, sketch in kept], np.uint32).reshape(-1, HISTOGRAM_BINS),
        "count": np.array([sketch.count for _, sketch in kept], np.int64),
        "below": np.array([sketch.below for _, sketch in kept], np.int64),
        "alpha": _figures([row.alpha for row, _ in kept]),
        "xmin": _figures([row.xmin for row, _ in kept]),
        "D": _figures([row.D for row, _ in kept]),
    }
    out = io.BytesIO()
    # By hand, not by numpy.savez, which puts the time of day in: the same spectra are to give the same bytes.
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy")
            member.compress_type = zipfile.ZIP_DEFLATED
            data = io.BytesIO()
            np.lib.format.write_array(data, array, allow_pickle=False)
            archive.writestr(member, data.getvalue())
    return out.getvalue()


def read_spectra(path: Path) -> StoredSpectra:
    """What ``spectra_bytes`` wrote. Raises FileNotFoundError, and BadModel for another or a damaged file."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return _from_arrays({name: arrays[name] for name in arrays.files})
    except FileNotFoundError:
        raise
    except _DAMAGED as problem:
        raise BadModel(f"{path} is no file of spectra of gpuherd: {problem}") from None


def _from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> StoredSpectra:
    about = json.loads(str(arrays["about"]))
    offsets = arrays["offsets"]
    log10_lambda, log10_ccdf = (np.asarray(arrays[name], np.float32) for name in ("log10_lambda", "log10_ccdf"))
    layers = []
    for index, name in enumerate(arrays["longname"].tolist()):
        points = slice(int(offsets[index]), int(offsets[index + 1]))
        sketch = Sketch(
            log10_lambda[points],
            log10_ccdf[points],
            arrays["histogram"][index],
            int(arrays["count"][index]),
            int(arrays["below"][index]),
        )
        xmin, alpha, D = (_figure(arrays[column][index]) for column in ("xmin", "alpha", "D"))
        layers.append(StoredSpectrum(name, sketch, xmin, alpha, D))
    return StoredSpectra(about["model_id"], about["convention"], tuple(layers))


def _joined(parts: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    return np.concatenate([np.empty(0, np.float32), *parts])


def _figures(values: Sequence[float | None]) -> Float64:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _figure(value: np.float64) -> float | None:
    return None if np.isnan(value) else float(value)
