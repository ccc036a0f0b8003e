"""The options of an ESD experiment, each declared once: for the command line, the worker and Python callers.

Knows what values are allowed; each field says what its values mean, docs/esd-numerics.md has the definitions. Does
not read the model list, the machine or the output folder, and imports no numpy.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, make_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from gpuherd.engines.options import refuse_ranks
from gpuherd.errors import UsageError
from gpuherd.esd.tails import tails
from gpuherd.jobs.options import ORDERS, DispatchOptions, Order
from gpuherd.options import accepts_aliases, option, option_fields
from gpuherd.units import amount, count, duration_s, positive_int

# ---- how a spectrum is computed and fitted: the options of one matrix, and so of all rows of a result

Method = Literal["xmin_mid", "xmin_peak", "xmin_peak_wide", "DKS"]
METHODS: tuple[Method, ...] = get_args(Method)
KS = Literal["one-sided", "two-sided"]
KS_KINDS: tuple[KS, ...] = get_args(KS)
Precision = Literal["float64", "float32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_analysis = partial(option, group="analysis")
# A histogram of so many bins has one for any two eigenvalues that a plot could tell apart.
MOST_BINS = 1_000_000


def of_one_type(options: Any, config_type: type) -> None:
    """Gives each number and each yes or no of ``options`` the type of its default: 2, 2.0 and NumPy's 2.0 are one and
    the same option, which is reported and compared as text. Raises UsageError for a value of another kind, or one that
    is none of the option's choices.

    Args:
        options: a frozen dataclass that is being made.
        config_type: the dataclass that declares the options.
    """
    for declared, spec in option_fields(config_type):
        value = getattr(options, declared.name)
        if spec.choices is not None and value not in spec.choices:
            raise UsageError(f"{declared.name}={value!r} is unknown; possible: {', '.join(spec.choices)}")
        convert = _CONVERSIONS.get(type(declared.default))
        if convert is None:
            continue
        try:
            object.__setattr__(options, declared.name, convert(value))
        except (TypeError, ValueError, OverflowError):
            kind = type(declared.default).__name__
            raise UsageError(f"{declared.name}={value!r} is no {kind}, as {declared.default!r} is") from None


def _yes_or_no(value: Any) -> bool:
    if value not in (True, False):
        raise ValueError
    return bool(value)


def _integer(value: Any) -> int:
    return int(operator.index(value))


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError
    return float(value) + 0.0  # of -0.0 too


_CONVERSIONS: dict[type, Callable[[Any], Any]] = {bool: _yes_or_no, int: _integer, float: _number}


@dataclass(frozen=True)
class _PowerLawSettings:
    fix_fingers: Method = _analysis(
        "xmin_mid",
        help="how the start of the power-law tail is chosen: at the median, near the peak of the histogram (in its "
        "documented window, or in the wide one of the older codes), or by search over all eigenvalues",
        choices=METHODS,
    )
    evals_thresh: float = _analysis(
        1e-5, help="eigenvalues up to this are left out of the fit", parse=amount, metavar="X"
    )
    bins: int = _analysis(
        100, help="bins of the histogram in which xmin_peak finds the peak", parse=positive_int, metavar="N"
    )
    ks: KS = _analysis(
        "one-sided",
        help="the Kolmogorov-Smirnov distance: by the left limits of the empirical distribution, as WeightWatcher and "
        "TempBalance compute it, or by both limits, as in textbooks",
        choices=KS_KINDS,
    )
    xmin_pos: float = _analysis(
        2.0,
        help="xmin_mid starts the tail at eigenvalue n / X in ascending order: 2 is the median",
        parse=float,
        metavar="X",
    )
    delta: float = _analysis(
        1e-3,
        help="alpha_lo and alpha_hi span every tail whose distance is within X of the best",
        parse=amount,
        metavar="X",
    )
    clip_xmax: bool = _analysis(False, help="leave out the largest eigenvalues where they inflate alpha (fingers)")
    bootstrap: int = _analysis(
        0,
        help="samples for a p-value of the power law by parametric bootstrap (0: none; 2500 give two digits)",
        parse=count,
        metavar="N",
    )


if TYPE_CHECKING:
    # At run time every tail distribution that is found has its option. Type checkers know this one.
    @dataclass(frozen=True)
    class _WithTails(_PowerLawSettings):
        tpl: bool = False

else:
    _WithTails = make_dataclass(
        "_WithTails",
        [(tail.name, bool, _analysis(False, help=tail.help)) for tail in tails()],
        bases=(_PowerLawSettings,),
        frozen=True,
    )


@dataclass(frozen=True)
class FitSettings(_WithTails):
    """How the spectrum of a matrix is computed and fitted. The same settings for every row of a result, or the rows
    can't be compared.

    Raises:
        UsageError: a value that is not allowed.
    """

    mp_fit: bool = _analysis(False, help="fit the Marchenko-Pastur law to the bulk too")
    randomize: bool = _analysis(False, help="compare with the spectrum of the same weights in random order")
    farms: bool = _analysis(False, help="fit the pooled spectrum of windows of fixed aspect ratio too (FARMS)")
    seed: int = _analysis(0, help="of the bootstrap and the random order", parse=count, metavar="N")
    precision: Precision = _analysis(
        "float64",
        help="arithmetic of the eigenvalues: float32 halves the time of matrices that are longer than wide, and can "
        "move a searched alpha by 0.1",
        choices=PRECISIONS,
    )

    def __post_init__(self) -> None:
        of_one_type(self, FitSettings)
        for name in ("evals_thresh", "delta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)!r} must be a finite number, 0 or more")
        if not 1 <= self.bins <= MOST_BINS:
            raise UsageError(f"bins={self.bins!r} must be from 1 to {MOST_BINS}")
        if not 1 <= self.xmin_pos < math.inf:
            raise UsageError(f"xmin_pos={self.xmin_pos!r} must be a finite number, 1 or more")
        for name in ("bootstrap", "seed"):
            if not 0 <= getattr(self, name) < 2**63:  # the most that a column of a table holds
                raise UsageError(f"{name}={getattr(self, name)!r} must be 0 or more, and less than 2^63")

    @property
    def needs_weights(self) -> bool:
        """Whether figures are asked for that the spectrum alone does not give: the weights are then kept for them."""
        return self.randomize or self.farms


# ---- how a model is analysed, and how an experiment runs

MODES = ("esd",)
SpectraOf = Literal["weights", "ba", "delta"]
SPECTRA_OF: tuple[SpectraOf, ...] = get_args(SpectraOf)
DEVICE_MAPS = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class AnalysisOptions(FitSettings):
    """How a model is analysed: what the experiment hands on to each worker, and what its results depend on."""

    embeddings: bool = _analysis(False, help="analyse embedding matrices too")
    layers: tuple[str, ...] = _analysis(
        (),
        help="analyse only matrices whose name matches one of these patterns, like 'model.layers.0.*' or '*.q_proj'",
        many=True,
        metavar="PATTERN",
    )
    exclude: tuple[str, ...] = _analysis(
        (), help="leave out matrices whose name matches one of these patterns", many=True, metavar="PATTERN"
    )
    spectra_of: SpectraOf = _analysis(
        "weights",
        help="the weights (of an adapter: merged into its base), an adapter's update BA alone, or the weights minus "
        "those of the base",
        choices=SPECTRA_OF,
    )
    save_eigs: bool = _analysis(False, help="keep all eigenvalues in eigs/<model>.parquet")
    device_map: str = _analysis(
        "auto",
        help="where spectra are computed: on the job's GPU if there is one, on the CPU, or on a GPU or not at all",
        choices=DEVICE_MAPS,
    )
    no_parallel_gpu: bool = _analysis(
        False, help="one matrix after the other on the first GPU: no reading ahead, no spreading over the job's GPUs"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        of_one_type(self, AnalysisOptions)
        for name in ("layers", "exclude"):
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))

    @property
    def convention_columns(self) -> dict[str, Any]:
        """What the figures depend on, by name, as it stands in each row; lists of patterns as one text."""
        values = {name: getattr(self, name) for name in CONVENTION}
        return {name: " ".join(value) if isinstance(value, tuple) else value for name, value in values.items()}


# Where a model is analysed, how fast, and what else is kept: no figure depends on these.
NEUTRAL_OPTIONS = frozenset({"device_map", "no_parallel_gpu", "save_eigs"})
CONVENTION: tuple[str, ...] = tuple(each.name for each in fields(AnalysisOptions) if each.name not in NEUTRAL_OPTIONS)


_io = partial(option, group="input and output")


@dataclass(frozen=True, kw_only=True)
class ESDRunOptions:
    """What to analyse, where results go, and how the run behaves."""

    model_list: str | os.PathLike[str] | None = _io(None, help="CSV file with the models to analyse", metavar="CSV")
    single_model: str | os.PathLike[str] | None = _io(
        None, help="analyse one model: a Hugging Face id, a folder or a file", metavar="MODEL"
    )
    base_model: str | os.PathLike[str] | None = _io(
        None,
        help="the base of --single-model when that is an adapter (default: what its own config names)",
        metavar="MODEL",
    )
    output_dir: str | os.PathLike[str] = _io("./esd_results", help="folder for results", metavar="DIR")
    log_dir: str | os.PathLike[str] | None = _io(
        None, help="folder for log files (default: logs in the output folder)", metavar="DIR"
    )
    overwrite: bool = _io(False, help="analyse again what is already done, also with other analysis options")
    limit: int | None = _io(None, help="take only the first N rows of the model list", parse=positive_int, metavar="N")
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
class ExperimentConfig(DispatchOptions, AnalysisOptions, ESDRunOptions):
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
