"""``gpuherd esd --dry-run``: how much of each model would be analysed, and what is refused beforehand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuherd.cli.main import run
from gpuherd.errors import BadModel, ExitCode

MakeModel = Callable[..., Path]
TOTAL = 50 * 32 + 2 * (32 * 32 + 64 * 32)


def test_matrices_and_share_are_told(
    tmp_path: Path, make_model: MakeModel, make_adapter: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_model("base")
    adapter = make_adapter("lora", base=base)
    models = tmp_path / "m.csv"
    models.write_text(f"model_id,base_model_relation,source_model\n{base},,\n{adapter},lora,\norg/hub,,\n")
    words = ["esd", "--model-list", str(models), "--dry-run", "--output-dir", str(tmp_path / "out")]
    assert run([*words, "--json"]) == ExitCode.OK
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert [(line["matrices"], line["share"]) for line in plan] == [(4, 6144 / TOTAL), (4, 6144 / TOTAL), (None, None)]
    assert run([*words, "--layers", "*.q_proj"]) == ExitCode.OK
    assert f"{2048 / TOTAL:.1%}" in capsys.readouterr().out
    assert run([*words, "--json", "--spectra-of", "ba"]) == ExitCode.FAILED
    told = json.loads(capsys.readouterr().out)
    assert [(line["matrices"], line["gpus"]) for line in told["plan"]] == [(2, 0), (None, 0)]
    assert "only an adapter has a BA" in told["refused"][0]["reason"]
    assert not (tmp_path / "out").exists()


def test_a_pattern_for_another_model(tmp_path: Path, make_model: MakeModel) -> None:
    words = ["esd", "--single-model", str(make_model("a")), "--output-dir", str(tmp_path / "out"), "--dry-run"]
    with pytest.raises(BadModel, match=r"--exclude '\*\.c_attn' matches no tensor of this model"):
        run([*words, "--exclude", "*.c_attn"])
