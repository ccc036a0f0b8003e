"""An evaluation written and read again is the same; anything else is refused with a sentence."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuherd.errors import CannotWrite
from gpuherd.qa.evaluation.result import (
    BadEvaluation,
    EvaluateSettings,
    RunEvaluation,
    csv_text,
    evaluation_of,
    read_evaluation,
    values_of,
    write_csv,
    write_evaluation,
)
from gpuherd.qa.evaluation.stage import AuditedJudging, EvaluationInputs, evaluate
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.grading.label_quality import JudgeVerdicts, LabelWarning, WarningKind
from gpuherd.qa.grading.verdicts import Judgment, Verdict
from gpuherd.qa.measures.evidence import ScoredText


@pytest.fixture(scope="module")
def evaluation() -> RunEvaluation:
    draw = np.random.default_rng(0)
    ids = [f"q{number}" for number in range(40)]
    scores: list[float | None] = [float(each) for each in draw.normal(size=40)]
    columns: dict[str, Sequence[float | None]] = {
        "nll": scores,
        "weighted-nll:uniform": [None, *scores[1:]],
        "=evil": [None] * 40,
    }
    said = [Judgment(each, "greedy", Verdict.CORRECT if at % 3 else Verdict.INCORRECT) for at, each in enumerate(ids)]
    judging = AuditedJudging(
        JudgeVerdicts("exact-1", "exact", said),
        "=cmd()\x1b[31m",
        (LabelWarning(WarningKind.UNPARSED, "some \N{BULLET} text"),),
    )
    answers = [ScoredText((-0.5, -1.5 * at), "x") for at in range(40)]
    settings = EvaluateSettings(bootstrap=100)
    reasons = {"nll": {}, "weighted-nll:uniform": {"empty": 1}, "=evil": {"a": 30, "b": 10}}
    inputs = EvaluationInputs(ids, "greedy", answers, columns, reasons, [judging])
    by = evaluate(inputs, settings, lambda names, title: names)
    return RunEvaluation(
        "name", "run", "scores", "include", "0" * 64, settings, by, {"nll": {"source": "s"}}, {"numpy": "2"}, "1" * 64
    )


def test_what_is_written_is_read_again(evaluation: RunEvaluation, tmp_path: Path) -> None:
    text = json.dumps(values_of(evaluation), allow_nan=False)
    assert evaluation_of(json.loads(text)) == evaluation
    folder = QADirectory(tmp_path / "run")
    path, table = write_evaluation(folder, evaluation)
    assert read_evaluation(path) == evaluation
    assert table.read_text() == csv_text(evaluation)


def test_reasons_that_are_not_known_apart_stand_together(evaluation: RunEvaluation) -> None:
    nll, uniform, evil = evaluation.judges[0].measures
    assert nll.undefined == {} and uniform.undefined == {"empty": 1} and evil.undefined == {"a; or b": 40}
    assert evil.auroc.note == "no answer has a label and a score"
    assert uniform.weighting == "uniform" and nll.weighting is None
    assert evaluation.judges[0].weightings == (uniform,)


def test_no_cell_is_a_formula_or_drives_a_terminal(evaluation: RunEvaluation) -> None:
    text = csv_text(evaluation)
    assert "'=cmd()\\x1b[31m" in text and "'=evil" in text
    assert "\x1b" not in text and ",=" not in text


def _without(values: dict[str, Any]) -> None:
    del values["judges"][0]["counts"]


def _text_for_number(values: dict[str, Any]) -> None:
    values["judges"][0]["measures"][0]["auroc"]["value"] = "0.5"


def _truth_for_number(values: dict[str, Any]) -> None:
    values["judges"][0]["right"] = True


def _unknown_kind(values: dict[str, Any]) -> None:
    values["judges"][0]["warnings"][0]["kind"] = "bad weather"


def _no_list(values: dict[str, Any]) -> None:
    values["judges"] = {"0": 1}


def _half_a_point(values: dict[str, Any]) -> None:
    values["judges"][0]["measures"][0]["roc"][0] = [0.5]


def _half_a_histogram(values: dict[str, Any]) -> None:
    del values["judges"][0]["measures"][0]["histogram"]["edges"][-1]


def _no_figure(values: dict[str, Any]) -> None:
    values["judges"][0]["measures"][0]["auroc"]["value"] = float("nan")


@pytest.mark.parametrize(
    "damage",
    [
        _no_figure,
        _without,
        _text_for_number,
        _truth_for_number,
        _unknown_kind,
        _no_list,
        _half_a_point,
        _half_a_histogram,
    ],
)
def test_damage_is_refused(evaluation: RunEvaluation, damage: Any) -> None:
    values = copy.deepcopy(json.loads(json.dumps(values_of(evaluation))))
    damage(values)
    with pytest.raises(BadEvaluation, match="no whole evaluation"):
        evaluation_of(values)


@pytest.mark.parametrize("values", [None, [], {}, {"format": "1"}, {"format": None}])
def test_what_is_no_evaluation_is_refused(values: Any) -> None:
    with pytest.raises(BadEvaluation, match="no evaluation"):
        evaluation_of(values)


def test_a_newer_format_is_told(evaluation: RunEvaluation) -> None:
    with pytest.raises(BadEvaluation, match="newer gpuherd"):
        evaluation_of(values_of(evaluation) | {"format": 2})


def test_files_that_are_none(tmp_path: Path, evaluation: RunEvaluation) -> None:
    with pytest.raises(BadEvaluation, match="can't read"):
        read_evaluation(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"format": 1, "na')
    with pytest.raises(BadEvaluation, match="no JSON"):
        read_evaluation(tmp_path / "half.json")
    with pytest.raises(CannotWrite):
        write_csv(tmp_path / "nowhere" / "table.csv", evaluation)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "evaluations").write_text("in the way")
    with pytest.raises(CannotWrite):
        write_evaluation(QADirectory(tmp_path / "run"), evaluation)


def test_an_evaluation_of_a_version_before_is_read(evaluation: RunEvaluation) -> None:
    """Which knew no NaN verdict and corrected no intervals."""
    values = json.loads(json.dumps(values_of(evaluation)))
    for judge in values["judges"]:
        del judge["counts"]["nan"]
        for difference in judge["differences"]:
            del difference["among_all"], difference["among_measures"]
    found = evaluation_of(values)
    assert found.judges[0].counts == evaluation.judges[0].counts and found.judges[0].measures
    assert all(each.among_all is None and each.among_measures is None for each in found.judges[0].differences)
