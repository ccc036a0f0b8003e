"""The Python way to an analysis: a model, a module in memory or a single matrix in, a table or a row out.

No queue, no files: what ``gpuherd esd`` does in a worker, in this process. ``net_esd_estimator`` is the guides'
function by its own names (Model-Zoo's net_esd; TempBalance has one of the same name), on our eigenvalues and our
exact search; its definitions differ from the columns of ``LayerRow``: docs/esd.md says where. What it marks by -1 is
None here.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from gpuherd import __version__
from gpuherd.errors import BadModel, UsageError, naming_extras
from gpuherd.esd.config import AnalysisOptions, FitSettings, Precision
from gpuherd.esd.fits.power_law import PowerLawFit, fit_power_law
from gpuherd.esd.folder import OnProgress
from gpuherd.esd.pipeline import analyse_layer, analyse_matrices, log_alpha_norm, norms
from gpuherd.esd.resources import choose_devices, cuda_devices, torch_problem
from gpuherd.esd.schema import kind_of_column
from gpuherd.esd.selection import selected, without_unchanged
from gpuherd.esd.spectra.pooled import CONV_NORM, LayerSpectrum, checked
from gpuherd.esd.views import Origin, stats_rows

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from gpuherd.esd.schema import LayerRow
    from gpuherd.models.tensors.matrices import WeightMatrix
    from gpuherd.models.tensors.source import TensorSource


def analyze_model(
    model: str | os.PathLike[str] | torch.nn.Module,
    *,
    base: str | os.PathLike[str] | None = None,
    progress: OnProgress | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Analyses every weight matrix of a model.

    Args:
        model: a folder or file, a Hugging Face id (``org/name@revision``), or a ``torch.nn.Module``, whose state
            dictionary is read where it lies.
        base: of an adapter, where it does not name its own; or what ``spectra_of="delta"`` compares with. Of another
            model only what ``source_model`` says; it is not looked for.
        progress: called with the number of matrices done and of all, from one thread at a time.
        **options: those of the command line with underscores (``AnalysisOptions``): ``fix_fingers``, ``embeddings``,
            ``layers``, ``device_map``, …

    Returns:
        A row a matrix with the columns of a stats file, typed: text, ``Int64``, ``float64`` (NaN: no value), ``bool``.
        ``fit_status`` says why a matrix has no figures. With ``save_eigs`` a column ``eigs`` of float64 arrays,
        ascending; None for a matrix that could not be analysed.

    Raises:
        UsageError: an option that is not allowed.
        BadModel, MissingModel: the model or its base can't be used.
        MissingExtra: pandas is not installed, or a library that this model or these options need.
    """
    with naming_extras({"pandas": "esd,pandas"}, "analyze_model needs"):
        import pandas  # noqa: F401 - said before hours of work, not after
    settings = AnalysisOptions(**options)
    in_memory = not isinstance(model, str | os.PathLike) and hasattr(model, "state_dict")
    return _table((_of_module if in_memory else _of_name)(model, base, settings), settings, progress)


def analyze_matrix(
    weights: npt.NDArray[Any] | torch.Tensor | Sequence[Sequence[float]],
    *,
    name: str = "matrix",
    device: str = "cpu",
    **settings: Any,
) -> LayerRow:
    """The figures of one weight matrix.

    Args:
        weights: two axes: a matrix. Three to five: a convolution (out, in, kernel …), whose kernel positions are
            matrices of one layer. Arrays, tensors and nested lists of real numbers; float16 and bfloat16 are taken as
            the same values in float32.
        name: goes into ``longname``.
        device: where eigenvalues are computed: ``cpu`` or as torch names GPUs.
        **settings: fields of ``FitSettings``.

    Raises:
        UsageError: a setting that is not allowed.
        ValueError: these are no real numbers on two to five axes.
    """
    chosen = FitSettings(**settings)
    matrices, conv = _slices(weights)
    return analyse_layer(name, matrices, chosen, device=device, conv=conv)


# A model's matrices, the names of its tensors, its id, and its base.
_Opened = tuple[Sequence["WeightMatrix"], Iterable[str], str, str | None]


def _of_module(module: Any, base: object, options: AnalysisOptions) -> _Opened:
    from gpuherd.models.checkpoints.module import module_source
    from gpuherd.models.tensors.kinds import adapter_factor
    from gpuherd.models.tensors.matrices import matrices

    if base is not None or options.spectra_of != "weights":
        raise BadModel("a module in memory has no base to compare with: save it, and give its folder and its base")
    source: TensorSource = module_source(module)
    lora = adapter_factor(source.tensors)
    if lora is not None:
        raise BadModel(f"the module has an adapter that is not merged ({lora}): call its merge_and_unload() first")
    return list(matrices(source, embeddings=options.embeddings)), source.tensors, type(module).__name__, None


