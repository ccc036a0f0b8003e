"""The picture of an evaluation: its own numbers, the same bytes each time, and what can't be drawn is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.lines import Line2D
from tests.qa.evaluation.evaluable import judge, make_run, right_ones, score
from tests.qa.report.made_runs import made_evaluation, made_run

from gpuherd.cli.main import run as command
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.qa.evaluation.result import RunEvaluation
from gpuherd.qa.grading.verdicts import Verdict
from gpuherd.qa.report.plot import MOST_CURVES, curves_of, evaluation_figure
from gpuherd.report.charts import picture_bytes


@pytest.fixture(scope="module")
def evaluation() -> RunEvaluation:
    found = made_run(120, samples=0, weightings=3).evaluation
    assert found is not None
    return found


def points(line: Line2D) -> list[tuple[float, float]]:
    """The points that a line goes through."""
    x, y = (np.asarray(each).tolist() for each in line.get_data())
    return list(zip(x, y, strict=True))


def test_curves_and_aurocs_are_the_evaluations(evaluation: RunEvaluation) -> None:
    figure = evaluation_figure(evaluation)
    assert len(figure.axes) == 6  # two judgings
    roc, rejection, bars = figure.axes[:3]
    chosen = curves_of(evaluation.judges[0], "nll")
    drawn = [points(line) for line in roc.get_lines()][1:]
    assert drawn == [[(p.x, p.y) for p in each.roc] for each in chosen]
    kept = [points(line) for line in rejection.get_lines()][: len(chosen)]
    assert kept == [[(p.x, p.y) for p in each.rejection] for each in chosen]
    measures = [each for each in evaluation.judges[0].measures if each.weighting is None]
    ranked = sorted((each.auroc.value or 0.0 for each in measures), reverse=True)
    dots = [points(line)[0][0] for line in bars.get_lines() if line.get_marker() == "o"]
    assert dots == ranked


def test_too_few_of_a_class_is_said_in_the_picture(evaluation: RunEvaluation) -> None:
    first, second = evaluation.judges
    few = tuple(replace(each, wrong=8) for each in second.measures)
    figure = evaluation_figure(replace(evaluation, judges=(first, replace(second, measures=few, wrong=8))))
    titles = [axes.get_title(loc="left") for axes in figure.axes[::3]]
    assert "conclude" not in titles[0]
    assert titles[1].endswith("8 wrong; too few of one class to conclude anything")


def test_the_reference_is_drawn_and_weightings_are_not(evaluation: RunEvaluation) -> None:
    judge = evaluation.judges[0]
    chosen = curves_of(judge, "p-true")
    assert chosen[-1].name == "p-true"
    assert len(chosen) <= MOST_CURVES
    assert all(each.weighting is None for each in chosen)
    alone = replace(judge, measures=judge.weightings)
    assert len(curves_of(alone, "nll")) == 3
    alike = replace(judge, measures=tuple(replace(judge.measures[0], name=f"m{at}") for at in range(9)))
    assert [each.name for each in curves_of(alike, "m4")] == ["m4"]
    several = [replace(judge.measures[0], name=f"m{at}", roc=judge.measures[0].roc[at:]) for at in range(9)]
    assert len(curves_of(replace(judge, measures=tuple(several)), "m4")) == MOST_CURVES


@pytest.mark.parametrize(
    "file_format", ["svg", pytest.param("png", marks=pytest.mark.slow), pytest.param("pdf", marks=pytest.mark.slow)]
)
def test_the_same_evaluation_gives_the_same_bytes(evaluation: RunEvaluation, file_format: str) -> None:
    one = replace(evaluation, judges=evaluation.judges[:1], run_id="$x_1$<b>")
    first, second = (picture_bytes(evaluation_figure(one), file_format) for _ in range(2))
    assert first == second
    if file_format == "svg":
        assert b"$x_1$&lt;b&gt;" in first


def test_one_class_can_not_be_drawn() -> None:
    run = made_run(20, samples=0, weightings=0)
    evaluation = made_evaluation(run.scores, [Verdict.CORRECT] * 20, run.judgings)
    with pytest.raises(UsageError, match="nothing to plot"):
        evaluation_figure(evaluation)


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path, right_ones(40, 15))
    judge(folder, right_ones(40, 15))
    score(folder)
    words = ["evaluate", str(folder.root), "--bootstrap", "100", "--no-page"]
    assert command([*words, "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "a.png") in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"\.png, \.svg, \.pdf"):
        command([*words, "--plot", "a.gif"])
    with pytest.raises(CannotWrite, match="--plot"):
        command([*words, "--plot", str(tmp_path / "no" / "a.svg")])
