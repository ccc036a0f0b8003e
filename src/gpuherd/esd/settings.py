"""How a spectrum is computed and fitted: the options of one matrix, and so of all rows of a result.

A light module: flags, workers and Python callers read it, no numpy is imported. Each field says what its values mean;
docs/esd-numerics.md has the definitions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from gpuherd.errors import UsageError
from gpuherd.esd.tails.registry import tails
from gpuherd.options import option
from gpuherd.units import count, positive_int

Method = Literal["xmin_mid", "xmin_peak", "xmin_peak_wide", "DKS"]
METHODS: tuple[Method, ...] = get_args(Method)
KS = Literal["one-sided", "two-sided"]
KS_KINDS: tuple[KS, ...] = get_args(KS)
Precision = Literal["float64", "float32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# A histogram of so many bins has one for any two eigenvalues that a plot could tell apart.
MOST_BINS = 1_000_000


def nonnegative(word: str) -> float:
    """A finite number, 0 or more."""
    try:
        value = float(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a number") from None
    if not 0 <= value < math.inf:
        raise ValueError(f"{word!r} is not a finite number of 0 or more")
    return value


def of_one_type(options: Any, config_type: type) -> None:
    """Gives each number and each yes or no of ``options`` the type of its default: 2, 2.0 and NumPy's 2.0 are one and
    the same option, which is told and compared as text. Raises UsageError for a value of another kind.

    Args:
        options: a frozen dataclass that is being made.
        config_type: the dataclass that declares the options.
    """
    for declared in fields(config_type):
        convert = _CONVERSIONS.get(type(declared.default))
        if convert is None:
            continue
        value = getattr(options, declared.name)
        try:
            object.__setattr__(options, declared.name, convert(value))
        except (TypeError, ValueError, OverflowError):
            kind = type(declared.default).__name__
            raise UsageError(f"{declared.name}={value!r} is no {kind}, as {declared.default!r} is") from None


def _yes_or_no(value: Any) -> bool:
    if value not in (True, False):
        raise ValueError
    return bool(value)


def _whole(value: Any) -> int:
    return int(operator.index(value))


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError
    return float(value) + 0.0  # of -0.0 too


_CONVERSIONS: dict[type, Callable[[Any], Any]] = {bool: _yes_or_no, int: _whole, float: _number}


@dataclass(frozen=True)
class _PowerLawSettings:
    fix_fingers: Method = option(
        "xmin_mid",
        help="how the start of the power-law tail is chosen: at the median, near the peak of the histogram (in its "
        "documented window, or in the wide one of the older codes), or by search over all eigenvalues",
        choices=METHODS,
        group="analysis",
    )
    evals_thresh: float = option(
        1e-5, help="eigenvalues up to this are left out of the fit", parse=nonnegative, metavar="X", group="analysis"
    )
    bins: int = option(
        100,
        help="bins of the histogram in which xmin_peak finds the peak",
        parse=positive_int,
        metavar="N",
        group="analysis",
    )
    ks: KS = option(
        "one-sided",
        help="the Kolmogorov-Smirnov distance: by the left limits of the empirical distribution, as WeightWatcher and "
        "TempBalance compute it, or by both limits, as in textbooks",
        choices=KS_KINDS,
        group="analysis",
    )
    xmin_pos: float = option(
        2.0,
        help="xmin_mid starts the tail at eigenvalue n / X in ascending order: 2 is the median",
        parse=float,
        metavar="X",
        group="analysis",
    )
    delta: float = option(
        1e-3,
        help="alpha_lo and alpha_hi span every tail whose distance is within X of the best",
        parse=nonnegative,
        metavar="X",
        group="analysis",
    )
    clip_xmax: bool = option(
        False, help="leave out the largest eigenvalues where they inflate alpha (fingers)", group="analysis"
    )
    bootstrap: int = option(
        0,
        help="samples for a p-value of the power law by parametric bootstrap (0: none; 2500 give two digits)",
        parse=count,
        metavar="N",
        group="analysis",
    )


if TYPE_CHECKING:
    # At run time every tail distribution that is found has its option. Type checkers know this one.
    @dataclass(frozen=True)
    class _WithTails(_PowerLawSettings):
        tpl: bool = False

else:
    _WithTails = make_dataclass(
        "_WithTails",
        [(tail.name, bool, option(False, help=tail.help, group="analysis")) for tail in tails()],
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

    mp_fit: bool = option(False, help="fit the Marchenko-Pastur law to the bulk too", group="analysis")
    randomize: bool = option(
        False, help="compare with the spectrum of the same weights in random order", group="analysis"
    )
    farms: bool = option(
        False, help="fit the pooled spectrum of windows of fixed aspect ratio too (FARMS)", group="analysis"
    )
    seed: int = option(0, help="of the bootstrap and the random order", parse=count, metavar="N", group="analysis")
    precision: Precision = option(
        "float64",
        help="arithmetic of the eigenvalues: float32 halves the time of matrices that are longer than wide, and can "
        "move a searched alpha by 0.1",
        choices=PRECISIONS,
        group="analysis",
    )

    def __post_init__(self) -> None:
        of_one_type(self, FitSettings)
        for name, allowed in (("fix_fingers", METHODS), ("ks", KS_KINDS), ("precision", PRECISIONS)):
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name}={getattr(self, name)!r} is unknown; possible: {', '.join(allowed)}")
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
