"""Of several that give one name to a file one wins, whole from the first moment, also where there are no hard links."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gpuherd import atomic
from gpuherd.atomic import NO_LINKS, put_first

WAYS = ("link", "rename", "turn")


def without_links(number: int = errno.EPERM) -> Any:
    def link(source: str, target: str, **_: object) -> None:
        raise OSError(number, os.strerror(number), source)

    return link


class NoRename:
    """A C library on a file system, or of an age, that knows no rename that replaces nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    @staticmethod
    def renameat2(*_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1


def take_away(way: str, monkeypatch: pytest.MonkeyPatch, number: int = errno.EPERM) -> None:
    if way != "link":
        monkeypatch.setattr(os, "link", without_links(number))
    if way == "turn":
        monkeypatch.setattr(ctypes, "CDLL", NoRename)


def finished(folder: Path, text: str) -> Path:
    path = folder / f".{text}.tmp"
    path.write_text(text)
    return path


@pytest.mark.parametrize("way", WAYS)
def test_the_first_one_stays(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(way, monkeypatch)
    path = tmp_path / "run.json"
    assert put_first(finished(tmp_path, "first"), path)
    assert not put_first(finished(tmp_path, "second"), path)
    assert path.read_text() == "first"
    assert (tmp_path / ".second.tmp").read_text() == "second", "the loser's is the caller's to remove"
    left = {each.name for each in tmp_path.iterdir()} - {".first.tmp", ".second.tmp"}
    assert left == {"run.json"}


@pytest.mark.parametrize("number", sorted(NO_LINKS), ids=errno.errorcode.get)
def test_every_way_of_saying_that_there_are_no_links(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away("rename", monkeypatch, number)
    assert put_first(finished(tmp_path, "first"), tmp_path / "file")
    assert not put_first(finished(tmp_path, "second"), tmp_path / "file")


@pytest.mark.parametrize("way", WAYS)
def test_other_errors_are_raised(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(way, monkeypatch)
    with pytest.raises(FileNotFoundError):
        put_first(finished(tmp_path, "first"), tmp_path / "nowhere" / "file")
    if way == "link":
        take_away("rename", monkeypatch, errno.ENOSPC)
        with pytest.raises(OSError, match="No space left"):
            put_first(finished(tmp_path, "second"), tmp_path / "file")
        assert not (tmp_path / "file").exists()


def _race(way: str, folder: str, number: int, start: Any, won: Any) -> None:
    if way != "link":
        os.link = without_links()
    if way == "turn":
        ctypes.CDLL = NoRename  # type: ignore[assignment, misc]
    start.wait()
    for turn in range(20):
        mine = finished(Path(folder), f"{turn}-{number}")
        if put_first(mine, Path(folder) / f"file{turn}"):
            won.put((turn, number))
    won.put(None)


@pytest.mark.parametrize("way", WAYS)
def test_of_many_processes_one_wins_each_time(way: str, tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork")
    start, won = forked.Barrier(6), forked.Queue()
    processes = [forked.Process(target=_race, args=(way, str(tmp_path), number, start, won)) for number in range(6)]
    for process in processes:
        process.start()
    said, ended = [], 0
    while ended < len(processes):
        each = won.get(timeout=60)
        ended += each is None
        said += [] if each is None else [each]
    for process in processes:
        process.join()
    assert sorted(turn for turn, _ in said) == list(range(20))
    for turn, number in said:
        assert (tmp_path / f"file{turn}").read_text() == f"{turn}-{number}"


def test_one_that_was_killed_in_its_turn_does_not_hold_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away("turn", monkeypatch)
    monkeypatch.setattr(atomic, "_SILENT_S", 0.2)
    turn = tmp_path / ".file.turn"
    turn.touch()
    assert put_first(finished(tmp_path, "first"), tmp_path / "file")
    assert not turn.exists()

    turn.touch()  # of one at work, which is waited for

    def at_work() -> None:
        time.sleep(0.05)
        (tmp_path / "other").write_text("the other's")
        turn.rename(tmp_path / "its turn is over")

    turn = turn.rename(tmp_path / ".other.turn")
    monkeypatch.setattr(atomic, "_SILENT_S", 60)
    thread = threading.Thread(target=at_work)
    thread.start()
    assert not put_first(finished(tmp_path, "second"), tmp_path / "other")
    thread.join()
    assert (tmp_path / "other").read_text() == "the other's"


def test_a_link_whose_answer_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS: the link was made, its answer lost, and the client's second try finds the name there."""
    real = os.link
    for number in (errno.EEXIST, errno.EIO):

        def link(source: str, target: str, number: int = number) -> None:
            real(source, target)
            raise OSError(number, os.strerror(number), target)

        monkeypatch.setattr(os, "link", link)
        assert put_first(finished(tmp_path, f"of {number}"), tmp_path / f"file{number}")
