"""A worker by hand: its device, its exit codes, what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.posttrain.runs.conftest import MakeSettings
from tests.posttrain.runs.test_work import begun

from gpuherd.errors import ExitCode
from gpuherd.posttrain.runs.worker import NoCuda, device_here, main, memory_used


def test_it_computes_where_it_was_put() -> None:
    assert device_here(None, simulate=False) == device_here("", simulate=False) == "cpu"
    assert device_here("3", simulate=True) == "cpu"
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(NoCuda, match=r"CUDA_VISIBLE_DEVICES=3, and torch .* finds no CUDA"):
            device_here("3", simulate=False)
    assert memory_used("cpu") == {"peak_allocated": None, "peak_reserved": None, "total": None}


def test_a_job_from_its_words(
    make_settings: MakeSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = begun(make_settings(algos={"GRPO": {"online": False, "samples_per_prompt": 2}}), tmp_path / "run")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    words = ["--folder", str(folder.root), "--job", "GRPO_sums_tiny_r0_collect_1", "--simulate"]
    assert main(words) == ExitCode.OK
    told = capsys.readouterr().out
    assert "CUDA_VISIBLE_DEVICES: 0" in told and "Device: cpu" in told and '"problems": 6' in told
    usage = json.loads(folder.usage_of("GRPO_sums_tiny_r0_collect_1").read_bytes())
    assert usage == {"visible": "0", "peak_allocated": None, "peak_reserved": None, "total": None}


def test_what_no_further_try_can_help(
    make_settings: MakeSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = begun(make_settings(), tmp_path / "run")
    for words in (["--folder", str(tmp_path), "--job", "x"], ["--folder", str(folder.root), "--job", "x"]):
        assert main(words) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "is no run of gpuherd posttrain" in told and "this run has no job 'x'" in told
    # Nothing was collected: a training has nothing to read.
    assert main(["--folder", str(folder.root), "--job", "QSharp_sums_tiny_r0_train"]) == ExitCode.BAD_INPUT
    assert "can't be read" in capsys.readouterr().err
