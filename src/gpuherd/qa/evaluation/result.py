"""The result of an evaluation: figures of every measure under every judging, each with its interval. Frozen data.

Made by ``measuring``, shown by the command and by the page; and its files. A figure that can't be had is None
and says why; it is never 0, 0.5 or NaN. Answers that are wrong are the positives: a good measure of uncertainty is high
there, so that an AUROC above 0.5 is better than chance.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gpuherd.atomic import atomic_write
from gpuherd.errors import ExitCode, GpuherdError, UsageError, printable
from gpuherd.qa.folder import QADirectory, parsed, read_parsed
from gpuherd.qa.grading.label_quality import LabelWarning, VerdictCounts
from gpuherd.qa.intervals import FEWEST_OF_A_CLASS, Figure, Interval
from gpuherd.runs import records
from gpuherd.runs.files import raising_cannot_write, write_file

FORMAT = 1  # of an evaluation's JSON file
AGAINST = "nll"  # what measures are compared with where nothing is said
WEIGHTING = "weighted-nll:"  # how the names of the token weightings begin


@dataclass(frozen=True, slots=True)
class AtCoverage:
    """The accuracy among the ``coverage`` (0 to 1) least uncertain answers."""

    coverage: float
    accuracy: Figure


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Of a curve: on a ROC x is the share of right answers flagged, y that of wrong ones; on a rejection curve x is the
    share of answers that are kept, y the accuracy among them."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Scores by class: ``right[i]`` and ``wrong[i]`` answers score from ``edges[i]`` to ``edges[i + 1]``, the last edge
    within. Raises ValueError where there are not as many bins of both."""

    edges: tuple[float, ...]
    right: tuple[int, ...]
    wrong: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.edges) - 1 == len(self.right) == len(self.wrong):
            raise ValueError("a histogram has one edge more than bins")


@dataclass(frozen=True, slots=True)
class MeasureResult:
    """How well one measure tells wrong answers from right ones.

    Attributes:
        name: the measure's exact name.
        right, wrong: answers with a label and a score.
        undefined: answers with a label and no score, by reason.
        auroc: P(wrong scores higher) + 1/2 P(equal).
        auroc_closed_form: the score interval from the counts alone (Hanley & McNeil's variance).
        auprc: average precision at finding wrong answers; ``base_rate`` is what chance gives.
        base_rate: share of wrong ones among ``right + wrong``.
        prr: prediction rejection ratio; 0 is chance, 1 the best order.
        prr_half: the same over rejections of up to a half.
        aurac: mean accuracy over all rejections.
        ece: expected calibration error after cross-validated calibration.
        at: accuracy at the coverages of the options.
        roc: from (0, 0) to (1, 1), thinned for drawing; figures are not made from it.
        rejection: from few kept to all kept, thinned.
        histogram: None where no score is defined.
    """

    name: str
    right: int
    wrong: int
    undefined: Mapping[str, int]
    auroc: Figure
    auroc_closed_form: Interval | None
    auprc: Figure
    base_rate: float | None
    prr: Figure
    prr_half: Figure
    aurac: Figure
    ece: Figure
    at: tuple[AtCoverage, ...] = ()
    roc: tuple[CurvePoint, ...] = ()
    rejection: tuple[CurvePoint, ...] = ()
    histogram: Histogram | None = None

    @property
    def scored(self) -> int:
        """Answers that the figures are of."""
        return self.right + self.wrong

    @property
    def conclusive(self) -> bool:
        """Whether there are enough of both classes to conclude anything."""
        return min(self.right, self.wrong) >= FEWEST_OF_A_CLASS

    @property
    def weighting(self) -> str | None:
        """The scheme, where this is the NLL under a weighting of tokens."""
        return weighting_of(self.name)


def weighting_of(name: str) -> str | None:
    """The scheme, where a measure is the NLL under a weighting of tokens."""
    return name.removeprefix(WEIGHTING) if name.startswith(WEIGHTING) else None


@dataclass(frozen=True, slots=True)
class HolmCorrected:
    """A difference among some that are looked at together: its p and its interval, both by DeLong's variance, and both
    corrected for their number by Holm's steps, so that the interval leaves out 0 exactly where p is small enough."""

    p: float
    interval: Interval


@dataclass(frozen=True, slots=True)
class AurocDifference:
    """The AUROC of a measure minus that of another, on the answers that both score.

    Attributes:
        name: the measure; ``Settings.against`` names the other.
        answers: how many.
        auroc: the difference with its paired bootstrap interval; with few of a class one by DeLong's variance.
        p: two-sided, DeLong's test of equal areas by Student's t; None where the difference has no variance to test it
            by: the same order, or a class of one answer.
        p_holm: the same corrected for the number of measures compared (Holm 1979).
        among_all: corrected for all measures compared; None where there is no p.
        among_measures: corrected for those alone that are no weightings of tokens; None for weightings.
    """

    name: str
    answers: int
    auroc: Figure
    p: float | None
    p_holm: float | None
    among_all: HolmCorrected | None = None
    among_measures: HolmCorrected | None = None