def _of_name(model: Any, base: str | os.PathLike[str] | None, options: AnalysisOptions) -> _Opened:
    from gpuherd.models.checkpoints.hub import locate
    from gpuherd.models.names import parse_model
    from gpuherd.models.subject import base_of, open_subject

    if not isinstance(model, str | os.PathLike):
        raise BadModel(f"a model is a path, an id or a torch.nn.Module, not a {type(model).__name__}")
    path = locate(parse_model(os.fspath(model)))
    given = None if base is None else os.fspath(base)
    named = base_of(path, given, options.spectra_of)
    there = None if named is None else locate(parse_model(named))
    subject = open_subject(path, there, options.spectra_of, embeddings=options.embeddings)
    return subject.matrices, subject.source.tensors, os.fspath(model), given or named


def _table(opened: _Opened, options: AnalysisOptions, progress: OnProgress | None) -> pd.DataFrame:
    matrices, tensors, model_id, base = opened
    found = selected(matrices, tensors, options.layers, options.exclude)
    parallel = not options.no_parallel_gpu
    devices, _ = choose_devices(options.device_map, cuda_devices(), torch_problem, all_gpus=parallel)
    eigs: dict[int, npt.NDArray[np.float64]] = {}

    def keep(index: int, spectrum: LayerSpectrum) -> None:
        if options.save_eigs and spectrum.problem is None:
            eigs[index] = spectrum.evals

    told = None if progress is None else lambda done: progress(done, len(found))
    rows = analyse_matrices(found, options, devices, parallel=parallel, on_progress=told, on_spectrum=keep)
    if options.spectra_of == "delta":
        rows = without_unchanged(rows)
    origin = Origin(model_id, base, "", options.convention_columns, __version__)
    table = _as_pandas(stats_rows(origin, rows))
    if options.save_eigs:
        import pandas as pd

        table["eigs"] = pd.Series([eigs.get(index) for index in range(len(rows))], dtype=object)
    return table


def _as_pandas(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    types = {"int": "Int64", "float": "float64", "bool": "bool", "str": "object"}
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        columns[name] = pd.Series(values, dtype=types[kind_of_column(name, values)])
    return pd.DataFrame(columns)


def _slices(weights: Any) -> tuple[list[npt.NDArray[Any]], bool]:
    """The matrices of an array, and whether they are those of a convolution."""
    if hasattr(weights, "detach"):
        tensor = weights.detach().cpu()
        try:
            weights = (tensor.float() if tensor.element_size() < 4 and tensor.is_floating_point() else tensor).numpy()
        except (TypeError, RuntimeError) as problem:  # sparse, packed integers, …
            raise ValueError(f"this tensor is no array of numbers: {problem}") from None
    if np.ma.isMaskedArray(weights):
        raise ValueError("weights have no mask: fill what is masked, or leave it out")
    array = np.asarray(weights)
    if array.dtype.kind not in "fiu" or not 2 <= array.ndim <= 5:
        raise ValueError(f"weights are real numbers on two to five axes, not {array.dtype} on {array.ndim}")
    if array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float32 if array.dtype == np.float16 else np.float64)
    if array.ndim == 2:
        return [array], False
    out, inputs = array.shape[:2]
    return list(np.moveaxis(array.reshape(out, inputs, -1), 2, 0)), True


# ---- the guides' function

Float64 = npt.NDArray[np.float64]

logger = logging.getLogger(__name__)

KEYS = (
    "D", "M", "N", "alpha", "alpha_weighted", "entropy", "log_alpha_norm", "log_norm", "log_spectral_norm", "longname",
    "matrix_rank", "norm", "num_evals", "spectral_norm", "stable_rank", "xmax", "xmin", "params", "eigs",
)  # fmt: skip
# What that function adds to every p of the entropy, and to the rank.
EPSILON = 6e-5
# Kinds of layers, and the shape of a Linear layer from which on it counts as a classifier.
LAYER_TYPES = ("conv1d", "conv2d", "linear")
CLASSIFIER_ASPECT = 8
FixFingers = Literal["xmin_mid", "xmin_peak", "DKS"]


