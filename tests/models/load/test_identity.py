"""A model is known by its files: the same content anywhere is the same model, a change is another."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpuherd.errors import MissingModel
from gpuherd.models.load.identity import files_digest, model_files, tokenizer_in


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_same_files_elsewhere_are_the_same_model(trained: Path, tmp_path: Path) -> None:
    first = model_files(str(trained))
    assert first.config_folder == first.tokenizer_folder == trained
    copy = Path(shutil.copytree(trained, tmp_path / "copy"))
    os.utime(copy / "config.json", (1, 1))
    (copy / "notes.md").write_text("no part of the model")
    assert model_files(str(copy)).sha256 == first.sha256
    assert model_files(f"{copy}-8bit").sha256 == first.sha256


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_change_of_any_file_is_seen(trained: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(trained, tmp_path / "copy"))
    data = bytearray((copy / name).read_bytes())
    data[-2] ^= 1
    (copy / name).write_bytes(data)
    assert model_files(str(copy)).sha256 != model_files(str(trained)).sha256


def large(folder: Path) -> Path:
    """A model whose weights are a file of 40 MiB, most of it a hole."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(40 << 20)
    return folder


def rewrite(folder: Path, start: int, count: int) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(start)
        file.write(b"w" * count)


def test_a_change_anywhere_in_a_large_file_is_seen(tmp_path: Path) -> None:
    folder = large(tmp_path / "large")
    digests = [model_files(str(folder)).sha256]
    # Between the pieces that earlier versions compared, of which there are 64.
    for start in (0, (1 << 20) + 100, (40 << 20) * 30 // 64 + (16 << 10), (40 << 20) - 1):
        rewrite(folder, start, 1)
        digests.append(model_files(str(folder)).sha256)
    assert len(set(digests)) == 5


@pytest.mark.parametrize("name", ["model-00001-of-00002.gguf", "vocab.bpe", "tokens.vocab"])
def test_files_of_every_kind_that_loading_reads_count(tmp_path: Path, name: str) -> None:
    folder = large(tmp_path / "large")
    before = model_files(str(folder)).sha256
    (folder / name).write_bytes(b"other")
    assert model_files(str(folder)).sha256 != before


def test_the_digest_of_an_earlier_version_is_told_from_another_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = large(tmp_path / "large")
    recorded = "b1ed4806d1ffb178311a071f77d01f74a18bf2993706ff45510820650bcc1ffa"  # of the pieces of these files
    assert files_digest(folder) != recorded
    assert not caplog.records
    assert files_digest(folder, recorded=recorded) == recorded
    assert "compared weight files of over 32 MiB by pieces only" in caplog.text and str(folder) in caplog.text
    caplog.clear()
    rewrite(folder, 0, 1)  # in a piece
    assert files_digest(folder, recorded=recorded) == files_digest(folder) != recorded
    assert not caplog.records


def test_the_digest_of_an_earlier_version_stays_that_of_small_files(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    assert files_digest(folder) == "3a09d3f07a1771cfa6986c46eaa36fe38abcc1fd50f73c90d6e854121a4b5099"


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(MissingModel, match="has no tokenizer"):
        tokenizer_in(tmp_path)
    with pytest.raises(MissingModel):
        model_files(str(tmp_path / "nothing"))
