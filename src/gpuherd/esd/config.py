"""The options of an ESD experiment: one dataclass for the command line, the worker's words and Python callers.

Knows what values are allowed. Does not read the model list, the machine or the output folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from gpuherd.engines.options import refuse_ranks
from gpuherd.errors import UsageError
from gpuherd.esd.settings import FitSettings, of_one_type
from gpuherd.jobs.options import ORDERS, DispatchOptions, Order
from gpuherd.options import accepts_aliases, option
from gpuherd.units import count, duration_s, positive_int

MODES = ("esd",)
SpectraOf = Literal["weights", "ba", "delta"]
SPECTRA_OF: tuple[SpectraOf, ...] = get_args(SpectraOf)
DEVICE_MAPS = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class AnalysisOptions(FitSettings):
    """How a model is analysed: what the experiment hands on to each worker, and what its results depend on."""

    embeddings: bool = option(False, help="analyse embedding matrices too", group="analysis")
    layers: tuple[str, ...] = option(
        (),
        help="analyse only matrices whose name matches one of these patterns, like 'model.layers.0.*' or '*.q_proj'",
        many=True,
        metavar="PATTERN",
        group="analysis",
    )
    exclude: tuple[str, ...] = option(
        (),
        help="leave out matrices whose name matches one of these patterns",
        many=True,
        metavar="PATTERN",
        group="analysis",
    )
    spectra_of: SpectraOf = option(
        "weights",
        help="the weights (of an adapter: merged into its base), an adapter's update BA alone, or the weights minus "
        "those of the base",
        choices=SPECTRA_OF,
        group="analysis",
    )
    save_eigs: bool = option(False, help="keep all eigenvalues in eigs/<model>.parquet", group="analysis")
    device_map: str = option(
        "auto",
        help="where spectra are computed: on the job's GPU if there is one, on the CPU, or on a GPU or not at all",
        choices=DEVICE_MAPS,
        group="analysis",
    )
    no_parallel_gpu: bool = option(
        False,
        help="one matrix after the other on the first GPU: no reading ahead, no spreading over the job's GPUs",
        group="analysis",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        of_one_type(self, AnalysisOptions)
        for name in ("layers", "exclude"):
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))
        if self.spectra_of not in SPECTRA_OF:
            raise UsageError(f"spectra_of={self.spectra_of!r}; possible: {', '.join(SPECTRA_OF)}")
        if self.device_map not in DEVICE_MAPS:
            raise UsageError(f"device_map={self.device_map!r}; possible: {', '.join(DEVICE_MAPS)}")

    @property
    def convention_columns(self) -> dict[str, Any]:
        """What the figures depend on, by name, as it stands in each row; lists of patterns as one text."""
        values = {name: getattr(self, name) for name in CONVENTION}
        return {name: " ".join(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def convention(self) -> str:
        """The same as one line: results of two conventions can't be compared."""
        return " ".join(f"{name}={value}" for name, value in self.convention_columns.items())