@dataclass(frozen=True, slots=True)
class PrefixAuroc:
    """AUROC of the NLL of the first ``length`` tokens, and of its mean; shorter answers count as they are.

    ``shorter``: how many are.
    """

    length: int
    answers: int
    shorter: int
    nll: Figure
    mean_nll: Figure


@dataclass(frozen=True, slots=True)
class AtPosition:
    """Mean NLL of the token at a position (from 0), of right and of wrong answers that are as long as that.

    Counts are of answers; an interval (of the mean, Student's t) needs two.
    """

    position: int
    right_answers: int
    wrong_answers: int
    right: Figure
    wrong: Figure


@dataclass(frozen=True, slots=True)
class ByJudge:
    """The evaluation under one judging.

    Attributes:
        judging: its name; its file says all else.
        judge: as the user named it.
        which: the answer that was judged and scored: ``greedy`` or ``sample-0``.
        counts: these answers by verdict.
        right, wrong: by the rule for what was not attempted; ``left_out`` the others.
        warnings: what makes these labels doubtful.
        measures: in the order of the scoring.
        differences: of every other measure to ``Settings.against``; empty where that has no scores.
        prefixes, positions: empty where answers have no log-probs.
    """

    judging: str
    judge: str
    which: str
    counts: VerdictCounts
    right: int
    wrong: int
    left_out: int
    warnings: tuple[LabelWarning, ...]
    measures: tuple[MeasureResult, ...]
    differences: tuple[AurocDifference, ...] = ()
    prefixes: tuple[PrefixAuroc, ...] = ()
    positions: tuple[AtPosition, ...] = ()

    @property
    def both_classes(self) -> bool:
        """Whether there are right and wrong answers, without which no measure can be evaluated."""
        return self.right > 0 and self.wrong > 0

    @property
    def weightings(self) -> tuple[MeasureResult, ...]:
        """The measures that are token weightings."""
        return tuple(each for each in self.measures if each.weighting is not None)


@dataclass(frozen=True, slots=True)
class EvaluateSettings:
    """The settings on which the figures depend, besides labels and scores.

    Attributes:
        not_attempted: ``exclude`` or ``incorrect``.
        confidence: of every interval.
        bootstrap: resamples of the questions.
        interval: ``bca`` or ``percentile``.
        seed: of the resamples and of the folds of the calibration.
        against: the measure that others are compared with.
        calibration: ``isotonic`` or ``platt``.
        coverages, prefixes: those of the options.
    """

    not_attempted: str = "exclude"
    confidence: float = 0.95
    bootstrap: int = 1000
    interval: str = "bca"
    seed: int = 0
    against: str = AGAINST
    calibration: str = "isotonic"
    coverages: tuple[float, ...] = (0.5, 0.8, 0.9)
    prefixes: tuple[int, ...] = (1, 3, 5, 10)


@dataclass(frozen=True, slots=True)
class RunEvaluation:
    """Everything: what is written to ``evaluations/<name>.json`` and shown.

    Attributes:
        name: of this evaluation: a hash of all that it depends on, or what the user called it.
        run_id: the run.
        scoring: the name of the scoring.
        eos: its rule for the end token, ``include`` or ``exclude``.
        answers_sha256: of the run's answers.
        settings: see there.
        judges: one each judging.
        measured: of each measure what its registration says: ``source`` of the formula and ``summary``.
        versions: of gpuherd, Python and the libraries that calculated.
        identity: a digest of all that the figures depend on, in hex.
    """

    name: str
    run_id: str
    scoring: str
    eos: str
    answers_sha256: str
    settings: EvaluateSettings
    judges: tuple[ByJudge, ...]
    measured: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    identity: str = ""


# The files of an evaluation: ``evaluations/<name>.json`` with everything, ``<name>.csv`` with a row a measure.
#
# The JSON has the form of these dataclasses, field by field; a point of a curve is ``[x, y]``.


class BadEvaluation(GpuherdError):
    """An evaluation's file is damaged, or of a newer gpuherd."""

    exit_code = ExitCode.BAD_INPUT


def values_of(evaluation: RunEvaluation) -> dict[str, Any]:
    """The evaluation as JSON values, ``format`` first."""
    return {"format": FORMAT} | dict(records.jsonable(evaluation, [CurvePoint]))


