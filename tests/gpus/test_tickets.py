"""Ticket files: who is believed to wait, what a hostile file means, and what is left behind."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.patience import wait_until

from gpuherd.gpus.tickets import MOST_OF_A_USER, Need, OwnTicket, TicketReader
from gpuherd.jobs import clock

NEED = Need(gpus=4, smallest=2, usable=frozenset(["GPU-a", "GPU-b"]), job_s=60.0, jobs=9)
BOB = 65_533
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "leases"
    place.mkdir()
    place.chmod(0o1777)
    return place


@pytest.fixture
def plant(folder: Path) -> Iterator[Callable[..., Path]]:
    """Makes a locked ticket of any owner and content, as its gpuherd would hold it."""
    held = []

    def make(content: object = None, *, uid: int = BOB, number: int = 0, named: int | None = None) -> Path:
        path = folder / f"{uid if named is None else named}.1.{number}.ticket"
        said = {"gpus": 1, "smallest": 1, "since": clock.mono()} if content is None else content
        path.write_text(said if isinstance(said, str) else json.dumps(said))
        os.chown(path, uid, uid)
        fd = os.open(path, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(fd)
        return path

    yield make
    for fd in held:
        os.close(fd)


def test_a_ticket_is_read_as_it_was_written_and_gone_when_withdrawn(folder: Path) -> None:
    now = clock.mono()
    own = OwnTicket()
    own.keep(folder, NEED, now)
    assert own.problem is None
    (found,) = TicketReader().read(folder, now)
    assert abs(found.since - now) < 0.1
    assert found == NEED.ticket(own.name, os.geteuid(), found.since)
    assert TicketReader().read(folder, now, own=own.name) == ()
    own.keep(folder, Need(gpus=1), now)
    assert [ticket.gpus for ticket in TicketReader().read(folder, now)] == [1]
    own.withdraw()
    assert list(folder.iterdir()) == []
    own.withdraw()


def test_nothing_is_written_while_nothing_changes(folder: Path) -> None:
    own = OwnTicket()
    own.keep(folder, NEED, 5.0)
    before = (folder / own.name).stat()
    own.keep(folder, NEED, 5.0)
    assert (folder / own.name).stat() == before
    own.withdraw()


def test_a_ticket_that_somebody_removed_is_made_again(folder: Path) -> None:
    own = OwnTicket()
    own.keep(folder, NEED, 5.0)
    (folder / own.name).unlink()
    own.keep(folder, Need(gpus=3), 5.0)
    assert [ticket.gpus for ticket in TicketReader().read(folder, clock.mono())] == [3]
    own.withdraw()


def test_all_users_can_read_it_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        own = OwnTicket()
        own.keep(folder, NEED, 5.0)
    finally:
        os.umask(before)
    assert (folder / own.name).stat().st_mode & 0o777 == 0o644
    own.withdraw()


def test_a_killed_gpuherd_waits_no_more_and_its_ticket_is_removed_by_the_next(folder: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from gpuherd.gpus.tickets import *;"
        "own = OwnTicket(); own.keep(Path(sys.argv[1]), Need(), 1.0); print(own.name, flush=True); time.sleep(60)"
    )
    waiting = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert waiting.stdout is not None
    name = waiting.stdout.readline().strip()
    reader = TicketReader()
    assert [ticket.key for ticket in reader.read(folder, clock.mono())] == [name]
    (folder / f".{os.geteuid()}.1.0.ticket").write_bytes(b"")  # killed while it made one
    waiting.send_signal(signal.SIGKILL)
    waiting.wait()
    waiting.stdout.close()
    wait_until(lambda: reader.read(folder, clock.mono()) == ())
    assert list(folder.iterdir()) == []


def test_a_full_disk_or_a_closed_folder_is_a_problem_and_no_more(folder: Path) -> None:
    own = OwnTicket()
    own.keep(folder / "missing", NEED, 5.0)
    assert "no ticket can be left" in str(own.problem)
    own.keep(folder, NEED, 5.0)
    assert own.problem is None
    own.withdraw()


@as_root
def test_what_is_planted_is_no_ticket(folder: Path, plant: Callable[..., Path]) -> None:
    now = clock.mono()
    plant(named=12_345)  # in somebody else's name
    plant({"gpus": 1, "since": "NaN"}, number=1)
    plant({"gpus": "all", "since": 1.0}, number=2)
    plant("[" * 5000, number=3)
    plant('{"gpus": 1', number=4)
    plant({"gpus": 1, "since": 1.0, "usable": [["a"]]}, number=5)
    plant({"gpus": True, "since": 1.0}, number=6)
    plant("", number=7)
    twice = plant(number=8)
    os.link(twice, folder / f"{BOB}.1.9.ticket")
    huge = plant(number=10)
    os.truncate(huge, 1 << 30)
    os.mkfifo(folder / f"{BOB}.1.11.ticket")
    (folder / f"{BOB}.1.12.ticket").symlink_to(plant(number=13))
    (folder / f"{BOB}.1.14.ticket").mkdir()
    (folder / f"{BOB}.1.\x1b[31m.ticket").touch()
    os.unlink(folder / f"{BOB}.1.13.ticket")
    began = time.monotonic()
    assert TicketReader().read(folder, now) == ()
    assert time.monotonic() - began < 1.0


@as_root
def test_absurd_numbers_are_bounded(folder: Path, plant: Callable[..., Path]) -> None:
    now = clock.mono()
    plant({"gpus": 10**30, "smallest": -5, "since": -1e300, "job_s": 1e300, "jobs": -1})
    (found,) = TicketReader().read(folder, now)
    assert (found.uid, found.gpus, found.smallest, found.jobs, found.job_s) == (BOB, 1024, 1, 0, 1e9)
    assert now - 10 <= found.since <= now  # not before the file was made
    plant({"gpus": 1, "since": 1e300, "job_s": -1}, number=1)
    late = TicketReader().read(folder, now)[1]
    assert (late.since, late.job_s) == (now, None)


@as_root
def test_who_has_watched_a_ticket_knows_for_how_long_it_waits(folder: Path, plant: Callable[..., Path]) -> None:
    """A clock that jumps back makes every file one of the future; what was seen counts, by a clock that can't jump."""
    now = clock.mono()
    path = plant({"gpus": 1, "since": now})
    reader = TicketReader()
    reader.read(folder, now)
    path.write_text(json.dumps({"gpus": 2, "since": now}))
    (found,) = reader.read(folder, now + 1000)
    assert found.gpus == 2
    assert found.since == pytest.approx(now, abs=0.1)
    (fresh,) = TicketReader().read(folder, now + 1000)
    assert fresh.since == pytest.approx(now + 1000, abs=5)


