"""``gpuherd esd --resume``: the list and the options of a run again, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuherd.cli.main import run
from gpuherd.errors import ExitCode, UsageError
from gpuherd.esd.config import ExperimentConfig
from gpuherd.esd.folder import EarlierRun, ESDDirectory, earlier_run, resumed
from gpuherd.esd.views import read_table

MakeModel = Callable[..., Path]
FAST = ("--check-interval", "0.02", "--max-checks", "2", "--device-map", "cpu")


def record(folder: Path, **options: Any) -> None:
    """What a run writes down when it begins."""
    config = ExperimentConfig(**options)
    told = {"config": config.to_dict(), "cwd": str(folder), "convention": config.convention_columns}
    ESDDirectory(folder).write_run_record(told)


@pytest.fixture
def begun(tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a list with relative paths, started in another folder than the tests; one of its models is not there."""
    make_model("a")
    shutil.move(str(make_model("late")), tmp_path / "elsewhere")
    (tmp_path / "models.csv").write_text("model_id,source_model,base_model_relation\n./models/a,,\n./models/late,,\n")
    monkeypatch.chdir(tmp_path)
    words = ["esd", "--model-list", "models.csv", "--output-dir", "out", "--fix-fingers", "DKS", "--bins", "50", *FAST]
    assert run(words) == ExitCode.FAILED
    shutil.move(tmp_path / "elsewhere", tmp_path / "models" / "late")
    return tmp_path / "out"


def test_a_run_goes_on_from_anywhere(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    capsys.readouterr()
    assert run(["esd", "--resume", str(begun), "--max-gpus", "1", "--json"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert told["counts"]["done"] == 2
    assert told["output_dir"] == str(begun)
    rows = read_table(begun / "esd_results_summary.csv")
    assert [row["model_id"] for row in rows] == ["./models/a", "./models/late"]
    assert {(row["fix_fingers"], row["bins"]) for row in rows} == {("DKS", "50")}
    written = json.loads((begun / "run.json").read_text())
    assert written["cwd"] == str(tmp_path)
    assert written["config"]["max_gpus"] == 1
    monkeypatch.chdir(tmp_path / "other")
    assert run(["esd", "--output-dir", str(begun), "--resume"]) == ExitCode.OK
    assert "2 done (2 before this run)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--fix-fingers", "xmin_mid"], "another convention"),
        (["--bins", "51"], "--bins 50, not 51"),
        (["--seed", "7"], "--seed 0, not 7"),
        (["--tpl"], "--tpl off, not on"),
        (["--layers", "*q_proj"], r"--layers \(none\), not \*q_proj"),
        (["--model-list", "other.csv"], "another list"),
        (["--single-model", "org/a"], "another list"),
        (["--overwrite"], "leave one of them out"),
        (["--output-dir", "elsewhere"], "two folders"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, words: list[str], told: str) -> None:
    record(tmp_path, model_list="models.csv", fix_fingers="DKS", bins=50)
    with pytest.raises(UsageError, match=told):
        run(["esd", *words, "--resume", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_the_same_words_again_are_no_contradiction(
    tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.csv").write_text(f"model_id,source_model,base_model_relation\n{make_model('a')},,\n")
    record(tmp_path, model_list="models.csv", fix_fingers="DKS", bins=50)
    words = ["--fix-fingers", "DKS", "--bins", "50", "--model-list", "models.csv", "--dry-run"]
    assert run(["esd", "--resume", str(tmp_path), *words]) == ExitCode.OK


def test_a_list_is_the_same_by_whatever_path_it_is_named(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    shutil.copy(tmp_path / "models.csv", tmp_path / "other" / "models.csv")
    with pytest.raises(UsageError, match="another list"):
        run(["esd", "--resume", str(begun), "--model-list", "models.csv"])
    for name in (str(tmp_path / "models.csv"), "../models.csv"):
        monkeypatch.chdir(tmp_path / "other")
        assert run(["esd", "--resume", str(begun), "--model-list", name, "--dry-run"]) == ExitCode.OK


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "no run.json"),
        ("{", "can't be read"),
        ("[]", "no record of gpuherd esd"),
        ('{"config": {"later": 1}, "cwd": "/"}', "another version"),
        ('{"imported_from": "zoo", "convention": {}}', "imported results"),
        ('{"config": {}}', "no record"),
        ('{"config": {"single_model": "a", "bins": "x"}, "cwd": "/"}', "no usable options"),
        ('{"config": {"bins": 7}, "cwd": "/"}', "no usable options: nothing to analyse"),
    ],
)
def test_nothing_to_go_on_with(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(UsageError, match=told):
        run(["esd", "--resume", str(tmp_path)])


def test_the_folder_where_it_was_started_is_gone(tmp_path: Path) -> None:
    config = ExperimentConfig(single_model="org/a").to_dict()
    (tmp_path / "run.json").write_text(json.dumps({"config": config, "cwd": str(tmp_path / "gone")}))
    with pytest.raises(UsageError, match="was started in"):
        run(["esd", "--resume", str(tmp_path)])


def test_what_is_kept_and_what_is_not() -> None:
    config: dict[str, Any] = ExperimentConfig(
        single_model="org/a", overwrite=True, webhook="https://host/secret", retries=3, output_dir="x", exclude=("*.k",)
    ).to_dict()
    earlier = EarlierRun(Path("/runs/x"), json.loads(json.dumps(config)), Path("/"))
    values = resumed(earlier, {"max_gpus": 2, "exclude": ("*.k",)})
    again = ExperimentConfig.from_dict(values)
    assert (again.retries, again.max_gpus, again.overwrite, again.webhook) == (3, 2, False, None)
    assert str(again.output_dir) == "/runs/x"
    # A run of an older gpuherd, which had no such option, was one without it.
    del config["ks"]
    older = EarlierRun(Path("/runs/x"), config, Path("/"))
    assert resumed(older, {"ks": "one-sided"})["ks"] == "one-sided"
    with pytest.raises(UsageError, match="two-sided"):
        resumed(older, {"ks": "two-sided"})


def test_a_record_reads_back(tmp_path: Path) -> None:
    record(tmp_path, single_model="org/a", layers=("*.q",))
    config = ExperimentConfig(single_model="org/a", layers=("*.q",))
    assert ExperimentConfig.from_dict(earlier_run(ESDDirectory(tmp_path)).options) == config