# Where a model is analysed, how fast, and what else is kept: no figure depends on these.
NEUTRAL_OPTIONS = frozenset({"device_map", "no_parallel_gpu", "save_eigs"})
CONVENTION: tuple[str, ...] = tuple(each.name for each in fields(AnalysisOptions) if each.name not in NEUTRAL_OPTIONS)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What to analyse, where results go, and how the run behaves."""

    model_list: str | os.PathLike[str] | None = option(
        None, help="CSV file with the models to analyse", metavar="CSV", group="input and output"
    )
    single_model: str | os.PathLike[str] | None = option(
        None,
        help="analyse one model: a Hugging Face id, a folder or a file",
        metavar="MODEL",
        group="input and output",
    )
    base_model: str | os.PathLike[str] | None = option(
        None,
        help="the base of --single-model when that is an adapter (default: what its own config names)",
        metavar="MODEL",
        group="input and output",
    )
    output_dir: str | os.PathLike[str] = option(
        "./esd_results", help="folder for results", metavar="DIR", group="input and output"
    )
    log_dir: str | os.PathLike[str] | None = option(
        None, help="folder for log files (default: logs in the output folder)", metavar="DIR", group="input and output"
    )
    overwrite: bool = option(
        False, help="analyse again what is already done, also with other analysis options", group="input and output"
    )
    limit: int | None = option(
        None,
        help="take only the first N rows of the model list",
        parse=positive_int,
        metavar="N",
        group="input and output",
    )
    mode: str = option("esd", help="kind of experiment: esd", metavar="MODE", group="running")
    dry_run: bool = option(False, help="show what would run and start nothing", group="running")
    enqueue_only: bool = option(False, help="put the jobs into the queue of the run's folder and end", group="running")
    retries: int = option(
        1,
        help="further tries for a model whose worker crashed or ran out of memory",
        parse=count,
        metavar="N",
        group="running",
    )


@accepts_aliases
@dataclass(frozen=True, kw_only=True)
class ExperimentConfig(DispatchOptions, AnalysisOptions, RunOptions):
    """An ESD experiment. Exactly one of ``model_list`` (a CSV file) and ``single_model`` (a Hub id or a path).

    Raises:
        UsageError: a value that is not allowed, or none or both of ``model_list`` and ``single_model``.
    """

    # As for any run of jobs, but for two defaults: the cost of a model is known here, and so is its worker.
    order: Order = option(
        "longest",
        help="which of the waiting models goes first: the first of the list, or the largest where sizes are known",
        choices=ORDERS,
        group="jobs",
    )
    heartbeat: float | None = option(
        None,
        help="stop a worker that has told no progress for so long (default: 30m for our own worker)",
        parse=duration_s,
        metavar="TIME",
        group="jobs",
    )

    def __post_init__(self) -> None:
        AnalysisOptions.__post_init__(self)
        DispatchOptions.__post_init__(self)
        refuse_ranks(self)
        for name in ("model_list", "single_model", "base_model", "output_dir", "log_dir"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _text(name, value))
        object.__setattr__(self, "gpu_list", tuple(self.gpu_list))
        if self.mode not in MODES:
            raise UsageError(f"mode={self.mode!r} is not possible; possible: {', '.join(MODES)}")
        if self.model_list is None and self.single_model is None:
            raise UsageError("nothing to analyse: give --model-list CSV or --single-model MODEL")
        if self.model_list is not None and self.single_model is not None:
            raise UsageError("give --model-list or --single-model, not both")
        if self.base_model is not None and self.single_model is None:
            raise UsageError("--base-model goes with --single-model; in a list the column source_model names the base")
        if self.device_map == "cuda" and self.gpus_per_job == 0:
            raise UsageError("--device-map cuda needs a GPU, and --gpus-per-job 0 gives none; leave one of both out")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit={self.limit}; the least is 1")
        if self.retries < 0:
            raise UsageError(f"retries={self.retries}; the least is 0")

    def to_dict(self) -> dict[str, Any]:
        """The options as plain JSON values; ``from_dict`` gives an equal config back."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ExperimentConfig:
        """The config that ``to_dict`` described. Raises UsageError for a name that is no option."""
        unknown = sorted(values.keys() - {declared.name for declared in fields(cls)})
        if unknown:
            raise UsageError(f"unknown option {unknown[0]!r}")
        return cls(**values)


def _patterns(name: str, words: str | Sequence[str]) -> tuple[str, ...]:
    """Patterns of names, as they can be handed to a worker; a single text is one of them. Raises UsageError."""
    patterns = (words,) if isinstance(words, str) else tuple(words)
    for word in patterns:
        if not word or word.startswith("-") or "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UsageError(f"{name}={word!r}: a pattern is no empty text and doesn't begin with '-'")
    return patterns


def _text(name: str, value: str | os.PathLike[str]) -> str:
    """A path or id as text. Raises UsageError when it is empty, no file name could be so, or it is not in UTF-8, which
    neither the queue nor a result file could hold."""
    text = os.fspath(value)
    if not text or "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UsageError(f"{name}={text!r} is no usable name")
    return text