@as_root
def test_a_ticket_in_the_middle_of_a_change_says_what_it_said_before(folder: Path, plant: Callable[..., Path]) -> None:
    path, reader = plant(), TicketReader()
    assert len(reader.read(folder, clock.mono())) == 1
    path.write_text('{"gpus": 1,')
    assert len(reader.read(folder, clock.mono())) == 1
    path.write_text(json.dumps({"gpus": 7, "since": 1.0}))
    assert [ticket.gpus for ticket in reader.read(folder, clock.mono())] == [7]


@as_root
def test_of_very_many_only_some_are_read_and_no_one_is_pushed_out(folder: Path, plant: Callable[..., Path]) -> None:
    reader = TicketReader()
    plant(number=500)
    assert len(reader.read(folder, clock.mono())) == 1
    for number in range(100):
        plant(number=number)
        plant(uid=BOB - 1, named=BOB, number=600 + number)  # by another, in bob's name
    found = reader.read(folder, clock.mono())
    assert len(found) == MOST_OF_A_USER
    assert f"{BOB}.1.500.ticket" in {ticket.key for ticket in found}


@as_root
def test_tickets_of_others_stay_and_a_reader_hinders_nobody(folder: Path, plant: Callable[..., Path]) -> None:
    path = folder / f"{BOB}.1.0.ticket"
    path.write_text("{}")
    os.chown(path, BOB, BOB)
    assert TicketReader().read(folder, clock.mono()) == ()
    assert path.exists()
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the reader kept no lock
    os.close(fd)


def test_names_that_others_have_taken_are_gone_around(folder: Path) -> None:
    for number in range(3):
        (folder / f"{os.geteuid()}.{os.getpid()}.{number}.ticket").mkdir()
    own = OwnTicket()
    own.keep(folder, NEED, 5.0)
    assert own.problem is None
    assert own.name == f"{os.geteuid()}.{os.getpid()}.3.ticket"
    own.withdraw()
