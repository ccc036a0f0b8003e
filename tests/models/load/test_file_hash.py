"""Hashes of files are those of the whole content, and a kept one never passes for a file that has changed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
from pathlib import Path

import pytest
from rich.console import Console

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models.checkpoints.stored import FileStamp
from gpuherd.models.load import identity
from gpuherd.models.load.identity import hashes_of
from gpuherd.runs.console import of_bytes


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gpuherd" / "hashes"


def weights(folder: Path, name: str = "model.safetensors", size: int = 3 << 20) -> Path:
    """A file that nobody has written to for a while."""
    path = folder / name
    path.write_bytes(os.urandom(size))
    return aged(path)


def aged(path: Path) -> Path:
    os.utime(path, (1e9, 1e9))
    return path


def true_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose content is read; change times count as old, which no test can make so."""
    monkeypatch.setattr(identity, "_SETTLED_NS", -(10**18))
    seen: list[Path] = []
    hashed = identity._hash

    def noted(stamp: FileStamp, *rest: object) -> str:
        seen.append(stamp.path)
        return hashed(stamp, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(identity, "_hash", noted)
    return seen


def test_a_large_file_is_read_once_and_again_after_any_change(tmp_path: Path, read: list[Path]) -> None:
    one, other = weights(tmp_path, "one"), weights(tmp_path, "other")
    assert hashes_of([one, other]) == {one: true_hash(one), other: true_hash(other)}
    assert hashes_of([one, other]) == {one: true_hash(one), other: true_hash(other)}
    assert sorted(read) == [one, other]
    read.clear()

    with one.open("r+b") as file:  # in place: size and inode stay, and the modification time is set back
        file.seek(1 << 20)
        file.write(b"other weights")
    aged(one)
    assert hashes_of([one, other])[one] == true_hash(one)
    assert read == [one]
    read.clear()

    replaced = weights(tmp_path, "new")
    replaced.replace(other)  # another inode
    assert hashes_of([other])[other] == true_hash(other)
    assert read == [other]


def test_a_file_written_a_moment_ago_is_not_kept(tmp_path: Path, cache: Path) -> None:
    path = weights(tmp_path)  # its change time is now, whatever the modification time says
    assert hashes_of([path])[path] == true_hash(path)
    assert not cache.exists()


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"\xff\0", b"[]", b'{"sha256": "0"}', b"[" * 100_000, None], ids=lambda each: str(each)[:12]
)
def test_a_damaged_cache_costs_a_reading(tmp_path: Path, cache: Path, read: list[Path], damage: bytes | None) -> None:
    path = weights(tmp_path)
    hashes_of([path])
    (entry,) = cache.iterdir()
    if damage is None:  # everything right but the hash
        entry.write_text(json.dumps(json.loads(entry.read_bytes()) | {"sha256": "../../etc"}))
    else:
        entry.write_bytes(damage)
    assert hashes_of([path])[path] == true_hash(path)
    assert len(read) == 2
    hashes_of([path])
    assert len(read) == 2, "the entry was made good"


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, read: list[Path]) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    path = weights(tmp_path)
    for _ in range(2):
        assert hashes_of([path])[path] == true_hash(path)
    assert read == [path, path]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MissingModel, match="is not there"):
        hashes_of([tmp_path / "nothing"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadModel, match="no regular file"):
        hashes_of([tmp_path / "pipe"])


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = weights(tmp_path, size=20 << 20)
    stamp, changed_ns = identity._looked(path)
    with pytest.raises(BadModel, match="was changed while it was being read"):
        identity._hash(stamp, changed_ns, lambda _: path.touch(), threading.Event())


def test_one_bad_file_ends_the_reading_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, gone = weights(tmp_path, "good", 40 << 20), weights(tmp_path, "gone")
    looked = identity._looked

    def vanishing(path: Path) -> tuple[FileStamp, int]:
        found = looked(path)
        if path == good:
            gone.unlink()
        return found

    monkeypatch.setattr(identity, "_looked", vanishing)
    with pytest.raises(MissingModel, match="gone is not there"):
        hashes_of([gone, good])


def test_what_takes_long_is_shown() -> None:
    times = iter([0.0, 1.0, 3.0, 4.0])
    piped = io.StringIO()
    with of_bytes(Console(file=piped, width=100), 5 * 10**9, "reading", lambda: next(times)) as advance:
        advance(10**9)
        assert piped.getvalue() == ""
        advance(10**9)
        advance(10**9)
    assert piped.getvalue() == "reading (5.0 GB)\n"

    times = iter([0.0, 3.0])
    terminal = io.StringIO()
    with of_bytes(Console(file=terminal, width=100, force_terminal=True), 8, "reading", lambda: next(times)) as advance:
        advance(4)
    assert "4/8 bytes" in terminal.getvalue()
