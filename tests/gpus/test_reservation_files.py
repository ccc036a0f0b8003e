"""The files of reservations, among them planted and altered ones: nothing counts but what its owner really wrote."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import CannotWrite, UsageError
from gpuherd.gpus.lease_files import user_name
from gpuherd.gpus.leases import Holder
from gpuherd.gpus.machine_dir import ENVIRONMENT
from gpuherd.gpus.reservation_files import MOST_OF_USER, ReservationFolder, find, leases_since, parse
from gpuherd.gpus.reservations import Reservation, read

UID = os.geteuid()
NOW = time.time()
needs_root = pytest.mark.skipif(UID != 0, reason="only root can become other users")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReservationFolder]:
    """In a place that all users can get at."""
    place = Path(tempfile.mkdtemp(prefix="gpuherd-reservations-"))
    place.chmod(0o1777)
    monkeypatch.setenv(ENVIRONMENT, str(place))
    yield ReservationFolder.made()
    shutil.rmtree(place)


@pytest.fixture
def as_user() -> Iterator[Callable[[int], None]]:
    """``as_user(uid)`` acts as another user from here on."""

    def become(uid: int) -> None:
        os.seteuid(0)
        os.seteuid(uid)

    yield become
    os.seteuid(UID)


def content(**values: Any) -> bytes:
    plain = {"uuids": ["GPU-0"], "since": NOW, "until": NOW + 3600, "name": "n"}
    return json.dumps(plain | values).encode()


def test_what_is_made_is_read_by_all(folder: ReservationFolder) -> None:
    old = os.umask(0o077)
    try:
        made = folder.add(["GPU-0", "GPU-1"], NOW + 60, NOW + 3600, "thesis")
    finally:
        os.umask(old)
    assert folder.shared
    assert read() == (made,)
    assert (made.gpus, made.uuids, made.name, made.uid) == (2, ("GPU-0", "GPU-1"), "thesis", UID)
    assert abs(made.made - time.time()) < 60
    assert made.used is None
    assert (folder.path / f"{made.id}.reservation").stat().st_mode & 0o777 == 0o644
    assert folder.path.stat().st_mode & 0o7777 == 0o1777


def test_without_a_shared_folder_they_are_ones_own(tmp_path: Path) -> None:
    assert read() == ()
    own = ReservationFolder.made()
    assert not own.shared
    assert own.path.stat().st_mode & 0o777 == 0o700
    made = own.add(["GPU-0"], NOW, NOW + 60)
    assert read() == (made,)


def test_a_mark_of_use_counts_from_the_beginning_on(folder: ReservationFolder) -> None:
    early = folder.add(["GPU-0"], NOW + 3600, NOW + 7200)
    current = folder.add(["GPU-1"], NOW - 60, NOW + 7200)
    time.sleep(0.02)  # the kernel's time of files has ticks of some milliseconds
    folder.mark_used(early)
    folder.mark_used(current)
    by_id = {each.id: each for each in folder.read()}
    assert by_id[early.id].used is None
    used = by_id[current.id].used
    assert used is not None
    assert abs(used - time.time()) < 60
    # A mark that was removed comes back, but not for a reservation that was cancelled.
    (folder.path / f"{current.id}.used").unlink()
    folder.mark_used(current)
    assert folder.read()
    folder.remove(current)
    folder.mark_used(current)
    assert {path.name.partition(".")[0] for path in folder.path.iterdir()} == {early.id}


def test_changes_are_seen_and_unchanged_files_are_not_opened_again(
    folder: ReservationFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = folder.add(["GPU-0"], NOW, NOW + 60)
    reader = ReservationFolder(folder.path, shared=True)
    assert [each.id for each in reader.read()] == [first.id]
    second = folder.add(["GPU-1"], NOW, NOW + 60)
    assert {each.id for each in reader.read()} == {first.id, second.id}
    opened: list[object] = []
    real = os.open

    def note(path: str, *words: int, **named: int) -> int:
        opened.append(path)
        return real(path, *words, **named)

    monkeypatch.setattr(os, "open", note)
    assert len(reader.read()) == 2
    assert opened == []
    path = folder.path / f"{first.id}.reservation"
    path.write_bytes(content(uuids=["GPU-7"]))
    assert {each.uuids for each in reader.read()} == {("GPU-7",), ("GPU-1",)}
    folder.remove(second)
    assert [each.id for each in reader.read()] == [first.id]


def test_an_alteration_makes_it_a_later_one(folder: ReservationFolder) -> None:
    made = folder.add(["GPU-0"], NOW, NOW + 60)
    path = folder.path / f"{made.id}.reservation"
    time.sleep(0.02)
    path.write_bytes(content())
    os.utime(path, (1.0, 1.0))  # the time that a user can set counts for nothing
    (read_again,) = folder.read()
    assert read_again.made > made.made


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"uuids": ' + b"[" * 50_000,
        content(uuids=[]),
        content(uuids="GPU-0"),
        content(uuids=["GPU-0", "GPU-0"]),
        content(uuids=[["GPU-0"]]),
        content(uuids=[1]),
        content(uuids=["../../etc/passwd\n"]),
        content(uuids=["\x1b[31m"]),
        content(uuids=[f"GPU-{number}" for number in range(1025)]),
        content(since="now"),
        content(since=True),
        content(since=-1),
        content(until=NOW),
        content(until=1e300),
        content().replace(b'"until": ', b'"until": 1e999, "x": '),
        content().replace(b'"until": ', b'"until": NaN, "x": '),
        content().replace(b'"until": ', b'"until": ' + b"9" * 5000 + b', "x": '),
    ],
    ids=map(str, range(22)),
)
def test_content_that_is_none_means_nothing(data: bytes) -> None:
    assert parse(data, "1-aaaa", 1, 0.0) is None


@given(st.binary(max_size=200))
def test_no_content_is_too_strange(data: bytes) -> None:
    assert parse(data, "1-aaaa", 1, 0.0) is None


@given(st.text(max_size=500))
def test_names_are_safe_to_print(name: str) -> None:
    found = parse(json.dumps({"uuids": ["GPU-0"], "since": 1, "until": 2, "name": name}).encode(), "1-aaaa", 1, 0.0)
    assert found is not None
    assert len(found.name) <= 60
    assert "\x1b" not in found.name
    assert "\n" not in found.name


def test_files_that_are_no_plain_ones_mean_nothing(folder: ReservationFolder, tmp_path: Path) -> None:
    good = folder.add(["GPU-0"], NOW, NOW + 60)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(content())
    (folder.path / f"{UID}-aaaa.reservation").symlink_to(elsewhere)
    os.mkfifo(folder.path / f"{UID}-bbbb.reservation")
    (folder.path / f"{UID}-cccc.reservation").mkdir()
    os.link(elsewhere, folder.path / f"{UID}-dddd.reservation")
    with (folder.path / f"{UID}-eeee.reservation").open("wb") as file:
        file.write(content())
        file.truncate(1 << 30)
    for name in (
        "x-aaaa",
        f"{UID}-AAAA",
        f"{UID}-",
        f"{UID}-aaaa\n",
        f"-{UID}-aaaa",
        f"{UID}-aaaaaaaaa",
        "9" * 40 + "-aaaa",
    ):
        (folder.path / f"{name}.reservation").write_bytes(content())
    began = time.monotonic()
    assert [each.id for each in ReservationFolder(folder.path, shared=True).read()] == [good.id]
    assert time.monotonic() - began < 5


def test_only_the_newest_of_a_user_are_read(folder: ReservationFolder) -> None:
    for number in range(MOST_OF_USER + 5):
        (folder.path / f"{UID}-{number:04x}.reservation").write_bytes(content(uuids=[f"GPU-{number}"]))
        time.sleep(0.002)
    found = folder.read()
    assert {each.uuids[0] for each in found} == {f"GPU-{number}" for number in range(5, MOST_OF_USER + 5)}


@needs_root
def test_a_file_in_the_name_of_another_user_means_nothing(
    folder: ReservationFolder, as_user: Callable[[int], None]
) -> None:
    as_user(65_534)
    for number in range(MOST_OF_USER + 5):  # nor do many displace those of the other
        (folder.path / f"65533-{number:04x}.reservation").write_bytes(content())
    as_user(65_533)
    made = ReservationFolder(folder.path, shared=True).add(["GPU-0"], NOW, NOW + 60)
    assert made.id.startswith("65533-")
    as_user(0)
    assert [each.id for each in folder.read()] == [made.id]


@needs_root
def test_a_mark_that_another_user_planted_means_nothing_and_theirs_can_t_be_removed(
    folder: ReservationFolder, as_user: Callable[[int], None]
) -> None:
    as_user(65_533)
    made = ReservationFolder(folder.path, shared=True).add(["GPU-0"], NOW - 60, NOW + 60)
    as_user(65_534)
    mark = folder.path / f"{made.id}.used"
    with pytest.raises(OSError, match="not permitted"):
        mark.unlink()
    with pytest.raises(CannotWrite, match="can't be removed"):
        ReservationFolder(folder.path, shared=True).remove(made)
    as_user(0)
    mark.unlink()
    as_user(65_534)
    mark.touch()
    as_user(65_533)
    with pytest.raises(OSError, match="denied"):
        ReservationFolder(folder.path, shared=True).mark_used(made)
    assert ReservationFolder(folder.path, shared=True).read()[0].used is None


@needs_root
def test_a_folder_in_which_all_can_replace_files_is_not_believed(folder: ReservationFolder) -> None:
    folder.add(["GPU-0"], NOW, NOW + 60)
    folder.path.chmod(0o777)
    assert read() == ()
    with pytest.raises(CannotWrite, match="replace the files of others"):
        ReservationFolder.made()


def test_a_full_disk_leaves_nothing_behind(folder: ReservationFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CannotWrite, match="No space left"):
        folder.add(["GPU-0"], NOW, NOW + 60)
    assert list(folder.path.iterdir()) == []


def test_old_ones_are_removed_and_those_to_come_stay(folder: ReservationFolder) -> None:
    long_ago = folder.add(["GPU-0"], NOW - 50 * 86400, NOW - 40 * 86400)
    ended = [folder.add([f"GPU-{number}"], NOW - 7200, NOW - 3600 - number) for number in range(26)]
    coming = folder.add(["GPU-0"], NOW + 60, NOW + 3600)
    stray = folder.path / f".{UID}-abcd.reservation.0123.tmp"
    lost = folder.path / f"{UID}-ffff.used"
    for path in (stray, lost):
        path.touch()
        os.utime(path, (NOW - 7200, NOW - 7200))
    folder.tidy(NOW)
    left = {each.id for each in folder.read()}
    assert long_ago.id not in left
    assert coming.id in left
    assert left - {coming.id} == {each.id for each in ended[:24]}
    assert not stray.exists()
    assert not lost.exists()
    assert len(list(folder.path.iterdir())) == 2 * len(left)


def test_finding_by_id() -> None:
    mine = Reservation("7-aaaa", 7, 1, ("GPU-0",), 0.0, 1.0)
    other = Reservation("8-aaaa", 8, 1, ("GPU-0",), 0.0, 1.0)
    assert find([mine, other], "aaaa", 7) is mine
    assert find([mine, other], "aaaa", 8) is other
    assert find([mine, other], "8-aaaa", 7) is other
    with pytest.raises(UsageError, match="there is no reservation 'bbbb'; yours are 7-aaaa"):
        find([mine, other], "bbbb", 7)
    with pytest.raises(UsageError, match="you have none"):
        find([other], "aaaa", 7)


def test_only_leases_of_the_owner_count() -> None:
    one = Reservation(f"{UID}-aaaa", UID, 2, ("GPU-0", "GPU-1"), 0.0, 1.0)
    mine = Holder("GPU-0", 1, user_name(UID), 5.0)
    later = Holder("GPU-1", 1, user_name(UID), 9.0)
    assert leases_since([one], {"GPU-0": mine, "GPU-1": later}) == {one.id: 5.0}
    assert leases_since([one], {"GPU-0": Holder("GPU-0", 1, None, 5.0)}) == {}
    assert leases_since([one], {"GPU-0": Holder("GPU-0", 1, "somebody-else", 5.0)}) == {}
    assert leases_since([one], {"GPU-0": Holder("GPU-0", 1, user_name(UID), None)}) == {}
