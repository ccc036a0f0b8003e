"""The summary of a folder: one convention, and the share of each model's weights that was analysed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuherd.cli.main import run
from gpuherd.errors import ExitCode, NoSuchGpu, UsageError
from gpuherd.esd import ESDExperiment, ExperimentConfig
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.model_list import ModelRow
from gpuherd.esd.views import read_table

MakeModel = Callable[..., Path]


def test_a_file_of_another_convention_is_left_out(
    tmp_path: Path, make_model: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [make_model(name, layers=1) for name in ("a", "b")]
    (tmp_path / "models.csv").write_text(
        "model_id,source_model,base_model_relation\n" + "".join(f"{model},,\n" for model in models)
    )
    out = tmp_path / "out"
    words = ["esd", "--model-list", str(tmp_path / "models.csv"), "--output-dir", str(out), "--device-map", "cpu"]
    assert run(words) == ExitCode.OK
    summary = ESDDirectory(out).summary
    rows = read_table(summary)
    assert [row["model_id"] for row in rows] == [str(model) for model in models]
    # The embedding is skipped: 50 x 32 of 50 x 32 + 32 x 32 + 64 x 32 weights.
    assert [float(row["params_share"]) for row in rows] == [pytest.approx(3072 / 4672)] * 2

    by_hand = ["--model-id", str(models[0]), "--output-dir", str(out), "--bins", "7"]
    subprocess.run([sys.executable, "-m", "gpuherd.esd.worker", *by_hand], check=True, capture_output=True, timeout=60)
    capsys.readouterr()
    assert run([*words, "--json"]) == ExitCode.FAILED
    assert [row["model_id"] for row in read_table(summary)] == [str(models[1])]
    (failure,) = json.loads(capsys.readouterr().out)["failures"]
    assert failure["model"] == str(models[0])
    assert "was replaced by a file made with bins=7" in failure["reason"]

    ESDDirectory(out).stats_file(str(models[0])).unlink()
    assert run(words) == ExitCode.OK
    assert len(read_table(summary)) == 2


def test_without_its_record_a_folder_keeps_to_the_convention_of_its_files(
    tmp_path: Path, make_model: MakeModel
) -> None:
    model, out = make_model("a", layers=1), tmp_path / "out"
    words = ["esd", "--single-model", str(model), "--output-dir", str(out), "--device-map", "cpu"]
    assert run(words) == ExitCode.OK
    for content in (None, "{", '{"convention": 7}'):
        ESDDirectory(out).run_json.unlink(missing_ok=True)
        if content is not None:
            ESDDirectory(out).run_json.write_text(content)
        with pytest.raises(UsageError, match=r"made with bins=100; these have bins=7\."):
            run([*words, "--bins", "7"])
    assert run(words) == ExitCode.OK


def test_some_models_are_not_made_anew_by_another_convention(tmp_path: Path, make_model: MakeModel) -> None:
    models, out = [make_model(name, layers=1) for name in ("a", "b")], tmp_path / "out"
    models_csv = tmp_path / "models.csv"
    models_csv.write_text("model_id,base_model_relation,source_model\n" + "".join(f"{model},,\n" for model in models))
    words = ["esd", "--model-list", str(models_csv), "--output-dir", str(out), "--device-map", "cpu"]
    assert run(words) == ExitCode.OK
    before = {path: path.read_bytes() for path in (out / "stats").iterdir()} | {out: (out / "run.json").read_bytes()}
    with pytest.raises(UsageError, match=r"would not make anew \(1: b\+.*made with bins=100 and not with bins=7"):
        run([*words, "--overwrite", "--limit", "1", "--bins", "7"])
    after = {path: path.read_bytes() for path in (out / "stats").iterdir()} | {out: (out / "run.json").read_bytes()}
    assert after == before
    assert run([*words, "--overwrite", "--limit", "1"]) == ExitCode.OK
    assert run([*words, "--overwrite", "--bins", "7"]) == ExitCode.OK
    assert {row["bins"] for row in read_table(ESDDirectory(out).summary)} == {"7"}


def test_a_start_that_was_refused_leaves_no_convention(tmp_path: Path, make_model: MakeModel) -> None:
    words = ["esd", "--single-model", str(make_model("a", layers=1)), "--output-dir", str(tmp_path / "out")]
    with pytest.raises(NoSuchGpu):
        run([*words, "--gpu-list", "97"])
    assert run([*words, "--device-map", "cpu", "--fix-fingers", "DKS"]) == ExitCode.OK


def test_a_done_model_whose_file_is_damaged_is_told(
    tmp_path: Path, make_model: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = make_model("a", layers=1), tmp_path / "out"
    words = ["esd", "--single-model", str(model), "--output-dir", str(out), "--device-map", "cpu"]
    assert run(words) == ExitCode.OK
    stats = ESDDirectory(out).stats_file(str(model))
    for content in (b"", b"model_id,fit_status\n", b"a\nb\n", b"\xff", b'model_id\n"cut'):
        stats.write_bytes(content)
        capsys.readouterr()
        assert run([*words, "--json"]) == ExitCode.FAILED, content
        (failure,) = json.loads(capsys.readouterr().out)["failures"]
        assert failure["model"] == str(model)
        assert str(stats) in failure["reason"]
        assert "remove it to make it anew" in failure["reason"]
        assert stats.read_bytes() == content


def test_a_start_killed_before_its_jobs_are_in_the_queue_takes_no_other_results_for_its_own(
    tmp_path: Path, make_model: MakeModel
) -> None:
    out = ESDDirectory(tmp_path / "out")
    model = make_model("a", layers=1)
    words = ["esd", "--single-model", str(model), "--output-dir", str(out.root), "--device-map", "cpu"]
    assert run(words) == ExitCode.OK
    first = out.run_json.read_bytes()
    assert run([*words, "--overwrite", "--bins", "7"]) == ExitCode.OK
    # What `--overwrite` with the first options leaves when it is killed right after it has written its record.
    out.run_json.write_bytes(first)
    assert run(words) == ExitCode.OK
    assert {row["bins"] for row in read_table(out.stats_file(str(model)))} == {"100"}
    assert {row["bins"] for row in read_table(out.summary)} == {"100"}


def test_an_adapter_is_analysed_again_when_its_base_is_another_and_then_the_first_one_again(
    tmp_path: Path, make_model: MakeModel, make_adapter: MakeModel
) -> None:
    out = ESDDirectory(tmp_path / "out")
    bases = [make_model(name, layers=1, seed=seed) for seed, name in enumerate(("one", "other"))]
    adapter = make_adapter("lora", base=bases[0], layers=1)
    norms = []
    for base in (*bases, bases[0]):
        words = ["esd", "--single-model", str(adapter), "--base-model", str(base), "--device-map", "cpu"]
        assert run([*words, "--output-dir", str(out.root)]) == ExitCode.OK
        rows = read_table(out.stats_file(str(adapter)))
        assert {row["source_model"] for row in rows} == {str(base)}
        norms.append([row["norm"] for row in rows])
    assert norms[0] == norms[2] != norms[1]


def test_a_list_of_which_nothing_is_done_leaves_the_other_models_in_the_summary(
    tmp_path: Path, make_model: MakeModel
) -> None:
    out = ESDDirectory(tmp_path / "out")
    header = "model_id,base_model_relation,source_model,note\n"
    for name, row in (("good", f"{make_model('a', layers=1)},,,mine\n"), ("refused", "./absent,,,x\n")):
        (tmp_path / f"{name}.csv").write_text(header + row)
    (tmp_path / "failing.csv").write_text(header + f"{make_model('zero', layers=1, fill=0.0)},,,y\n")
    words = ["esd", "--output-dir", str(out.root), "--device-map", "cpu", "--model-list"]
    assert run([*words, str(tmp_path / "good.csv")]) == ExitCode.OK
    before = out.summary.read_bytes()
    assert b"mine" in before
    for name in ("refused", "failing"):
        assert run([*words, str(tmp_path / f"{name}.csv")]) == ExitCode.FAILED
        assert out.summary.read_bytes() == before


def test_a_hidden_file_beside_the_stats_is_no_result(tmp_path: Path, make_model: MakeModel) -> None:
    """macOS puts such files beside others when it copies a folder."""
    out = ESDDirectory(tmp_path / "out")
    words = ["esd", "--single-model", str(make_model("a", layers=1)), "--output-dir", str(out.root)]
    assert run([*words, "--device-map", "cpu"]) == ExitCode.OK
    (out.stats / "._a.csv").write_bytes(b"\0\5\x16\7")
    assert run([*words, "--device-map", "cpu", "--bins", "7", "--overwrite"]) == ExitCode.OK


def test_a_start_that_was_refused_leaves_the_record_of_the_results_that_are_there(
    tmp_path: Path, make_model: MakeModel
) -> None:
    out = ESDDirectory(tmp_path / "out")
    words = ["esd", "--single-model", str(make_model("a", layers=1)), "--output-dir", str(out.root)]
    assert run([*words, "--device-map", "cpu"]) == ExitCode.OK
    before = out.run_json.read_bytes()
    with pytest.raises(NoSuchGpu):
        run([*words, "--overwrite", "--bins", "7", "--gpu-list", "97"])
    assert out.run_json.read_bytes() == before
    assert run([*words, "--device-map", "cpu"]) == ExitCode.OK


def test_two_conventions_that_start_at_once_dont_mix(tmp_path: Path, make_model: MakeModel) -> None:
    model, out = make_model("a", layers=1), ESDDirectory(tmp_path / "out")

    class Slow(ESDExperiment):
        """Another run of the folder begins and ends while this one makes its plan."""

        def _build_esd_command(self, row: ModelRow) -> list[str]:
            if not out.stats_files():
                words = ["esd", "--single-model", str(model), "--output-dir", str(out.root), "--device-map", "cpu"]
                assert run(words) == ExitCode.OK
            return super()._build_esd_command(row)

    config = ExperimentConfig(single_model=model, output_dir=out.root, device_map="cpu", bins=7)
    with pytest.raises(UsageError, match=r"made with bins=100; these have bins=7"):
        Slow(config).run()
    assert json.loads(out.run_json.read_text())["convention"]["bins"] == 100
    assert {row["bins"] for row in read_table(out.stats_file(str(model)))} == {"100"}
