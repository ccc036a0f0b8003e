"""The summary of a folder: one convention, and the share of each model's weights that was analysed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuherd.cli.main import run
from gpuherd.errors import ExitCode
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.tables.stats import read_table

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
