"""``gpuherd merge`` as people call it: on a small real model and an adapter that PEFT has made of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from tests.models.conftest import build
from tests.models.local_hub import play, running
from tests.models.peft_adapters import save_adapter

from gpuherd.cli.main import run
from gpuherd.errors import BadModel, CannotWrite, ExitCode, UsageError
from gpuherd.models.checkpoints.hub import locate
from gpuherd.models.names import parse_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and an adapter that names it."""
    folder = tmp_path_factory.mktemp("merge")
    model = build("llama").bfloat16()
    model.save_pretrained(folder / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_adapter(model, folder / "adapter", target_modules=["q_proj", "v_proj"])
    config = folder / "adapter" / "adapter_config.json"
    named = {**json.loads(config.read_text()), "base_model_name_or_path": str(folder / "base")}
    config.write_text(json.dumps(named))
    return folder / "base", folder / "adapter"


def as_json(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert run([*map(str, words), "--json"]) == ExitCode.OK
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_it_says_what_it_has_done(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = pair
    assert run(["merge", str(adapter), "--output-dir", str(tmp_path / "out")]) == ExitCode.OK
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0] == f"{adapter} is merged into {base}: {tmp_path / 'out'}"
    assert lines[1] == "4 of 21 tensors changed, 19,616 parameters in bf16, 0.0 GiB in one file"
    assert lines[2] == f"next: gpuherd plan {tmp_path / 'out'}" and len(lines) == 3
    assert told.err == ""
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert len(tensors) == 21 and {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    again = as_json(capsys, "merge", adapter, "--output-dir", tmp_path / "out")
    assert again["was_there"] and again["base_model"] == str(base)


def test_another_base_and_another_format(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = pair
    words = ["merge", adapter, "--output-dir", tmp_path / "out", "--base-model", base, "--dtype", "fp32"]
    told = as_json(capsys, *words, "--shard-size", "1MB")
    assert told["dtype"] == "fp32" and told["bytes"] == 4 * told["params"] == 4 * 19_616
    assert told["tensors"] == 21 and len(told["changed"]) == 4 and not told["was_there"]
    assert told["files"] == ["model.safetensors"]


def test_a_dry_run_writes_nothing(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, adapter = pair
    told = as_json(capsys, "merge", adapter, "--output-dir", tmp_path / "out", "--dry-run")
    assert told["dry_run"] and told["files"] == ["model.safetensors"] and told["params"] == 19_616
    assert not list(tmp_path.iterdir())
    assert run(["merge", str(adapter), "--output-dir", str(tmp_path / "out"), "--dry-run"]) == ExitCode.OK
    assert "would be merged" in capsys.readouterr().out


def test_what_is_wrong_is_said(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = pair
    out = ["--output-dir", str(tmp_path / "out")]
    with pytest.raises(BadModel, match="is no adapter"):
        run(["merge", str(base), *out])
    with pytest.raises(UsageError, match="--shard-size: 'big' is not a size"):
        run(["merge", str(adapter), *out, "--shard-size", "big"])
    with pytest.raises(BadModel, match="is itself an adapter"):
        run(["merge", str(adapter), *out, "--base-model", str(adapter), "--json"])
    assert json.loads(capsys.readouterr().out)["exit_code"] == ExitCode.BAD_INPUT
    nameless = tmp_path / "nameless"
    nameless.mkdir()
    for path in adapter.iterdir():
        (nameless / path.name).write_bytes(path.read_bytes())
    config = json.loads((nameless / "adapter_config.json").read_text())
    (nameless / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(UsageError, match="names no base model; give it by --base-model"):
        run(["merge", str(nameless), *out])
    # A path of the machine that it was trained on.
    for named in ("/content/gone", "C:\\models\\gone"):
        (nameless / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": named}))
        for more in ([], ["--dry-run"]):
            with pytest.raises(BadModel, match=r"gone.*the adapter names this base; --base-model gives another"):
                run(["merge", str(nameless), *out, *more])
    with pytest.raises(BadModel, match=r"there is no such folder or file$"):
        run(["merge", str(nameless), *out, "--base-model", "/content/gone"])
    with pytest.raises(SystemExit):
        run(["merge", str(adapter), *out, "--dtype", "int8"])
    assert not (tmp_path / "out").exists()


def test_where_no_result_can_be_put_is_said_first(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is downloaded, and in a dry run too."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("all of it")
    cases = {"": "is empty", str(tmp_path / "full"): "is not empty, and what is in it is no merge",
             "~no.such.user/x": "Could not determine home directory"}  # fmt: skip
    with running() as hub:
        play(monkeypatch, hub.url, tmp_path / "hub")
        for output, reason in cases.items():
            for more in ([], ["--dry-run"]):
                with pytest.raises(UsageError, match=reason):
                    run(["merge", "org/model", "--output-dir", output, *more])
        assert not hub.asked
        # Nor is a base downloaded for an adapter that can't be merged.
        hub.repos["org/adapter"] = {
            "adapter_config.json": b'{"peft_type": "IA3", "base_model_name_or_path": "org/model"}',
            "adapter_model.safetensors": save({"base_model.model.layer.ia3_l": torch.ones(3)}),
        }
        with pytest.raises(BadModel, match="is an adapter of the method IA3"):
            run(["merge", "org/adapter", "--output-dir", str(tmp_path / "out")])
        assert not any(path.startswith("/org/model") for path in hub.asked)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "hub"]


def test_a_dry_run_of_a_base_that_can_not_be_merged_into(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its headers alone: quantised, or too large for the disk."""
    base, adapter = pair
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    codes = {name: torch.ones(tensors[name].shape, dtype=torch.int8), name.replace("weight", "SCB"): torch.ones(32)}
    four = {name: torch.ones(512, 1, dtype=torch.uint8), f"{name}.absmax": torch.ones(16)}
    words = ["merge", str(adapter), "--dry-run", "--output-dir", str(tmp_path / "out"), "--base-model"]
    with running() as hub:
        play(monkeypatch, hub.url, tmp_path / "hub")
        for number, odd in enumerate((codes, four)):
            hub.repos[f"org/base{number}"] = {
                "config.json": (base / "config.json").read_bytes(), "model.safetensors": save({**tensors, **odd}),
            }  # fmt: skip
            with pytest.raises(BadModel, match=r"the base is quantised \(bitsandbytes .-bit\)"):
                run([*words, f"org/base{number}"])
    usage = shutil.disk_usage(tmp_path)._replace(free=5)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CannotWrite, match="the merged model 'out' takes 1 MB"):
        run([*words, str(base)])


def test_a_dry_run_after_an_interrupted_download(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = pair
    tensors = load_file(base / "model.safetensors")
    parts: dict[str, dict[str, torch.Tensor]] = {f"model-0000{number}-of-00002.safetensors": {} for number in (1, 2)}
    for number, name in enumerate(tensors):
        parts[list(parts)[number % 2]][name] = tensors[name]
    weight_map = {name: file for file, part in parts.items() for name in part}
    with running() as hub:
        hub.repos["org/base"] = {
            "config.json": (base / "config.json").read_bytes(),
            "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
            **{file: save(part) for file, part in parts.items()},
        }
        play(monkeypatch, hub.url, tmp_path / "hub")
        folder = locate(parse_model("org/base"))
        (folder / next(iter(parts))).unlink()
        words = ["merge", adapter, "--output-dir", tmp_path / "x y"]
        told = as_json(capsys, *words, "--base-model", "org/base", "--dry-run")
        assert told["tensors"] == 21 and told["params"] == 19_616
    assert run(["merge", str(adapter), "--output-dir", str(tmp_path / "x y")]) == ExitCode.OK
    assert f"next: gpuherd plan '{tmp_path / 'x y'}'" in capsys.readouterr().out


def test_both_from_the_hub(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A dry run fetches the adapter and asks for the base's headers; the merge then downloads what it needs."""
    base, adapter = pair
    with running() as hub:
        hub.repos["org/base"] = {path.name: path.read_bytes() for path in base.iterdir()}
        hub.repos["org/base"]["tokenizer.json"] = b"{}"
        hub.repos["org/adapter"] = {path.name: path.read_bytes() for path in adapter.iterdir() if path.is_file()}
        environment = {
            **os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }  # fmt: skip
        words = [sys.executable, "-m", "gpuherd", "merge", "org/adapter", "--base-model", "org/base@main", "--json"]
        told = []
        for options in (["--dry-run"], []):
            done = subprocess.run(
                [*words, "--output-dir", str(tmp_path / "out"), *options],
                env=environment, capture_output=True, text=True, timeout=100,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            told.append(json.loads(done.stdout))
            assert (tmp_path / "out").exists() is not told[-1]["dry_run"]
            fetched = any(path.endswith("tokenizer.json") for path in hub.asked)
            assert fetched is not told[-1]["dry_run"]
    tried, merged = told
    assert tried["files"] == [] and merged["files"] == ["model.safetensors"]
    assert all(tried[key] == merged[key] for key in ("params", "bytes", "changed", "dtype", "tensors"))
    assert (tmp_path / "out" / "tokenizer.json").exists()
