"""Checkpoints of TRL's trainers are complete or absent."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gpuherd.errors import UsageError
from gpuherd.posttrain.preference import checkpoints

OURS = {"model": "m", "options": [1, 2], "data": "d"}


def made(folder: Path, step: int, *, whole: bool = True) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    if whole:
        checkpoints.finish(path, OURS)
    return path


def test_the_newest_by_number(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path / "none", OURS) is None
    for step in (9, 10, 100):
        made(tmp_path, step)
    (tmp_path / "checkpoint-x").mkdir()
    assert checkpoints.newest(tmp_path, OURS) == tmp_path / "checkpoint-100"


def test_half_a_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = made(tmp_path, 4)
    made(tmp_path, 8, whole=False)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest(tmp_path, OURS) == whole
    assert "checkpoint-8 is no whole checkpoint" in caplog.text
    (whole / checkpoints.WHOLE).write_text("{")
    assert checkpoints.newest(tmp_path, OURS) is None


def test_that_of_another_training_is_refused(tmp_path: Path) -> None:
    made(tmp_path, 4)
    with pytest.raises(UsageError, match=r'checkpoint-4 is of another training: its model is "m", and here it is "n"'):
        checkpoints.newest(tmp_path, {**OURS, "model": "n"})
    with pytest.raises(UsageError, match="its lora is null, and here it is 8"):
        checkpoints.newest(tmp_path, {**OURS, "lora": 8})
    assert checkpoints.newest(tmp_path, {**OURS, "options": (1, 2)}) is not None


def test_old_ones_go_and_their_mark_first(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        made(tmp_path, step, whole=step != 3)
    checkpoints.rotate(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]