def net_esd_estimator(
    net: torch.nn.Module,
    EVALS_THRESH: float = 1e-5,
    bins: int = 100,
    fix_fingers: FixFingers | None = None,
    xmin_pos: float = 2,
    conv_norm: float = 0.5,
    filter_zeros: bool = False,
    parallel: bool = True,
    device_ids: Sequence[int] | None = None,
    max_workers: int | None = None,
    filter_type: bool = True,
    use_svd: bool = False,
    save_eigs: bool = True,
    compute_dtype: Precision = "float64",
) -> dict[str, list[Any]]:
    """Spectra and power laws of a network's layers, as the guides' function of this name gives them.

    Args:
        net: the network; only read.
        EVALS_THRESH: with ``filter_zeros``: eigenvalues up to this are left out (of all figures), if any are above it.
        bins: of the histogram for ``xmin_peak``.
        fix_fingers: where the tail starts: ``xmin_mid``, ``xmin_peak`` (candidates in [0.95 p, 1.5 p]), or by search
            over all eigenvalues (None or ``DKS``).
        xmin_pos: ``xmin_mid`` starts it at eigenvalue n // xmin_pos.
        conv_norm: every eigenvalue of a convolution is multiplied by this.
        filter_zeros: see ``EVALS_THRESH``.
        parallel: compute on GPUs, where there are any; else on the CPU.
        device_ids: which GPUs; all that are visible.
        max_workers: at most so many of them.
        filter_type: layers of the types Linear, Conv1d, Conv1D and Conv2d only, and no Linear layer eight times as long
            as wide. False: every matrix that gpuherd finds, embeddings and fused experts too.
        use_svd: singular values by SVD on the CPU and not by the Gram matrix: much slower, the same to 12 digits.
        save_eigs: False: ``eigs`` holds None for each layer.
        compute_dtype: ``float64``, or ``float32`` as that function has it.

    Returns:
        Lists of equal length, an entry a layer in the network's order, by the names in ``KEYS``. ``xmin`` and ``xmax``
        are the least and the largest eigenvalue that was kept, NOT where the fit starts. ``eigs`` are float64 arrays,
        ascending. An entry is None where there is no such figure: no valid fit, or a layer of NaN or zeros; which, is
        in the log. Layers of one eigenvalue are left out. Fused attention is split as gpuherd does everywhere: into
        ``_q``, ``_k`` and ``_v`` by its true layout.

    Raises:
        UsageError: an argument that is not allowed.
        BadModel: the network's weights can't be read.
        MissingExtra: torch is not installed.
    """
    method: FixFingers = "DKS" if fix_fingers is None else fix_fingers
    if method not in get_args(FixFingers):
        raise UsageError(f"fix_fingers={fix_fingers!r}; possible: None, 'DKS', 'xmin_mid', 'xmin_peak'")
    if not 0 < conv_norm < math.inf:
        raise UsageError(f"conv_norm={conv_norm!r} must be a positive number")
    settings = FitSettings(
        fix_fingers="xmin_mid", evals_thresh=EVALS_THRESH, bins=bins, xmin_pos=xmin_pos, precision=compute_dtype
    )
    layers = _layers(net, filter_type)
    chosen = replace(settings, fix_fingers=method)
    kept: dict[int, dict[str, Any]] = {}

    def keep(index: int, spectrum: LayerSpectrum) -> None:
        figures = _figures(*layers[index], spectrum, chosen, filter_zeros, conv_norm)
        if figures is not None:
            kept[index] = figures if save_eigs else figures | {"eigs": None}

    matrices = [matrix for matrix, _ in layers]
    if use_svd:
        for index, matrix in enumerate(matrices):
            keep(index, _by_svd(matrix, np.dtype(compute_dtype)))
    else:
        devices = _devices(parallel, device_ids, max_workers)
        analyse_matrices(matrices, settings, devices, parallel=True, on_spectrum=keep)
    return {key: [kept[index][key] for index in sorted(kept)] for key in KEYS}


def _layers(net: torch.nn.Module, filter_type: bool) -> list[tuple[WeightMatrix, int]]:
    """The matrices in the order of the network, each with how many numbers that function counts for it: its weights,
    and the bias of an undivided layer."""
    from gpuherd.models.checkpoints.module import module_source
    from gpuherd.models.tensors.matrices import matrices

    source = module_source(net)
    place = {name: index for index, name in enumerate(source.tensors)}
    modules = dict(net.named_modules())
    found = [each for each in matrices(source, embeddings=not filter_type) if each.skip is None]
    whole = Counter(each.tensor for each in found)
    layers = []
    for matrix in sorted(found, key=lambda each: place[each.tensor]):
        module = modules.get(matrix.tensor.removesuffix(".weight").removesuffix("weight"))
        if filter_type and not _counts(module, source.tensors[matrix.tensor].shape):
            continue
        bias = getattr(module, "bias", None) if whole[matrix.tensor] == 1 else None
        trained = getattr(bias, "requires_grad", False)
        layers.append((matrix, matrix.params + (math.prod(bias.shape) if bias is not None and trained else 0)))
    return layers


def _counts(module: torch.nn.Module | None, shape: Sequence[int]) -> bool:
    """Whether that function looks at a layer of this type and shape; a long and narrow Linear is a classifier to it."""
    kind = type(module).__name__.lower()
    classifier = kind == "linear" and max(shape) >= CLASSIFIER_ASPECT * min(shape)
    return kind in LAYER_TYPES and not classifier


