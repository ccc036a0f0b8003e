"""The Python way to an analysis: a model, a module in memory or a single matrix in, a table or a row out.

No queue, no files: what ``gpuherd esd`` does in a worker, in this process. Knows how things given by hand become the
matrices of ``models`` and how rows become a pandas table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuherd import __version__
from gpuherd.errors import BadModel, naming_extras
from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.devices import choose_devices, cuda_devices, torch_problem
from gpuherd.esd.schema import kind_of_column
from gpuherd.esd.settings import FitSettings
from gpuherd.esd.views import Origin, stats_rows

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd
    import torch

    from gpuherd.esd.row import LayerRow
    from gpuherd.esd.spectra.pooled import LayerSpectrum
    from gpuherd.models.tensors.matrices import WeightMatrix
    from gpuherd.models.tensors.source import TensorSource

Progress = Callable[[int, int], None]


def analyze_model(
    model: str | os.PathLike[str] | torch.nn.Module,
    *,
    base: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
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
    _need_pandas()
    settings = AnalysisOptions(**options)
    opened = _of_module(model, base, settings) if _is_module(model) else _of_name(model, base, settings)
    return _table(opened, settings, progress)


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
    from gpuherd.esd.layer import analyse_layer

    chosen = FitSettings(**settings)
    slices = _slices(weights)
    return analyse_layer(name, slices.matrices, chosen, device=device, conv=slices.conv)


class _Opened(NamedTuple):
    """What is to be analysed: the matrices, selected, and whose they are."""

    matrices: list[WeightMatrix]
    model_id: str
    base: str | None


class _Slices(NamedTuple):
    matrices: list[npt.NDArray[Any]]
    conv: bool


def _is_module(model: Any) -> bool:
    return not isinstance(model, str | os.PathLike) and hasattr(model, "state_dict")


def _of_module(module: Any, base: object, options: AnalysisOptions) -> _Opened:
    from gpuherd.esd.selection import selected
    from gpuherd.models.checkpoints.module import module_source
    from gpuherd.models.tensors.kinds import adapter_factor
    from gpuherd.models.tensors.matrices import matrices

    if base is not None or options.spectra_of != "weights":
        raise BadModel("a module in memory has no base to compare with: save it, and give its folder and its base")
    source: TensorSource = module_source(module)
    lora = adapter_factor(source.tensors)
    if lora is not None:
        raise BadModel(f"the module has an adapter that is not merged ({lora}): call its merge_and_unload() first")
    found = selected(
        list(matrices(source, embeddings=options.embeddings)), source.tensors, options.layers, options.exclude
    )
    return _Opened(found, type(module).__name__, None)


def _of_name(
    model: str | os.PathLike[str] | Any, base: str | os.PathLike[str] | None, options: AnalysisOptions
) -> _Opened:
    from gpuherd.esd.selection import selected
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
    found = selected(subject.matrices, subject.source.tensors, options.layers, options.exclude)
    return _Opened(found, os.fspath(model), given or named)


def _table(opened: _Opened, options: AnalysisOptions, progress: Progress | None) -> pd.DataFrame:
    from gpuherd.esd.pipeline import analyse_matrices

    parallel = not options.no_parallel_gpu
    devices, _ = choose_devices(options.device_map, cuda_devices(), torch_problem, all_gpus=parallel)
    eigs: dict[int, npt.NDArray[np.float64]] = {}

    def keep(index: int, spectrum: LayerSpectrum) -> None:
        if options.save_eigs and spectrum.problem is None:
            eigs[index] = spectrum.evals

    def tell(done: int) -> None:
        if progress is not None:
            progress(done, len(opened.matrices))

    rows = analyse_matrices(opened.matrices, options, devices, parallel=parallel, on_progress=tell, on_spectrum=keep)
    if options.spectra_of == "delta":
        from gpuherd.esd.selection import without_unchanged

        rows = without_unchanged(rows)
    origin = Origin(opened.model_id, opened.base, "", options.convention_columns, __version__)
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


def _slices(weights: Any) -> _Slices:
    import numpy as np

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
        return _Slices([array], conv=False)
    out, inputs = array.shape[:2]
    return _Slices(list(np.moveaxis(array.reshape(out, inputs, -1), 2, 0)), conv=True)


def _need_pandas() -> None:
    with naming_extras({"pandas": "esd,pandas"}, "analyze_model needs"):
        import pandas  # noqa: F401 - said before hours of work, not after
