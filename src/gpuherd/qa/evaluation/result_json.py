"""An evaluation as JSON values, and back: equal results give equal text, and what is read is equal to what was written.

The form is that of the dataclasses of ``result``, field by field; a point of a curve is ``[x, y]``.
"""

from __future__ import annotations

from typing import Any

from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.qa import typed_json
from gpuherd.qa.evaluation.result import FORMAT, Evaluation, Point


class BadEvaluation(GpuherdError):
    """An evaluation's file is damaged, or of a newer gpuherd."""

    exit_code = ExitCode.BAD_INPUT


def values_of(evaluation: Evaluation) -> dict[str, Any]:
    """The evaluation as JSON values, ``format`` first."""
    return {"format": FORMAT} | dict(typed_json.plain(evaluation, [Point]))


def evaluation_of(values: Any) -> Evaluation:
    """The evaluation that ``values_of`` made these of. Raises BadEvaluation."""
    if not isinstance(values, dict) or not isinstance(values.get("format"), int):
        raise BadEvaluation("it is no evaluation of gpuherd")
    if values["format"] > FORMAT:
        raise BadEvaluation(
            f"it is of a newer gpuherd (format {values['format']}, known here: {FORMAT}); update gpuherd"
        )
    try:
        evaluation: Evaluation = typed_json.read(Evaluation, values, [Point])
    except (TypeError, ValueError, KeyError, RecursionError) as problem:
        raise BadEvaluation(f"it is no whole evaluation: {type(problem).__name__}: {problem}") from None
    return evaluation
