"""The worker as a program: its log, its JSON, its exit codes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.models.load.conftest import Small, slow

from gpuherd.errors import ExitCode, UsageError
from gpuherd.models.load.options import read_device_map
from gpuherd.models.load.worker import main

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize("program", [False, slow(True)], ids=["here", "program"])
def test_it_loads_computes_and_reports(
    small: Small,
    tmp_path: Path,
    program: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from gpuherd.models.describe.reading import read_architecture

    blocks = [block.name for block in read_architecture(str(small("llama"))).blocks]
    device_map = {name: number * 4 // len(blocks) for number, name in enumerate(blocks)}
    (tmp_path / "map.json").write_text(json.dumps(device_map))
    words = ["--simulate", "--device-map", str(tmp_path / "map.json"), "--prompt-tokens", "20"]
    words += ["--json", str(tmp_path / "report.json")]
    progress = tmp_path / "progress"
    monkeypatch.setenv("GPUHERD_PROGRESS", str(progress))
    if program:
        command = [sys.executable, "-m", "gpuherd.models.load.worker", str(small("llama")), *words]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        code, log = answer.returncode, answer.stdout
    else:
        with caplog.at_level(logging.INFO, logger="gpuherd"):
            code, log = main([str(small("llama")), *words]), caplog.text
    assert code == 0, log
    assert "-> GPU 3" in log and "a prompt of 1 x 20 tokens" in log
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["device_map"] == device_map
    assert report["within_tolerance"] and report["simulated"] and report["trial"]["finite"]
    assert [each["device"] for each in report["devices"]] == [0, 1, 2, 3]
    assert all(each["real_bytes"] == each["predicted_bytes"] for each in report["devices"])
    assert json.loads(progress.read_text())["stage"] == "compute"


@pytest.mark.parametrize("name", ["gpt2", "t5", "bert", "mixtral"])
def test_one_prompt_of_each_kind_of_model(small: Small, name: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert main([str(small(name)), "--device-map", "cpu", "--json", str(report), "--batch", "2"]) == 0
    assert json.loads(report.read_text())["trial"] | {"seconds": 0} == {
        "sequences": 2,
        "tokens": {"t5": 512, "mixtral": 256}.get(name, 128),
        "seconds": 0,
        "finite": True,
        "peak_bytes": {},
        "planned_bytes": {},
        "within_plan": True,
    }


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--gpus", "4x40"], ExitCode.USAGE, "of what"),
        (["--gpus", "1x1MB"], ExitCode.OUT_OF_MEMORY, "lacks"),
        (["--device-map", "nowhere.json"], ExitCode.USAGE, "No such file"),
        (["--dtype", "bf16", "--quantization", "int8"], ExitCode.USAGE, "computes in fp16"),
        (["--adapter", "./nowhere"], ExitCode.MISSING, "no such folder"),
    ],
)
def test_exit_codes_tell_whether_another_try_can_help(
    small: Small, words: list[str], code: ExitCode, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert main([str(small("llama")), *words]) == code
    assert sentence in caplog.records[-1].getMessage()


def test_words_that_are_no_flags_end_at_once(small: Small, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--batch", "0"], ["--quantisatoin", "int8"], ["--dtype", "int3"]):
        with pytest.raises(SystemExit) as end:
            main([str(small("llama")), *words])
        assert end.value.code == ExitCode.USAGE
    assert "did you mean --quanti" in capsys.readouterr().err


def test_a_report_that_can_not_be_written(small: Small, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = [str(small("llama")), "--device-map", "cpu", "--no-trial", "--json", str(tmp_path / "file" / "report.json")]
    assert main(words) == ExitCode.CANNOT_WRITE


@pytest.mark.parametrize("content", ["[]", '{"a": []}', "no json", '{"a": null}', "[" * 100_000])
def test_files_that_are_no_device_map(content: str, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(content)
    with pytest.raises(UsageError, match="--device-map"):
        read_device_map(str(tmp_path / "map.json"))


def test_nothing_heavy_is_imported_for_help() -> None:
    heavy = "('torch', 'transformers', 'numpy')"
    code = f"import sys, gpuherd.models.load.worker; print([name for name in {heavy} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_log_names_the_model_and_the_gpus_that_are_shown(small: Small, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gpuherd"):
        assert main([str(small("llama")), "--device-map", "cpu", "--no-trial"]) == 0
    lines: list[Any] = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("Model: ") and lines[1] == "CUDA_VISIBLE_DEVICES: not set"
