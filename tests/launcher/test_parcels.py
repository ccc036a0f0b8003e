"""What a sweep and its jobs hand each other is read only where nobody else can have written it."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from hydra_plugins.gpuherd_launcher import _parcels


def test_several_things_are_read_one_by_one_by_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a"
    _parcels.write(path, ["x"], {"y": lambda: 3}, lasting=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with _parcels.open_ours(path) as file:
        assert _parcels.read(file) == ["x"]
        assert _parcels.read(file)["y"]() == 3
    assert os.listdir(tmp_path) == ["a"]


def test_what_can_not_be_pickled_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    _parcels.write(path, 1)
    with pytest.raises(TypeError):
        _parcels.write(path, threading.Lock())
    assert _parcels.read_one(path) == 1
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_not_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a"
    _parcels.write(path, 1)
    path.chmod(mode)
    with pytest.raises(_parcels.NotOurs, match="is not read"):
        _parcels.read_one(path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    _parcels.write(tmp_path / "a", 1)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links"):
        _parcels.read_one(tmp_path / "b")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    _parcels.write(path, 1)
    os.chown(path, 12345, -1)
    with pytest.raises(_parcels.NotOurs):
        _parcels.read_one(path)


def test_a_file_named_by_its_content_is_never_another(tmp_path: Path) -> None:
    first, second = _parcels.write_named(tmp_path, "program", 1), _parcels.write_named(tmp_path, "program", 2)
    assert (_parcels.read_one(first), _parcels.read_one(second)) == (1, 2)
    assert _parcels.write_named(tmp_path, "program", 1) == first
