"""The page's bytes: what is in it, what can't get out, and how large it grows; figures; and the command."""

from __future__ import annotations

import base64
import json
import random
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain.report.made_runs import made_curves, made_run, made_training, made_wide_run

from gpuherd.cli.main import run as command
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.posttrain.eval.answers import AnsweredProblem, Completion
from gpuherd.posttrain.report.page import LEVELS, chunks_of, make_page
from gpuherd.posttrain.report.plot import run_figure
from gpuherd.posttrain.report.reading import RunReport, read_run
from gpuherd.posttrain.report.views import views_of
from gpuherd.qa.intervals import Figure, Interval
from gpuherd.report.charts import picture_bytes

HOSTILE = "a</script><script>window.hit=1</script><img src=x onerror='window.hit=1'>"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("look") / "run", name=HOSTILE, texts=lambda *_: HOSTILE)


@pytest.fixture(scope="module")
def shown(root: Path) -> RunReport:
    return read_run(root)


def unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)).decode("utf-8"))


def tables_of(node: Any, label: str) -> list[list[Any]]:
    """The rows of each table of this label among some nodes."""
    if not isinstance(node, list | tuple):
        return []
    if len(node) == 2 and node[0] == "table" and node[1].get("label") == label:
        return [node[1]["rows"]]
    return [rows for each in node for rows in tables_of(each, label)]


def summary_of(shown: RunReport) -> Any:
    """The nodes of the summary."""
    return next(view.nodes for view in views_of(shown) if view.name == "summary")


def blobs(html: bytes) -> dict[str, Any]:
    found = re.findall(r'<script type="text/plain" id="([\w-]+)">([^<]*)</script>', html.decode())
    return {name: unpacked(text) for name, text in found if name != "vega"}


def test_the_page_holds_the_run_and_no_stranger_gets_out(shown: RunReport) -> None:
    page = make_page(shown)
    text = page.html.decode()
    assert page.policies == 11 and page.samples == 11 and not page.cut
    assert "window.hit" not in re.sub(r"<title>.*?</title>|<h1>.*?</h1>|<dd>.*?</dd>", "", text)
    assert text.count("<script>") == 1 and "<img" not in text
    assert not re.search(r'(?:src|href)="(?!#|data:,)', text)
    held = blobs(page.html)
    assert len(held["index"]["samples"]) == 11 and len(held["chunk-0"]) == 40
    assert max(len(rows) for rows in tables_of(held["view-summary"], "policies")) == 11
    first = held["chunk-0"][0]["completions"][0]
    assert first["text"] == HOSTILE and first["right"] is not first["wrong"]


@pytest.mark.slow
def test_equal_runs_give_equal_bytes(root: Path, shown: RunReport) -> None:
    assert make_page(shown).html == make_page(read_run(root)).html
    assert picture_bytes(run_figure(shown), "svg") == picture_bytes(run_figure(read_run(root)), "svg")


def test_figures_keep_their_intervals_and_what_is_missing_is_null(shown: RunReport) -> None:
    rows = tables_of(summary_of(shown), "policies")[0]
    words = json.dumps(next(each for each in rows if each[0][0] == "QSharp"), allow_nan=False)
    figure = next(e for e in shown.gathered.rows if e.about.algorithm == "QSharp" and e.own).figures["pass@1"]
    assert figure.interval is not None and figure.value is not None
    assert f"{figure.interval.low:.3f} to {figure.interval.high:.3f}" in words and str(figure.value) in words
    reference = json.dumps(rows[0])
    assert '[0.0, ["span", {"title": "every resample gives the same value"}' in reference and "no interval" in reference


def test_a_divergence_that_is_zero_by_rounding_is_zero_on_the_page(shown: RunReport) -> None:
    first, *others = shown.gathered.rows
    figures = {**first.figures, "kl": Figure(-4e-8, Interval(-6e-8, 2e-8)), "reward": Figure(-4e-8)}
    rows = (replace(first, figures=figures, by_seed={"kl": (-4e-8, 0.5)}), *others)
    nodes = summary_of(replace(shown, gathered=replace(shown.gathered, rows=rows), samples=()))
    row = json.dumps(tables_of(nodes, "policies")[1][0])  # with all figures
    assert "0.00 to 0.00" in row and "by seed: 0.00, 0.50" in row and "-4e-08" in row