def _devices(parallel: bool, device_ids: Sequence[int] | None, max_workers: int | None) -> tuple[str, ...]:
    if max_workers is not None and max_workers < 1:
        raise UsageError(f"max_workers={max_workers}; the least is 1")
    if device_ids is not None and not device_ids:
        raise UsageError("device_ids is empty; None means all, parallel=False the CPU")
    if not parallel:
        return ("cpu",)
    devices, _ = choose_devices("auto", cuda_devices(), torch_problem, all_gpus=True)
    if devices == ("cpu",):
        return devices
    chosen = devices if device_ids is None else tuple(f"cuda:{index}" for index in device_ids)
    unknown = [device for device in chosen if device not in devices]
    if unknown:
        raise UsageError(f"device_ids: there is no {unknown[0]}; there are {', '.join(devices)}")
    return tuple(dict.fromkeys(chosen))[:max_workers]


def _by_svd(matrix: WeightMatrix, dtype: np.dtype[Any]) -> LayerSpectrum:
    slices = [np.asarray(each, dtype) for each in matrix.slices()]
    if not all(np.isfinite(each).all() for each in slices):
        return LayerSpectrum(np.empty(0), "some of the weights are NaN or infinite")
    values = np.concatenate([np.linalg.svd(each, compute_uv=False) for each in slices]).astype(np.float64)
    return checked(np.sort(values**2) * (CONV_NORM if matrix.kind == "conv" else 1.0))


def _figures(
    matrix: WeightMatrix, params: int, spectrum: LayerSpectrum, chosen: FitSettings, filter_zeros: bool, norm: float
) -> dict[str, Any] | None:
    """The figures of one layer by ``KEYS``; None for a layer of one eigenvalue."""
    rows, columns = matrix.shape
    about = {"longname": matrix.longname, "M": rows, "N": columns, "params": params}
    if spectrum.problem is not None:
        if min(rows, columns) * (matrix.params // (rows * columns)) < 2:
            return None
        logger.warning("%s: %s", matrix.longname, spectrum.problem)
        return dict.fromkeys(KEYS) | about | {"eigs": np.empty(0), "num_evals": 0}
    evals = spectrum.evals * (norm / CONV_NORM) if matrix.kind == "conv" else spectrum.evals
    above = evals[evals > chosen.evals_thresh] if filter_zeros else evals
    kept = above if len(above) else evals
    if len(kept) < 2:
        return None
    fit = _fit(kept, chosen)
    if fit.alpha is None:
        logger.warning("%s: %s", matrix.longname, fit.status)
    return about | _of_spectrum(kept, columns, float(np.finfo(chosen.precision).eps)) | _of_fit(kept, fit)


def _of_spectrum(kept: Float64, columns: int, epsilon: float) -> dict[str, Any]:
    sigma = np.sqrt(kept)
    rank = int(np.count_nonzero(sigma > sigma[-1] * columns * epsilon))
    return norms(kept) | {
        "num_evals": len(kept),
        "matrix_rank": rank,
        "entropy": _entropy(kept / kept.sum(), rank),
        "xmin": float(kept[0]),
        "xmax": float(kept[-1]),
        "eigs": kept,
    }


def _entropy(p: Float64, rank: int) -> float | None:
    """-sum (p + e) ln (p + e) / ln (rank + e) with that function's e; it can be more than 1."""
    if rank < 2:
        return None
    q = p + EPSILON
    return float(-(q * np.log(q)).sum() / math.log(rank + EPSILON))


def _of_fit(kept: Float64, fit: PowerLawFit) -> dict[str, Any]:
    if fit.alpha is None:
        return dict.fromkeys(("alpha", "D", "alpha_weighted", "log_alpha_norm"))
    return {
        "alpha": fit.alpha,
        "D": fit.D,
        "alpha_weighted": fit.alpha * math.log10(float(kept[-1])),
        "log_alpha_norm": log_alpha_norm(kept, fit.alpha),
    }


def _fit(kept: Float64, chosen: FitSettings) -> PowerLawFit:
    """The fit to all kept eigenvalues. Zeros among them count where the tail is chosen by its place."""
    if chosen.fix_fingers != "xmin_mid":
        return fit_power_law(kept[kept > 0], chosen.fix_fingers, bins=chosen.bins)
    tail = kept[min(int(len(kept) // chosen.xmin_pos), len(kept) - 2) :]
    if tail[0] <= 0:
        return PowerLawFit(None, None, None, None, None, None, "the eigenvalue in the middle is zero")
    # Of this tail the first is xmin.
    return fit_power_law(tail, "xmin_mid", xmin_pos=2.0 * len(tail))
