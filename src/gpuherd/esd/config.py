"""The options of an ESD experiment: one dataclass for the command line, the worker's words and Python callers.

Knows what values are allowed. Does not read the model list, the machine or the output folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from gpuherd.errors import UsageError
from gpuherd.jobs.options import ORDERS, DispatchOptions, Order, count, positive_int
from gpuherd.options import accepts_aliases, option
from gpuherd.quantities import duration_s

MODES = ("esd",)
FixFingers = Literal["xmin_mid", "xmin_peak", "DKS"]
FIX_FINGERS: tuple[FixFingers, ...] = get_args(FixFingers)
DEVICE_MAPS = ("auto", "cpu", "cuda")


def threshold(word: str) -> float:
    """An eigenvalue threshold: a finite number, 0 or more."""
    try:
        value = float(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a number") from None
    if not 0 <= value < math.inf:
        raise ValueError(f"{word!r} is not a finite number of 0 or more")
    return value


@dataclass(frozen=True, kw_only=True)
class AnalysisOptions:
    """How a model is analysed: what the experiment hands on to each worker, and what its results depend on."""

    fix_fingers: FixFingers = option(
        "xmin_mid",
        help="how the start of the power-law tail is chosen: the median, near the peak of the histogram, or by search",
        choices=FIX_FINGERS,
        group="analysis",
    )
    evals_thresh: float = option(
        1e-5, help="eigenvalues up to this are left out of the fit", parse=threshold, metavar="X", group="analysis"
    )
    bins: int = option(
        100,
        help="bins of the histogram in which xmin_peak finds the peak",
        parse=positive_int,
        metavar="N",
        group="analysis",
    )
    embeddings: bool = option(False, help="analyse embedding matrices too", group="analysis")
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
        if self.fix_fingers not in FIX_FINGERS:
            raise UsageError(f"fix_fingers={self.fix_fingers!r}; possible: {', '.join(FIX_FINGERS)}")
        if self.device_map not in DEVICE_MAPS:
            raise UsageError(f"device_map={self.device_map!r}; possible: {', '.join(DEVICE_MAPS)}")
        if not 0 <= self.evals_thresh < math.inf:
            raise UsageError(f"evals_thresh={self.evals_thresh}; it must be a finite number of 0 or more")
        if self.bins < 1:
            raise UsageError(f"bins={self.bins}; the least is 1")

    @property
    def convention(self) -> str:
        """What the figures depend on, as one line: results of two conventions can't be compared."""
        scope = "with" if self.embeddings else "without"
        return f"fix_fingers={self.fix_fingers} evals_thresh={self.evals_thresh!r} bins={self.bins} {scope} embeddings"


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


def _text(name: str, value: str | os.PathLike[str]) -> str:
    """A path or id as text. Raises UsageError when it is empty, no file name could be so, or it is not in UTF-8, which
    neither the queue nor a result file could hold."""
    text = os.fspath(value)
    if not text or "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UsageError(f"{name}={text!r} is no usable name")
    return text
