"""The files of an evaluation: ``evaluations/<name>.json`` with everything, ``<name>.csv`` with a row a measure.

The JSON has the form of the dataclasses of ``result``, field by field; a point of a curve is ``[x, y]``.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpuherd.atomic import atomic_write
from gpuherd.errors import ExitCode, GpuherdError, UsageError, printable
from gpuherd.qa.evaluation.result import FORMAT, ByJudge, Difference, Evaluation, MeasureResult, Point
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.intervals import Figure
from gpuherd.runs import records
from gpuherd.runs.files import raising_cannot_write, write_whole


class BadEvaluation(GpuherdError):
    """An evaluation's file is damaged, or of a newer gpuherd."""

    exit_code = ExitCode.BAD_INPUT


def values_of(evaluation: Evaluation) -> dict[str, Any]:
    """The evaluation as JSON values, ``format`` first."""
    return {"format": FORMAT} | dict(records.plain(evaluation, [Point]))


def evaluation_of(values: Any) -> Evaluation:
    """The evaluation that ``values_of`` made these of. Raises BadEvaluation."""
    if not isinstance(values, dict) or not isinstance(values.get("format"), int):
        raise BadEvaluation("it is no evaluation of gpuherd")
    if values["format"] > FORMAT:
        raise BadEvaluation(
            f"it is of a newer gpuherd (format {values['format']}, known here: {FORMAT}); update gpuherd"
        )
    try:
        evaluation: Evaluation = records.read(Evaluation, values, [Point])
    except (TypeError, ValueError, KeyError, RecursionError) as problem:
        raise BadEvaluation(f"it is no whole evaluation: {type(problem).__name__}: {problem}") from None
    return evaluation


# A spreadsheet takes a cell that begins so for a formula; the last four are wide forms of the first.
_FORMULA_STARTS = tuple("=+-@\t'\uff1d\uff0b\uff0d\uff20")


def write_evaluation(folder: QADirectory, evaluation: Evaluation) -> tuple[Path, Path]:
    """Writes both files, the JSON last. Returns their paths, JSON first.

    The same evaluation made again replaces itself. Raises UsageError where another evaluation has this name, and
    CannotWrite.
    """
    path, table = (folder.evaluation(evaluation.name, suffix) for suffix in (".json", ".csv"))
    if path.is_file() and (there := read_evaluation(path).identity) != evaluation.identity:
        raise UsageError(
            f"there is another evaluation {evaluation.name} ({there[:8]}), of other judgings, scores or settings; "
            "choose another --name"
        )
    write_whole(table, csv_text(evaluation).encode())
    text = json.dumps(values_of(evaluation), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    write_whole(path, text.encode("ascii") + b"\n")
    return path, table


def read_evaluation(path: Path) -> Evaluation:
    """The evaluation in a JSON file. Raises BadEvaluation."""
    try:
        return evaluation_of(json.loads(path.read_bytes()))
    except OSError as problem:
        raise BadEvaluation(f"can't read {path}: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise BadEvaluation(f"{path} is no JSON: {problem}; remove it and evaluate again") from None
    except BadEvaluation as problem:
        raise BadEvaluation(f"{path}: {problem}") from None


def write_csv(path: Path, evaluation: Evaluation) -> None:
    """Writes the table to a file of the user's. Raises CannotWrite."""
    with raising_cannot_write(path):
        atomic_write(path.absolute(), csv_text(evaluation).encode())


def csv_text(evaluation: Evaluation) -> str:
    """The table as CSV: a row a judging and measure, an empty cell for what there is not, numbers to their last bit."""
    rows = [row for judge in evaluation.judges for row in _rows(evaluation, judge)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if rows:
        writer.writerow(rows[0])
    writer.writerows([_cell(value) for value in row.values()] for row in rows)
    return out.getvalue()


def _rows(evaluation: Evaluation, judge: ByJudge) -> list[dict[str, Any]]:
    beside = {each.name: each for each in judge.differences}
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
    return [head | _measure(each) | _difference(beside.get(each.name)) | tail for each in judge.measures]


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


def _difference(each: Difference | None) -> dict[str, Any]:
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
