"""Results on disk: ``result.json``, and beside it what each completion earned (``scores*.json``)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuherd.atomic import atomic_write
from gpuherd.errors import CannotWrite, ExitCode, GpuherdError
from gpuherd.posttrain.eval.result import FORMAT, RESULT, Evaluation
from gpuherd.posttrain.eval.scores import Scores
from gpuherd.runs import records

MOST_ROUNDS = 100_000


class BadResult(GpuherdError):
    """A result's file is damaged, or of a newer gpuherd."""

    exit_code = ExitCode.BAD_INPUT


def write_result(folder: Path, evaluation: Evaluation) -> Path:
    """Writes ``folder/result.json`` as a whole. Returns its path. Raises CannotWrite."""
    return _write(folder / RESULT, {"format": FORMAT, **without_infinity(records.jsonable(evaluation))}, indent=1)


def read_result(path: Path) -> Evaluation:
    """The result of a file, or of the folder that holds it. Raises BadResult."""
    path = path / RESULT if path.is_dir() else path
    evaluation: Evaluation = _read(path, Evaluation)
    names = [name for each in evaluation.points for name in (each.answers, each.scores)]
    if not names or any(Path(name).name != name for name in names):
        raise BadResult(f"{path} has no point, or one whose files lie elsewhere")
    if evaluation.about.round is not None and not 0 <= evaluation.about.round <= MOST_ROUNDS:
        raise BadResult(f"{path} is of round {evaluation.about.round}, which can't be")
    return evaluation


def write_scores(path: Path, scores: Scores) -> None:
    """Writes what each completion earned, as a whole. Raises CannotWrite."""
    _write(path, {"format": FORMAT, **records.jsonable(scores)}, indent=None)


def read_scores(path: Path) -> Scores:
    """What ``write_scores`` wrote. Raises BadResult."""
    scores: Scores = _read(path, Scores)
    return scores


def _write(path: Path, values: Mapping[str, Any], indent: int | None) -> Path:
    text = json.dumps(values, indent=indent, allow_nan=False, separators=None if indent else (",", ":"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, f"{text}\n".encode())
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}") from None
    return path


def _read(path: Path, kind: type) -> Any:
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict) or not isinstance(values.get("format"), int):
            raise BadResult(f"{path} is no result of gpuherd posttrain")
        if values["format"] > FORMAT:
            raise BadResult(f"{path} is of a newer gpuherd (format {values['format']}, known here: {FORMAT})")
        return records.read(kind, values)
    except OSError as problem:
        raise BadResult(f"can't read {path}: {problem.strerror}") from None
    except (TypeError, ValueError, KeyError, RecursionError) as problem:
        raise BadResult(f"{path} is not whole: {type(problem).__name__}: {problem}") from None


def without_infinity(value: Any) -> Any:
    """JSON has no infinity, and an eta may be infinite: it is written as a string."""
    if isinstance(value, dict):
        return {key: without_infinity(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_infinity(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
