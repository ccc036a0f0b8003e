"""What one process writes, whoever is killed, whatever others put in its way, and with a disk that is full."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests import small_disk
from tests.ledger.uses import use

from gpuherd.engines.process_tree import ProcessId, identify
from gpuherd.gpus import machine_dir
from gpuherd.ledger.files import FULL_LOG, log_path, logs_in, month_of, open_files_in, open_path, open_text
from gpuherd.ledger.reader import Ledger, believed
from gpuherd.ledger.recorder import Recorder
from gpuherd.ledger.records import Kind, Recorded, Use, line_of

ME = os.geteuid()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "ledger"
    place.mkdir()
    return place


def mine(name: str = "a", **fields: object) -> Use:
    return use(name, uid=ME, **fields)  # type: ignore[arg-type]


def read(folder: Path) -> dict[str, float]:
    ledger = Ledger(folder, shared=False)
    return {record.use.id: record.use.held_s for record in believed(ledger.read(), ME)}


def dead() -> ProcessId:
    """A process of this boot that has ended."""
    process = subprocess.Popen(["sleep", "60"])
    found = identify(process.pid)
    process.kill()
    process.wait()
    assert found is not None
    return found


def test_what_goes_on_and_what_has_ended_is_read(folder: Path) -> None:
    recorder = Recorder(folder)
    recorder.begin()
    recorder.sample([mine("a", held_s=5.0), mine("b", held_s=7.0)])
    assert read(folder) == {"a": 5.0, "b": 7.0}
    assert [record.is_open for record in Ledger(folder, shared=False).read()] == [True, True]
    recorder.end([mine("a", held_s=6.0)])
    assert read(folder) == {"a": 6.0, "b": 7.0}
    recorder.close([mine("b", held_s=8.0)])
    assert read(folder) == {"a": 6.0, "b": 8.0}
    assert list(open_files_in(folder)) == []
    assert [record.is_open for record in Ledger(folder, shared=False).read()] == [False, False]


def test_a_year_lies_in_its_months(folder: Path) -> None:
    recorder = Recorder(folder)
    recorder.end(mine(str(month), since=1_700_000_000.0 + month * 2_700_000) for month in range(12))
    logs = logs_in(folder)
    assert len(logs) == 12
    ledger = Ledger(folder, shared=False)
    since, until = 1_700_000_000.0 + 5 * 2_700_000, 1_700_000_000.0 + 7 * 2_700_000
    assert [record.use.id for record in ledger.read(since, until)] == ["5", "6", "7"]


def test_the_next_recorder_appends_what_a_dead_one_left_open(folder: Path) -> None:
    process = dead()
    open_path(folder, ME, process, 0).write_bytes(open_text(process, [line_of(mine("a")), line_of(mine("b"))]))
    assert read(folder) == {"a": 100.0, "b": 100.0}
    recorder = Recorder(folder)
    recorder.begin()
    assert recorder.recovered.keys() == {"a", "b"}
    assert list(open_files_in(folder)) == []
    assert read(folder) == {"a": 100.0, "b": 100.0}
    # One of them goes on under the same id: only the longer record counts.
    recorder.sample([mine("a", held_s=150.0)])
    assert read(folder) == {"a": 150.0, "b": 100.0}
    recorder.close([mine("a", held_s=160.0)])
    assert read(folder) == {"a": 160.0, "b": 100.0}


def write_forever(folder: Path, first: int, told: int) -> None:
    """Each use has ten samples of a second; that one has ended is told after it is recorded."""
    recorder = Recorder(folder)
    recorder.begin()
    while True:
        for held in range(1, 11):
            recorder.sample([mine(f"u{first}", held_s=float(held))])
        recorder.end([mine(f"u{first}", held_s=10.5)])
        os.write(told, b"%d\n" % first)
        first += 1


def test_killed_at_fifty_instants_nothing_is_lost_or_counted_twice(folder: Path) -> None:
    chance = random.Random(7)
    ended: set[int] = set()
    for turn in range(50):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write_forever(folder, turn * 1000, write_end)
            finally:
                os._exit(1)
        os.close(write_end)
        with os.fdopen(read_end) as told:
            for _ in range(chance.randrange(3)):
                ended.add(int(told.readline()))
            time.sleep(chance.uniform(0, 0.003))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            ended |= {int(line) for line in told}
        # What it said has ended is there as a whole.
        found = read(folder)
        assert all(found[f"u{number}"] == 10.5 for number in ended)
    assert len(ended) > 20
    # Beyond that at most the one that went on, of each.
    others = [found[name] for name in found if int(name[1:]) not in ended]
    assert len(others) <= 50
    assert all(1 <= held_s <= 10.5 for held_s in others)
    last = Recorder(folder)
    last.begin()
    assert read(folder) == found
    assert list(open_files_in(folder)) == []


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    with small_disk.mounted(tmp_path / "small", "1m") as place:
        recorder = Recorder(place)
        recorder.begin()
        recorder.end([mine("before")])
        big = small_disk.fill(place)
        recorder.end([mine("full", job="x" * 250)])
        recorder.sample([mine("open", held_s=5.0)])
        assert "No space" in str(recorder.trouble)
        big.unlink()
        recorder._tried_at = -1e9
        recorder.sample([mine("open", held_s=6.0)])
        assert not recorder.trouble
        assert read(place) == {"before": 100.0, "full": 100.0, "open": 6.0}
        recorder.close([mine("open", held_s=7.0)])
        assert read(place) == {"before": 100.0, "full": 100.0, "open": 7.0}


def test_a_line_that_a_full_disk_cut_off_spoils_no_other(folder: Path) -> None:
    recorder = Recorder(folder)
    recorder.end([mine("a")])
    (log,) = logs_in(folder)
    with log.path.open("ab") as file:
        file.write(line_of(mine("b"))[:40])
    recorder.end([mine("c")])
    assert read(folder) == {"a": 100.0, "c": 100.0}


def test_without_rights_nothing_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUHERD_MACHINE_DIR", "/proc/nowhere")
    recorder = Recorder()
    recorder.begin()
    recorder.sample([mine()])
    recorder.end([mine()])
    recorder.close()
    assert recorder.trouble is not None


def test_two_machines_on_one_home_have_ledgers_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUHERD_MACHINE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(machine_dir, "PLACE", tmp_path / "none")
    for host in ("one", "other"):
        machine_dir.machine_key.cache_clear()
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        recorder = Recorder()
        recorder.end([mine(host)])
        ledger = Ledger.existing()
        assert ledger is not None
        assert [record.use.id for record in ledger.read()] == [host]
    machine_dir.machine_key.cache_clear()


def test_a_clock_that_jumps_changes_no_length(folder: Path) -> None:
    recorder = Recorder(folder)
    recorder.sample([mine("a", since=1e9, held_s=50.0)])
    recorder.end([mine("a", since=5e8, held_s=60.0)])  # the clock was set back by years
    recorder.end([mine("b", since=2e9, held_s=60.0)])  # and ahead
    assert read(folder) == {"a": 60.0, "b": 60.0}


def test_full_logs_are_followed_by_further_ones(folder: Path) -> None:
    recorder = Recorder(folder)
    recorder.end([mine("a")])
    (log,) = logs_in(folder)
    with log.path.open("ab") as file:
        file.truncate(FULL_LOG)
        file.seek(FULL_LOG)
        file.write(b"\n")
    Recorder(folder).end([mine("b")])
    assert [log.number for log in logs_in(folder)] == [0, 1]
    assert read(folder) == {"a": 100.0, "b": 100.0}


# --- what others put there --------------------------------------------------------------------------------------------


def plant(path: Path, data: bytes, uid: int) -> None:
    path.write_bytes(data)
    os.chown(path, uid, uid)


needs_root = pytest.mark.skipif(ME != 0, reason="only root can make files of others")


@needs_root
def test_files_in_our_name_that_are_not_ours_are_left_alone(folder: Path) -> None:
    month = month_of(mine().until)
    plant(log_path(folder, ME, month, 0), b"", 4242)
    log_path(folder, ME, month, 1).symlink_to("/etc/passwd")
    os.mkfifo(log_path(folder, ME, month, 2))
    log_path(folder, ME, month, 3).mkdir()
    recorder = Recorder(folder)
    recorder.end([mine()])
    assert recorder.trouble is None
    assert read(folder) == {"a": 100.0}
    assert log_path(folder, ME, month, 0).read_bytes() == b""
    process = identify(os.getpid())
    assert process is not None
    plant(open_path(folder, ME, process, 0), b"{}", 4242)
    recorder.sample([mine("b")])
    assert recorder.trouble is None
    assert read(folder) == {"a": 100.0, "b": 100.0}


@needs_root
def test_a_strangers_word_counts_for_themself_alone(folder: Path) -> None:
    stranger, victim = 4242, 4343
    month = month_of(use().until)
    lines = [line_of(use("a", uid=victim)), line_of(use("b", uid=stranger)), line_of(use("c", uid=0))]
    plant(log_path(folder, victim, month, 0), b"".join(lines), stranger)
    ledger = Ledger(folder, shared=True, reader_uid=7)
    assert [(record.use.id, record.observer_uid) for record in ledger.read()] == [
        ("a", stranger),
        ("b", stranger),
        ("c", stranger),
    ]
    assert [record.use.id for record in believed(ledger.read(), 7)] == ["b"]
    assert {record.use.id for record in believed(ledger.read(), 7, others=True)} == {"a", "b", "c"}
    # Where the user says it themself, nobody else is heard; and nobody can change another's record.
    plant(log_path(folder, victim, month, 1), line_of(use("a", uid=victim, held_s=5.0)), victim)
    kept = {record.use.id: record.use.held_s for record in believed(ledger.read(), 7, others=True)}
    assert kept["a"] == 5.0


@needs_root
def test_planted_files_stop_no_reader(folder: Path) -> None:
    month = month_of(use().until)
    Recorder(folder).end([mine("good")])
    names = iter(range(900))

    def path() -> Path:
        return log_path(folder, 4242, month, next(names))

    path().symlink_to("/dev/zero")
    os.mkfifo(path())
    path().mkdir()
    endless = path()
    with endless.open("wb") as file:
        file.truncate(1 << 30)  # a gigabyte of one line
    plant(path(), b"\xff\xfe{\n" * 1000 + b"[" * 4000 + b"\n" + b'{"id": 1e999}\n', 4242)
    plant(path(), line_of(use("half", uid=4242))[:-20], 4242)
    double = path()
    os.link(logs_in(folder)[0].path, double)
    process = ProcessId(2**40, 2**70, "x")
    plant(open_path(folder, 4242, process, 0), b"{}\nx", 4242)
    plant(open_path(folder, 4242, dead(), 0), b"\x00" * 10, 4242)
    with open_path(folder, 4242, dead(), 0).open("wb") as file:
        file.truncate(1 << 30)
    began = time.monotonic()
    ledger = Ledger(folder, shared=True)
    names_read = [record.use.id for record in ledger.read()]
    double.unlink()
    assert time.monotonic() - began < 20
    assert names_read in ([], ["good"])  # a second name makes it doubtful, as long as it is there
    assert [record.use.id for record in ledger.read()] == ["good"]
    assert ledger.skipped[4242] > 1000


@needs_root
def test_a_line_behind_an_endless_one_is_read(folder: Path) -> None:
    month = month_of(use().until)
    plant(log_path(folder, 4242, month, 0), b"x" * 3_000_000 + b"\n" + line_of(use("after", uid=4242)), 4242)
    ledger = Ledger(folder, shared=True)
    assert [record.use.id for record in ledger.read()] == ["after"]
    assert ledger.skipped[4242] == 1


def test_nobody_displaces_anothers_record_by_its_id() -> None:
    alices = Recorded(use("x", uid=5, since=100.0, held_s=10.0), 5)
    forged = Recorded(use("x", uid=6, since=0.0, held_s=1e6), 6)
    found = {record.use.uid: record.use.held_s for record in believed([alices, forged], 7)}
    assert found == {5: 10.0, 6: 1e6}


def test_records_of_several_watchers_cover_each_moment_once(folder: Path) -> None:
    one = use("process/b/5-1/GPU-0/0", uid=5, since=0.0, held_s=100.0, kind=Kind.OTHER)
    records = [
        Recorded(one, 0),
        Recorded(replace(one, id="process/b/5-1/GPU-0/50", since=50.0, until=150.0), 7),
        Recorded(replace(one, id="process/b/5-1/GPU-0/400", since=400.0, until=410.0, held_s=10.0), 7),
    ]
    assert sum(record.use.held_s for record in believed(records[:2], 7)) == pytest.approx(150.0)
    assert sum(record.use.held_s for record in believed(records, 7)) == pytest.approx(160.0)
    assert sum(record.use.held_s for record in believed(records, 9)) == pytest.approx(100.0)
