"""``gpuherd report`` and ``gpuherd esd plot`` as users meet them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.esd.report.runs import put_small_run
from tests.qa.evaluation.evaluable import judge, make_run, right_ones, score

from gpuherd.cli.main import run
from gpuherd.errors import CannotWrite, ExitCode, MissingExtra, MissingModel, UsageError
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.runs import DamagedRun, NoSuchRun


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    put_small_run(folder)
    return folder


def test_the_page_lies_in_the_run_folder(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(run_folder), "--open", "no"]) == ExitCode.OK
    page = run_folder / "report.html"
    assert page.read_bytes().startswith(b"<!doctype html>")
    assert f"{page}  (4 models" in capsys.readouterr().out


def test_another_place_and_json(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "p.html"
    assert run(["report", str(run_folder), "--output", str(page), "--json"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "page": str(page),
        "bytes": page.stat().st_size,
        "models": 4,
        "with_figures": 4,
        "with_spectra": 4,
        "failures": 2,
    }


@pytest.mark.slow
def test_the_same_results_give_the_same_page(run_folder: Path) -> None:
    pages = []
    for _ in range(2):
        run(["report", str(run_folder), "--open", "no"])
        pages.append((run_folder / "report.html").read_bytes())
    assert pages[0] == pages[1]


def test_a_folder_without_results_and_one_that_can_not_be_written(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no folder .*posttrain or train"):
        run(["report", str(tmp_path / "nowhere")])
    with pytest.raises(CannotWrite, match="--output"):
        run(["report", str(run_folder), "--output", str(tmp_path / "no" / "p.html"), "--open", "no"])


def test_a_missing_library_is_named(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"gpuherd\[page\]"):
        run(["report", str(run_folder), "--open", "no"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"gpuherd\[page\]"):
        run(["esd", "plot", str(run_folder), "--model", "org/base", "--kind", "alpha"])


@pytest.mark.slow
def test_a_plot_of_some_layers(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "q.svg"
    words = ["esd", "plot", str(run_folder), "--model", "tuned", "--layer", "*.q_proj", "--kind", "both"]
    assert run([*words, "--output", str(picture), "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == {
        "plot": str(picture),
        "kind": "both",
        "model": "org/tuned",
        "layers": ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"],
    }
    assert b"model.layers.1.self_attn.q_proj" in picture.read_bytes()


def test_a_heat_map(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "alpha.png"
    words = ["esd", "plot", str(run_folder), "--model", "org/spoilt", "--kind", "alpha", "--output", str(picture)]
    assert run(words) == ExitCode.OK
    assert capsys.readouterr().out.strip() == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_can_not_be_drawn_is_told(run_folder: Path) -> None:
    plot = ["esd", "plot", str(run_folder)]
    with pytest.raises(UsageError, match="say which layers"):
        run(plot)
    with pytest.raises(UsageError, match="4 models: say which by --model, for example org/base"):
        run([*plot, "--layer", "x"])
    with pytest.raises(MissingModel, match=r"there is no model 'nobody' in .*; for example org/base"):
        run([*plot, "--model", "nobody", "--layer", "x"])
    with pytest.raises(UsageError, match="leave --layer out"):
        run([*plot, "--model", "org/base", "--layer", "x", "--kind", "alpha"])
    with pytest.raises(UsageError, match=r"\.png, \.svg, \.pdf"):
        run([*plot, "--layer", "x", "--output", "x.gif"])
    with pytest.raises(UsageError, match=r"model\.embed_tokens has no spectrum: not analysed: embedding"):
        run([*plot, "--model", "org/base", "--layer", "*embed_tokens"])
    (run_folder / "stats" / "org--base.parquet").unlink()
    with pytest.raises(UsageError, match="holds no spectra of 'org/base'"):
        run([*plot, "--model", "org/base", "--layer", "x"])


@pytest.fixture
def answers_folder(tmp_path: Path) -> QADirectory:
    folder = make_run(tmp_path / "runs", right_ones(40, 15))
    judge(folder, right_ones(40, 15))
    score(folder)
    return folder


@pytest.mark.slow
def test_a_run_of_answers_by_name_and_by_path(answers_folder: QADirectory, capsys: pytest.CaptureFixture[str]) -> None:
    runs = str(answers_folder.root.parent)
    assert run(["report", "made", "--runs-dir", runs, "--open", "no"]) == ExitCode.OK
    page = answers_folder.root / "report.html"
    assert f"{page}  (40 answers, 0.1 MB)" in capsys.readouterr().out
    first = page.read_bytes()
    assert run(["evaluate", "made", "--runs-dir", runs, "--bootstrap", "100", "--name", "first"]) == ExitCode.OK
    capsys.readouterr()
    assert run(["report", str(answers_folder.root), "--json", "--evaluation", "first"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == {
        "page": str(page),
        "bytes": page.stat().st_size,
        "answers": 40,
        "with_texts": 40,
        "evaluation": "first",
    }
    assert page.read_bytes() != first


def test_a_damaged_run_of_answers_is_not_taken_for_spectra(answers_folder: QADirectory) -> None:
    answers_folder.run_json.write_text('{"a')
    for words in (["made", "--runs-dir", str(answers_folder.root.parent)], [str(answers_folder.root)]):
        with pytest.raises(DamagedRun, match=r"run\.json"):
            run(["report", *words])


def test_a_run_that_is_not_there_or_not_of_answers(answers_folder: QADirectory, run_folder: Path) -> None:
    runs = str(answers_folder.root.parent)
    with pytest.raises(NoSuchRun, match="did you mean made"):
        run(["report", "mad", "--runs-dir", runs])
    with pytest.raises(UsageError, match="no evaluation 'x'"):
        run(["report", "made", "--runs-dir", runs, "--evaluation", "x"])
    with pytest.raises(UsageError, match="no run of answers"):
        run(["report", str(run_folder), "--evaluation", "x"])
