"""``gpuherd esd views``: what is made of the data set is made again from it, to the byte."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.esd.old_spectra import old_arrays
from tests.esd.report.runs import heavy, put_model

from gpuherd.cli.main import run
from gpuherd.errors import ExitCode, QueueBusy, UsageError
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.results import has_spectra, read_sketches
from gpuherd.esd.spectrum_files import sketch_of
from gpuherd.esd.views import read_table
from gpuherd.jobs.lock import DispatcherLock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    put_model(out, "org/a", heavy(1), skipped=("model.embed_tokens",))
    put_model(out, "org/b", heavy(2), source="org/a", relation="finetune")
    return out


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in (".csv", ".h5", ".parquet"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def views(capsys: pytest.CaptureFixture[str], *words: str, code: int = ExitCode.OK) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["esd", "views", *words, "--json"]) == code
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_lost_views_are_made_again_to_the_byte(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["esd", "views", str(folder)]) == ExitCode.OK
    assert "summary: 1 written, 0 unchanged" in capsys.readouterr().out
    before = contents(folder)
    assert [row["model_id"] for row in read_table(folder / "esd_results_summary.csv")] == ["org/a", "org/b"]
    (folder / "stats" / "org--a.csv").unlink()
    (folder / "stats" / "org--b.csv").write_bytes(b"model_id\n\xff")
    shutil.rmtree(folder / "metrics")
    (folder / "esd_results_summary.csv").unlink()
    planned = views(capsys, str(folder), "--dry-run")
    assert not (folder / "metrics").exists()
    done = views(capsys, str(folder))
    assert done["views"] == planned["views"]
    assert [len(done["views"][kind]["written"]) for kind in ("stats", "metrics", "summary")] == [2, 4, 1]
    assert contents(folder) == before
    again = views(capsys, str(folder))
    assert [view["written"] for view in again["views"].values()] == [[], [], []]


def test_a_stats_file_changed_by_hand_is_kept_and_the_others_follow_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    views(capsys, str(folder))
    path = folder / "stats" / "org--b.csv"
    alpha = read_table(path)[0]["alpha"]
    path.write_text(path.read_text().replace(alpha, "9.5"))
    changed = path.read_bytes()
    done = views(capsys, str(folder))
    assert done["views"]["stats"]["kept"] == [str(path)]
    assert path.read_bytes() == changed
    assert len(done["views"]["metrics"]["written"]) == 2
    rows = {row["model_id"]: row for row in read_table(folder / "esd_results_summary.csv")}
    assert float(rows["org/b"]["alpha_max"]) == 9.5


def test_a_copied_folder_is_read_from_its_data_set_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (folder / "stats").glob("*.csv"):
        os.utime(path, ns=(1, 1))
    done = views(capsys, str(folder), "--only", "stats")
    assert list(done["views"]) == ["stats"]
    for path in (folder / "stats").glob("*.csv"):
        assert path.stat().st_mtime_ns == path.with_suffix(".parquet").stat().st_mtime_ns


def test_extra_columns_come_from_the_list_when_the_summary_is_lost(
    tmp_path: Path, make_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    models = [make_model(name, layers=1) for name in ("b", "a")]
    listed = "".join(f"{model},,,note {model.name}\n" for model in models)
    (tmp_path / "models.csv").write_text(f"model_id,source_model,base_model_relation,note\n{listed}")
    out = tmp_path / "out"
    words = ["--model-list", str(tmp_path / "models.csv"), "--output-dir", str(out), "--device-map", "cpu"]
    assert run(["esd", *words]) == ExitCode.OK
    before = contents(out)
    (out / "esd_results_summary.csv").unlink()
    shutil.rmtree(out / "metrics")
    views(capsys, str(out))
    assert contents(out) == before


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        run(["esd", "views", str(tmp_path / "absent")])
    with pytest.raises(UsageError, match="no results"):
        run(["esd", "views", str(tmp_path)])
    lock = DispatcherLock(ESDDirectory(folder).lock)
    try:
        with pytest.raises(QueueBusy):
            run(["esd", "views", str(folder)])
    finally:
        lock.close()


def test_a_damaged_data_set_is_told_and_spoils_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "stats" / "org--a.parquet").write_bytes(b"PAR1 no table")
    done = views(capsys, str(folder), code=ExitCode.FAILED)
    assert "org--a.parquet can't be read" in done["problems"][0]
    assert len(done["views"]["metrics"]["written"]) + done["views"]["metrics"]["unchanged"] == 4
    (folder / "stats" / "org--a.csv").unlink()
    views(capsys, str(folder), code=ExitCode.FAILED)
    assert [row["model_id"] for row in read_table(folder / "esd_results_summary.csv")] == ["org/b"]


def test_spectra_of_an_earlier_version_are_read_and_go_with_their_analysis(folder: Path) -> None:
    directory = ESDDirectory(folder)
    directory.spectra.mkdir()
    evals = np.sort(np.random.default_rng(1).pareto(2.0, 300))
    arrays = old_arrays("org/old", {"h.0.q": sketch_of(evals, 1e-5)})
    np.savez_compressed(directory.spectra / "org--old.npz", **arrays)
    (layer,) = read_sketches(directory, "org/old").layers
    assert (layer.longname, layer.sketch.count, layer.alpha) == ("h.0.q", 300, 2.5)
    assert has_spectra(directory, "org--old")
    put_model(folder, "org/old", heavy(3))
    assert [each.longname for each in read_sketches(directory, "org/old").layers] == list(heavy(3))
    assert not (directory.spectra / "org--old.npz").exists()
