"""The options of an evaluation. Light: declarations and checks, no numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar, get_args

from gpuherd.errors import UsageError
from gpuherd.options import option
from gpuherd.qa.evaluation.result import AGAINST, EvaluateSettings
from gpuherd.qa.folder import RunsOptions
from gpuherd.units import count, positive_int

T = TypeVar("T")

NotAttempted = Literal["exclude", "incorrect"]
IntervalWord = Literal["bca", "percentile"]
Calibration = Literal["isotonic", "platt"]
MOST_RESAMPLES = 100_000  # beyond, an interval's ends move by less than any digit that is shown
FEWEST_RESAMPLES = 100  # below, the ends of a 95 % interval are those of two or three resamples


def listed(parse: Callable[[str], object]) -> Callable[[str], str]:
    """A parser of values with commas between them, that each pass ``parse``; they stay a text."""

    def checked(words: str) -> str:
        for word in words.split(","):
            parse(word.strip())
        return words

    return checked


def values(words: str, parse: Callable[[str], T]) -> tuple[T, ...]:
    """The values of such a text in order, none twice. Raises ValueError."""
    return tuple(dict.fromkeys(parse(word.strip()) for word in words.split(",")))


def open_share(word: str) -> float:
    """A number above 0 and below 1."""
    value = float(word)
    if not 0 < value < 1:
        raise ValueError(f"{word!r} is not between 0 and 1")
    return value


def coverage(word: str) -> float:
    """A number above 0 and at most 1."""
    value = float(word)
    if not 0 < value <= 1:
        raise ValueError(f"{word!r} is no share of the answers: above 0, at most 1")
    return value


def resample_count(word: str) -> int:
    """A whole number of resamples, enough for an interval."""
    number = positive_int(word)
    if number < FEWEST_RESAMPLES:
        raise ValueError(f"an interval needs {FEWEST_RESAMPLES} resamples or more, not {number}")
    if number > MOST_RESAMPLES:
        raise ValueError(f"{number} resamples would take days; {MOST_RESAMPLES} are more than enough")
    return number


# An option of a group.
_evaluated = partial(option, group="what")
_figures = partial(option, group="figures")
_output = partial(option, group="output")


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(RunsOptions):
    """An evaluation of one run."""

    judge: tuple[str, ...] = _evaluated(
        (),
        help="judgings to evaluate under: a name, the beginning of one, or the judge (default: the only one there is)",
        many=True,
        metavar="J",
    )
    scores: str | None = _evaluated(None, help="the scoring (default: the latest)", metavar="NAME")
    measures: tuple[str, ...] = _evaluated(
        (),
        help="measures by name, or by the beginning of several names (default: all of the scoring)",
        many=True,
        metavar="M",
    )
    not_attempted: NotAttempted = _evaluated(
        "exclude", help="answers that were not attempted: left out, or counted as wrong", choices=get_args(NotAttempted)
    )
    against: str = _evaluated(AGAINST, help="the measure that all others are compared with", metavar="M")
    bootstrap: int = _figures(
        1000, help="resamples of the questions for each interval", parse=resample_count, metavar="N"
    )
    confidence: float = _figures(0.95, help="of every interval, between 0 and 1", parse=open_share, metavar="P")
    interval: IntervalWord = _figures(
        "bca",
        help="how intervals are taken from the resamples: bias-corrected and accelerated, or plain quantiles",
        choices=get_args(IntervalWord),
    )
    seed: int = _figures(0, help="of resamples and folds", parse=count, metavar="N")
    calibration: Calibration = _figures(
        "isotonic",
        help="what makes probabilities of scores, fitted on other answers, for the calibration error",
        choices=get_args(Calibration),
    )
    coverages: str = _figures(
        "0.5,0.8,0.9",
        help="shares of the answers, the least uncertain ones, whose accuracy is reported; with commas",
        parse=listed(coverage),
        metavar="P,P,…",
    )
    prefixes: str = _figures(
        "1,3,5,10",
        help="AUROC of the NLL of so many first tokens; with commas",
        parse=listed(positive_int),
        metavar="N,N,…",
    )
    name: str | None = _output(
        None, help="name of the evaluation's files (default: 8 hex digits of all it depends on)", metavar="NAME"
    )
    csv: Path | None = _output(None, help="write the table here too", parse=Path, metavar="FILE")
    plot: Path | None = _output(
        None,
        help="draw ROC and rejection curves and all AUROCs with intervals into this file: *.png, *.svg or *.pdf",
        parse=Path,
        metavar="FILE",
    )
    page: bool = _output(False, help="insist on the page: an error where it can't be made")
    no_page: bool = _output(False, help="write no page")

    def __post_init__(self) -> None:
        if self.page and self.no_page:
            raise UsageError("--page and --no-page contradict each other")
        if self.bootstrap < FEWEST_RESAMPLES or not 0 < self.confidence < 1:
            raise UsageError(f"bootstrap is {FEWEST_RESAMPLES} or more, confidence between 0 and 1")

    @property
    def settings(self) -> EvaluateSettings:
        """The options on which the figures depend."""
        given = {each.name: getattr(self, each.name) for each in fields(EvaluateSettings)}
        coverages, prefixes = values(self.coverages, coverage), values(self.prefixes, positive_int)
        return EvaluateSettings(**(given | {"coverages": coverages, "prefixes": prefixes}))
