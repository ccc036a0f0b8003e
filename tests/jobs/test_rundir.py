"""Paths of a run stay in their folders; files are whole or absent."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.atomic import append_line, atomic_write
from gpuherd.errors import CannotWrite
from gpuherd.jobs.run_dir import RunDirectory, safe_name


@given(st.text(max_size=400))
def test_a_name_becomes_one_plain_file_name(name: str) -> None:
    safe = safe_name(name)
    assert safe and len(safe) <= 120
    assert Path("/a", safe).name == safe
    assert not safe.startswith(".")
    assert safe.isascii()


@given(st.lists(st.text(alphabet="a/.-A;$", max_size=6), unique=True, max_size=30))
def test_two_names_are_two_files(names: list[str]) -> None:
    assert len({safe_name(name) for name in names}) == len(names)


def test_logs_can_lie_elsewhere(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "out", tmp_path / "logs")
    run.create()
    assert run.attempt_log("a/b", 2).parent == tmp_path / "logs"
    run.write_run_record({"command": ["x"], "when": Path("/y")})
    assert json.loads(run.run_json.read_text()) == {"command": ["x"], "when": "/y"}
    assert not (tmp_path / "out" / "logs").exists()


def test_what_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match=str(tmp_path / "file")):
        RunDirectory(tmp_path / "file").create()
    with pytest.raises(CannotWrite, match="/proc/gpuherd"):
        RunDirectory("/proc/gpuherd").create()


def test_strays_go_and_running_attempts_stay(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    for attempt in (999, 1000, 1001):
        run.attempt_status(attempt).touch()
        run.attempt_progress(attempt).touch()
    (run.attempts / "00001000.progress.77.tmp").touch()
    run.remove_attempt_files(999)
    run.remove_stray_attempt_files({1001})
    assert sorted(path.name for path in run.attempts.iterdir()) == ["000001.status", "00001001.progress"]


def test_atomic_write_keeps_to_the_umask_and_leaves_nothing_beside(tmp_path: Path) -> None:
    file = tmp_path / "f"
    atomic_write(file, b"one")
    atomic_write(file, b"two")
    mask = os.umask(0)
    os.umask(mask)
    assert file.read_bytes() == b"two"
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(OSError):
        atomic_write(tmp_path / "no" / "f", b"")


def test_a_reader_never_sees_half_a_file_whenever_the_writer_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "f"
    code = (
        "import sys; from pathlib import Path; from gpuherd.atomic import atomic_write\n"
        "print('up', flush=True)\n"
        "while True:\n for c in b'ab': atomic_write(Path(sys.argv[1]), bytes([c]) * 200_000)"
    )
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(50):
            if file.exists():
                data = file.read_bytes()
                assert len(data) == 200_000 and len(set(data)) == 1
            time.sleep(0.001)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()


def test_lines_of_two_writers_do_not_mix(tmp_path: Path) -> None:
    file = tmp_path / "f"
    code = (
        "import sys; from pathlib import Path; from gpuherd.atomic import append_line\n"
        "for _ in range(300): append_line(Path(sys.argv[1]), sys.argv[2] * 500)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(file), c]) for c in "ab"]
    assert all(writer.wait() == 0 for writer in writers)
    lines = file.read_text().splitlines()
    assert len(lines) == 600
    assert set(lines) == {"a" * 500, "b" * 500}
    append_line(file, "x\ny")
    assert file.read_text().endswith("x y\n")


def test_a_folder_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotWrite, match="no UTF-8 text"):
        RunDirectory(tmp_path / "r\udcff").create()


@pytest.mark.parametrize("word", ["{}", "--webhook={}"])
def test_what_was_asked_is_told_without_the_webhooks_address(tmp_path: Path, word: str) -> None:
    """Everybody who may read the folder could post there."""
    address = "https://chat.example.org/hooks/T0/secret?x=1"
    run = RunDirectory(tmp_path)
    run.write_run_record({"command": ["gpuherd", word.format(address)], "config": {"webhook": address, "max_gpus": 2}})
    told = json.loads(run.run_json.read_text())
    assert "secret" not in run.run_json.read_text()
    assert told["config"] == {"webhook": "https://chat.example.org/...", "max_gpus": 2}
    assert told["command"][1] == word.format("https://chat.example.org/...")


def test_what_was_asked_is_for_its_owner_alone_where_setup_lines_are_in_it(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        run = RunDirectory(tmp_path)
        run.write_run_record({"config": {"setup": ["export TOKEN=x"]}})
        assert stat.S_IMODE(run.run_json.stat().st_mode) == 0o600
        run.write_run_record({"config": {"setup": []}})
        assert stat.S_IMODE(run.run_json.stat().st_mode) == 0o644
    finally:
        os.umask(mask)