def evaluation_of(values: Any) -> RunEvaluation:
    """The evaluation that ``values_of`` made these of. Raises BadEvaluation."""
    decode = partial(records.read, RunEvaluation, as_lists=[CurvePoint])
    found: RunEvaluation = parsed(values, "evaluation", BadEvaluation, decode, FORMAT)
    return found


# A spreadsheet takes a cell that begins so for a formula; the last four are wide forms of the first.
_FORMULA_STARTS = tuple("=+-@\t'\uff1d\uff0b\uff0d\uff20")


def write_evaluation(folder: QADirectory, evaluation: RunEvaluation) -> tuple[Path, Path]:
    """Writes both files, the JSON last. Returns their paths, JSON first.

    The same evaluation made again replaces itself. Raises UsageError where another evaluation has this name, and
    CannotWrite.
    """
    refuse_other_evaluation(folder, evaluation.name, evaluation.identity)
    path, table = (folder.evaluation(evaluation.name, suffix) for suffix in (".json", ".csv"))
    write_file(table, csv_text(evaluation).encode())
    text = json.dumps(values_of(evaluation), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    write_file(path, text.encode("ascii") + b"\n")
    return path, table


def refuse_other_evaluation(folder: QADirectory, name: str, identity: str) -> None:
    """Raises UsageError where another evaluation has this name, BadEvaluation where that can't be found out."""
    path = folder.evaluation(name, ".json")
    if path.is_file() and (there := read_evaluation(path).identity) != identity:
        raise UsageError(
            f"there is another evaluation {name} ({there[:8]}), of other judgings, scores or settings; "
            "choose another --name"
        )


def read_evaluation(path: Path) -> RunEvaluation:
    """The evaluation in a JSON file. Raises BadEvaluation."""
    return read_parsed(path, BadEvaluation, "remove it and evaluate again", evaluation_of)


def write_csv(path: Path, evaluation: RunEvaluation) -> None:
    """Writes the table to a file of the user's. Raises CannotWrite."""
    with raising_cannot_write(path):
        atomic_write(path.absolute(), csv_text(evaluation).encode())


def csv_text(evaluation: RunEvaluation) -> str:
    """The table as CSV: a row a judging and measure, an empty cell for what there is not, numbers to their last bit."""
    rows = [row for judge in evaluation.judges for row in _rows(evaluation, judge)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if rows:
        writer.writerow(rows[0])
    writer.writerows([_cell(value) for value in row.values()] for row in rows)
    return out.getvalue()


def _rows(evaluation: RunEvaluation, judge: ByJudge) -> list[dict[str, Any]]:
    differences = {each.name: each for each in judge.differences}
    head = {
        "run_id": evaluation.run_id,
        "evaluation": evaluation.name,
        "scoring": evaluation.scoring,
        "eos": evaluation.eos,
        "judging": judge.judging,
        "judge": judge.judge,
        "which": judge.which,
    }
    settings = asdict(evaluation.settings)
    tail = {
        name: settings[name]
        for name in ("against", "not_attempted", "confidence", "bootstrap", "interval", "seed", "calibration")
    }
    return [head | _measure(each) | _difference(differences.get(each.name)) | tail for each in judge.measures]


def _measure(each: MeasureResult) -> dict[str, Any]:
    closed = each.auroc_closed_form
    row: dict[str, Any] = {
        "measure": each.name,
        "right": each.right,
        "wrong": each.wrong,
        "undefined": sum(each.undefined.values()),
        "conclusive": int(each.conclusive),
        **_figure("auroc", each.auroc),
        "auroc_note": each.auroc.note,
        "auroc_closed_form_low": None if closed is None else closed.low,
        "auroc_closed_form_high": None if closed is None else closed.high,
        "dropped_resamples": each.auroc.dropped,
        **_figure("auprc", each.auprc),
        "base_rate": each.base_rate,
    }
    for name in ("prr", "prr_half", "aurac", "ece"):
        row |= _figure(name, getattr(each, name))
    for at in each.at:
        row |= _figure(f"accuracy_at_{at.coverage!r}", at.accuracy)
    return row


def _difference(each: AurocDifference | None) -> dict[str, Any]:
    nothing = Figure(None)
    return {
        **_figure("auroc_difference", nothing if each is None else each.auroc),
        "p": None if each is None else each.p,
        "p_holm": None if each is None else each.p_holm,
        "common": None if each is None else each.answers,
    }


def _figure(name: str, figure: Figure) -> Mapping[str, Any]:
    interval = figure.interval
    return {
        name: figure.value,
        f"{name}_low": None if interval is None else interval.low,
        f"{name}_high": None if interval is None else interval.high,
    }


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(value)
    text = printable(str(value))
    return f"'{text}" if isinstance(value, str) and text.startswith(_FORMULA_STARTS) else text
