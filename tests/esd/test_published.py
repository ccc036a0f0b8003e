"""Published results become tables of ours: their figures to the digit, their sentinels as reasons."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuherd.cli.main import run
from gpuherd.errors import BadModel, ExitCode, UsageError
from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.folder import IMPORTED, ESDDirectory, as_text, refuse_another
from gpuherd.esd.published import import_published
from gpuherd.esd.report.contents import Contents
from gpuherd.esd.report.reading import read_results
from gpuherd.esd.results import ModelTable, read_alphas, read_model, read_tables

SHARED = Path(os.environ.get("GPUHERD_SHARED_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
ROW = {
    "model_id": "org/a",
    "is_adapter": "True",
    "D": "0.06",
    "M": "768",
    "N": "768",
    "alpha": "5.621710300445557",
    "alpha_weighted": "15.2",
    "entropy": "0.92",
    "log_alpha_norm": "15.5",
    "log_norm": "4.5",
    "log_spectral_norm": "2.7",
    "longname": "h.0.q",
    "matrix_rank": "768",
    "norm": "33611.1796875",
    "num_evals": "767",
    "spectral_norm": "506.27",
    "stable_rank": "66.4",
    "xmax": "506.27",
    "xmin": "5.7e-05",
    "params": "590592",
}


def write(path: Path, *rows: dict[str, str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_published(path: Path) -> ModelTable:
    """The only file of its folder, as the results have it once it is imported. Raises BadModel where it is refused."""
    directory = ESDDirectory(path.parent / "imported")
    (done,) = import_published(path.parent, directory)
    if done.model_id is None:
        raise BadModel(str(done.problem))
    return read_model(directory.stats_file(done.model_id))


def test_figures_are_theirs_and_sentinels_become_reasons(tmp_path: Path) -> None:
    failed = ROW | {"alpha": "-1", "D": "1", "alpha_weighted": "-2.7", "log_alpha_norm": "-1.0"}
    model = read_published(
        write(
            tmp_path / "a.csv",
            ROW,
            failed | {"longname": "h.1.q", "norm": "nan", "spectral_norm": "nan", "entropy": "inf"},
            failed | {"longname": "h.2.q", "norm": "0.0"},
            failed | {"longname": "h.3.q"},
        )
    )
    good, broken, zero, other = range(4)
    found = [model.figures[name][good] for name in ("alpha", "norm", "num_evals")]
    assert (*found, model.status[good]) == (5.621710300445557, 33611.1796875, 767, "ok")
    assert "xmin" not in model.present
    for name in ("alpha", "D", "alpha_weighted", "log_alpha_norm"):
        assert np.isnan(model.figures[name][[broken, zero, other]]).all()
    assert np.isnan([model.figures[name][broken] for name in ("norm", "entropy")]).all()
    assert "NaN" in model.status[broken]
    assert "zero" in model.status[zero]
    assert "-1" in model.status[other]
    assert model.figures["norm"][other] == 33611.1796875
    assert (model.relation, model.source_model) == ("adapter", None)
    assert model.convention["gpuherd_version"] == IMPORTED


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"a": "1"}], "model_id"),
        ([ROW | {"alpha": "x"}], "alpha is 'x'"),
        ([ROW | {"M": ""}], "M is ''"),
        ([ROW, ROW | {"model_id": "org/b"}], "2: org/a, org/b"),
        ([ROW | {"model_id": ""}], "of one model"),
        ([ROW | {"model_id": " "}], "a row without a model_id"),
        ([ROW | {"params": "1e300"}], "params is '1e300', no whole number"),
        ([ROW | {"num_evals": "7.5"}], "num_evals is '7.5', no whole number"),
        ([ROW | {"M": "-5"}], "M is '-5'"),
        ([ROW, ROW | {"longname": "h.1"}, ROW], "two rows of 'h.0.q'"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, rows: list[dict[str, str]], told: str) -> None:
    with pytest.raises(BadModel, match=told):
        read_published(write(tmp_path / "a.csv", *rows))


def test_a_file_that_a_spreadsheet_has_saved(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", ROW)
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert read_published(path).model_id == "org/a"


def test_an_empty_or_binary_file_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"\xff\xfe\x00", b'model_id\n"never closed'):
        (tmp_path / "a.csv").write_bytes(content)
        with pytest.raises(BadModel, match=r"a\.csv"):
            read_published(tmp_path / "a.csv")


def test_a_row_with_more_cells_than_the_heading_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", ROW)
    path.write_text(path.read_text().rstrip("\n") + ",1\n")
    with pytest.raises(BadModel, match="row 1 has more cells"):
        read_published(path)


def test_an_enormous_alpha_is_counted_without_a_warning(tmp_path: Path) -> None:
    for name, other in (("a", ""), ("b", "org/a")):
        huge = ROW | {"model_id": f"org/{name}", "alpha": "1e308", "source_model": other}
        write(tmp_path / f"{name}.csv", huge, huge | {"longname": "h.1.q"})
    directory = ESDDirectory(tmp_path / "out")
    assert all(done.problem is None for done in import_published(tmp_path, directory))
    assert Contents(read_results(directory.root)).index()["pooled"][-1] == 4


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "zoo", tmp_path / "out"
    write(source / "results__org--a.csv", ROW, ROW | {"longname": "h.1.q", "alpha": "-1"})
    write(source / "ablation__org--a.csv", ROW)
    write(source / "bad.csv", {"a": "1"})
    write(source / "evil.csv", ROW | {"model_id": "=cmd()\x1b[31m/../../x"})
    words = ["esd", "import", str(source), "--output-dir", str(out)]
    assert run([*words, "--json"]) == ExitCode.FAILED
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [model["model"] for model in told["models"]] == ["org/a", "=cmd()\x1b[31m/../../x"]
    assert len(told["refused"]) == 2
    assert "org/a is in ablation__org--a.csv too" in told["refused"][1]["reason"]
    assert {path.parent for path in out.rglob("*.csv")} == {out / "stats"}
    assert (out / "stats" / "org--a.csv").is_file()
    before = {path: path.read_bytes() for path in (out / "stats").iterdir()}
    assert run(words) == ExitCode.FAILED
    text = capsys.readouterr().out
    assert "org/a: 1 of 1 matrices with a fit" in text
    assert "\x1b" not in text
    assert {path: path.read_bytes() for path in (out / "stats").iterdir()} == before
    model = read_model(out / "stats" / "org--a.csv")
    assert model.convention["fix_fingers"] == "DKS"
    assert model.convention["gpuherd_version"] == IMPORTED


def test_the_data_set_speaks_for_a_model_until_its_stats_file_is_changed(tmp_path: Path) -> None:
    source, out = tmp_path / "zoo", tmp_path / "out"
    for name in ("a", "b", "c"):
        write(source / f"{name}.csv", *(ROW | {"model_id": f"org/{name}", "longname": f"h.{at}.q"} for at in range(3)))
    assert run(["esd", "import", str(source), "--output-dir", str(out)]) == ExitCode.OK
    assert [path.name for path in (out / "stats").glob("*.parquet")] == ["imported.parquet"]
    changed = out / "stats" / "org--b.csv"
    changed.write_text(changed.read_text().replace("5.621710300445557", "2.5"))
    (out / "stats" / "org--c.csv").unlink()
    directory = ESDDirectory(out)
    tables = [each for each in read_tables(directory, directory.stats_files()) if isinstance(each, ModelTable)]
    assert {table.model_id: table.alpha.tolist() for table in tables} == {
        "org/a": [5.621710300445557] * 3,
        "org/b": [2.5] * 3,
    }
    (whole,) = (table for table in tables if table.model_id == "org/a")
    alone = tmp_path / "org--a.csv"
    alone.write_bytes((out / "stats" / "org--a.csv").read_bytes())
    text = read_model(alone)
    for name in ("names", "rows", "columns", "params", "status", "present", "convention", "notes", "stem"):
        assert getattr(whole, name) == getattr(text, name), name
    assert list(whole.figures) == list(text.figures)
    assert all(np.array_equal(whole.figures[name], text.figures[name], equal_nan=True) for name in text.figures)


def test_our_results_and_theirs_dont_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "zoo", tmp_path / "out"
    write(source / "a.csv", ROW)
    run(["esd", "import", str(source), "--output-dir", str(out)])
    with pytest.raises(UsageError, match="imported"):
        run(["esd", "--single-model", "org/b", "--fix-fingers", "DKS", "--output-dir", str(out)])
    ours = tmp_path / "ours"
    (ours / "stats").mkdir(parents=True)
    (ours / "stats" / "org--b.csv").touch()
    (ours / "run.json").write_text(json.dumps({"convention": AnalysisOptions().convention_columns}))
    with pytest.raises(UsageError, match="fix_fingers=xmin_mid"):
        run(["esd", "import", str(source), "--output-dir", str(ours)])
    assert not (ours / "stats" / "org--a.csv").exists()


def test_our_own_results_are_no_published_ones(tmp_path: Path) -> None:
    """They would come in as float32 and DKS, whatever they are."""
    run(["esd", "import", str(write(tmp_path / "zoo" / "a.csv", ROW).parent), "--output-dir", str(tmp_path / "out")])
    about = read_alphas(ESDDirectory(tmp_path / "out"), "org/a").about
    assert (about["fix_fingers"], about["xmin_pos"], about["gpuherd_version"]) == ("DKS", "", "imported")
    with pytest.raises(BadModel, match=r"org--a\.csv is a stats file of gpuherd"):
        read_published(tmp_path / "out" / "stats" / "org--a.csv")


def test_a_folder_without_files_or_none(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="no stats files"):
        run(["esd", "import", str(tmp_path), "--output-dir", str(tmp_path / "out")])
    with pytest.raises(BadModel, match="no folder"):
        run(["esd", "import", str(tmp_path / "absent"), "--output-dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_unknown_commands_of_esd_are_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["esd", "imprt", "x"])
    assert ended.value.code == ExitCode.USAGE
    assert "did you mean import?" in capsys.readouterr().err


def test_conventions_as_typed_and_as_text_are_the_same(tmp_path: Path) -> None:
    typed = AnalysisOptions(layers=("a", "b")).convention_columns
    text = {name: str(value) for name, value in typed.items()}
    assert as_text(typed) == as_text(text)
    directory = ESDDirectory(tmp_path)
    refuse_another(directory, typed, "no remedy needed")


@pytest.mark.skipif(
    not (SHARED / "esd-stats").is_dir(),
    reason="no published results: set GPUHERD_SHARED_DATA to the folder that has esd-stats/",
)
def test_the_published_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["esd", "import", str(SHARED / "esd-stats"), "--output-dir", str(tmp_path)]) == ExitCode.OK
    assert "8 imported, 0 refused" in capsys.readouterr().out
    alphas = read_alphas(ESDDirectory(tmp_path), "gpt2").matrix
    assert len(alphas.layers) == 12
    assert len(alphas.modules) == 6
    values = [value for row in alphas.values for value in row if value is not None]
    assert sum(values) / len(values) == pytest.approx(4.005, abs=1e-3)