def test_texts_are_cut_before_policies_are_left_out(shown: RunReport) -> None:
    completion = Completion((1,), (None,), "x" * 20_000, True, 1.0, None, "n" * 500, None)
    long = AnsweredProblem("p", "q", (1,), 0.1, (completion,) * 12)
    # Random letters can't be packed away.

    letters = random.Random(0)
    rows = [
        replace(
            long,
            completions=tuple(
                replace(completion, text="".join(letters.choices("abcdefgh", k=6000))) for _ in range(10)
            ),
        )
        for _ in range(4)
    ]
    samples = [replace(each, answered=rows) for each in shown.samples]
    whole = chunks_of(samples, 10**8)
    assert whole.limits == LEVELS[0]
    first = unpacked(whole.texts[0])[0]
    text, out = first["completions"][0]["text"], first["more"]
    assert len(text[0]) == 4000 and text[1] == 2000 and out == 2
    less = chunks_of(samples, 200_000)
    assert len(less.texts) == 11 and less.limits != LEVELS[0] and sum(map(len, less.texts)) <= 200_000
    least = chunks_of(samples, 2_000)
    assert 0 < len(least.texts) < 11
    page = make_page(replace(shown, samples=samples), most_bytes=900_000)
    assert page.cut


def test_a_training_and_a_bare_run_have_a_page(tmp_path: Path, shown: RunReport) -> None:
    page = make_page(read_run(made_training(tmp_path / "out")))
    assert page.policies == 0 and "(60 steps)" in json.dumps(blobs(page.html)["view-learning"])
    bare = replace(shown, trainings=(), timeline=None, samples=(), notes=())
    assert "view-jobs" not in blobs(make_page(bare).html)


def test_the_command_writes_page_and_figure(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(["report", str(root), "--json", "--output", "page.html", "--plot", "curves.svg"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["policies"] == 11 and told["trainings"] == 4 and told["failures"] == 2
    assert Path(told["page"]).stat().st_size == told["bytes"]
    picture = (tmp_path / "curves.svg").read_text()
    assert picture.startswith("<?xml") and "KL from the reference" in picture and "window.hit=1&lt;" in picture
    training = made_training(tmp_path / "out")
    assert command(["report", str(training), "--open", "no"]) == 0
    assert "0 policies, 1 training" in capsys.readouterr().out and (training / "report.html").exists()


def test_the_command_refuses(root: Path, tmp_path: Path) -> None:
    for words, problem, message in (
        ([str(root), "--plot", "x.bmp"], UsageError, "x.bmp"),
        ([str(tmp_path), "--plot", "x.png"], UsageError, "gpuherd esd plot"),
        ([str(root), "--evaluation", "abc"], UsageError, "no evaluations"),
        ([str(root), "--output", str(tmp_path / "no" / "page.html")], CannotWrite, "--output"),
    ):
        with pytest.raises(problem, match=message):
            command(["report", *words, "--open", "no"])


def test_the_mismatch_of_sampler_and_trainer_is_drawn(tmp_path: Path) -> None:
    figures = ("loss", "sampler_weight", "sampler_weight_max", "sampler_kl")
    made_curves(made_training(tmp_path / "out"), figures, steps=60)
    said = json.dumps(blobs(make_page(read_run(tmp_path / "out")).html)["view-learning"])
    assert all(f"{name} by step" in said for name in figures)


def test_a_figure_has_every_method(shown: RunReport) -> None:
    rows = list(shown.gathered.rows)
    like = next(row for row in rows if row.about.algorithm == "DPO" and row.about.round == 1)
    more = [replace(like, about=replace(like.about, algorithm=f"M{number}")) for number in range(9)]
    many = replace(shown, trainings=(), gathered=replace(shown.gathered, rows=tuple(rows + more)))
    (axes,) = [axes for axes in run_figure(many).axes if axes.get_title(loc="left")]
    assert sorted(axes.get_legend_handles_labels()[1]) == sorted(
        ["CD", "DPO", "QSharp", *(f"M{number}" for number in range(9))]
    )


def test_a_training_of_one_step_and_small_shares_are_seen(tmp_path: Path) -> None:
    figure = run_figure(read_run(made_wide_run(tmp_path / "run")))
    divergence, learning = (axes for axes in figure.axes if axes.get_title(loc="left"))
    lengths = {len(line.get_xdata()): line.get_marker() for line in learning.get_lines()}  # type: ignore[arg-type]
    assert lengths == {1: "o", 5: "None"} and all(tick == round(tick) for tick in learning.get_xticks())
    assert 0 < divergence.get_ylim()[1] < 0.4


def test_nothing_to_plot_is_said(shown: RunReport) -> None:
    bare = replace(shown, trainings=(), gathered=replace(shown.gathered, comparisons=()))
    with pytest.raises(UsageError, match="nothing to plot"):
        run_figure(bare)
