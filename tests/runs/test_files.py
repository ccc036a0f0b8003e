"""What is written once is the first one's, on file systems without hard links too."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpuherd.errors import CannotWrite
from gpuherd.runs.files import write_once, writing_once


@pytest.fixture(params=[None, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK], ids=str, autouse=True)
def _links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: str, target: str, **_: object) -> None:
        raise OSError(request.param, os.strerror(request.param), source)

    if request.param is not None:
        monkeypatch.setattr(os, "link", link)


def test_the_first_one_stays_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run" / "run.json"
    assert write_once(path, b"first") == b"first"
    assert write_once(path, b"second") == b"first"
    assert [each.name for each in path.parent.iterdir()] == ["run.json"]


def test_nothing_is_there_where_the_writing_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), writing_once(tmp_path / "shards.json") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_one_that_came_first_while_we_wrote(tmp_path: Path) -> None:
    with writing_once(tmp_path / "shards.json") as file:
        file.write(b"late")
        write_once(tmp_path / "shards.json", b"early")
    assert (tmp_path / "shards.json").read_bytes() == b"early"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match="can't write"):
        write_once(tmp_path / "file" / "run.json", b"")
