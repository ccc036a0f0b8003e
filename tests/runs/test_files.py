"""What is written once is the first one's, on file systems without hard links too."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from gpuherd.errors import CannotWrite
from gpuherd.runs.files import create_file, creating_file, sha256_of, single_writer, write_lines, write_values


@pytest.fixture(params=[None, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK], ids=str, autouse=True)
def _links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: str, target: str, **_: object) -> None:
        raise OSError(request.param, os.strerror(request.param), source)

    if request.param is not None:
        monkeypatch.setattr(os, "link", link)


def test_the_first_one_stays_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run" / "run.json"
    assert create_file(path, b"first") == b"first"
    assert create_file(path, b"second") == b"first"
    assert [each.name for each in path.parent.iterdir()] == ["run.json"]


def test_nothing_is_there_where_the_writing_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), creating_file(tmp_path / "shards.json") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_one_that_came_first_while_we_wrote(tmp_path: Path) -> None:
    with creating_file(tmp_path / "shards.json") as file:
        file.write(b"late")
        create_file(tmp_path / "shards.json", b"early")
    assert (tmp_path / "shards.json").read_bytes() == b"early"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match="can't write"):
        create_file(tmp_path / "file" / "run.json", b"")


def test_lines_and_values_are_there_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "lines.jsonl"
    written = write_lines(target, (line for line in (b"1", b"22")))
    assert target.read_bytes() == b"1\n22\n" and (written.lines, written.sha256) == (2, sha256_of(target))

    def broken() -> Iterator[bytes]:
        yield b"other"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_lines(target, broken())
    assert target.read_bytes() == b"1\n22\n" and [each.name for each in target.parent.iterdir()] == ["lines.jsonl"]
    with pytest.raises(ValueError, match="JSON"):
        write_values(tmp_path / "values.json", {"x": float("nan")})
    assert not (tmp_path / "values.json").exists()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    folder, seen = tmp_path / "folder", []

    def write() -> None:
        with single_writer(folder):
            seen.append("second")

    with single_writer(folder):
        other = Thread(target=write)
        other.start()
        other.join(0.2)
        seen.append("first")
    other.join()
    assert seen == ["first", "second"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="can't write"), single_writer(tmp_path / "file" / "below"):
        pass
